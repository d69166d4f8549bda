// What the upper layers need of a GPU without knowing its programming interface: which there are,
// memory and copies, streams and graphs. Backends of a device give the one implementation. The CPU
// has none: its memory is the host's and its calls have finished when they return.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

#include "cadre/allocator.h"
#include "cadre/device.h"
#include "cadre/dtype.h"
#include "cadre/function_ref.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre {

class ThreadPool;

struct DeviceProperties {
  std::string name;  // "NVIDIA H200"
  int major = 0;     // compute capability
  int minor = 0;
  int num_multiprocessors = 0;
  size_t memory_bytes = 0;
  size_t l2_bytes = 0;
};

struct DeviceMemory {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
};

/// One tensor on its way from host memory to a device, converted from one dtype to another (equal,
/// or both float32, bfloat16 or float16).
struct Upload {
  const void* from = nullptr;  // on the host, contiguous
  DType from_dtype = DType::kF32;
  void* to = nullptr;  // on the device
  DType to_dtype = DType::kF32;
  int64_t count = 0;  // elements
};

/// Work that was recorded once and is launched again and again.
class DeviceGraph {
 public:
  virtual ~DeviceGraph() = default;
  virtual void launch(const Stream& stream) = 0;
};

/// A place in a stream that the host can wait for while the stream goes on.
class DeviceEvent {
 public:
  virtual ~DeviceEvent() = default;
  /// Marks where the stream is now.
  virtual void record(const Stream& stream) = 0;
  /// Waits until the work before the place last recorded is done; reports faults of that work.
  virtual void wait() = 0;
};

/// A stream of its own that ends with the object.
class DeviceStream {
 public:
  virtual ~DeviceStream() = default;
  virtual const Stream& get() const = 0;
};

/// All calls throw DeviceError naming the operation, the device and what the driver said.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;

  /// Why no device can be used ("no NVIDIA driver was found ..."); empty when device_count() > 0.
  virtual const std::string& why_none() const = 0;
  virtual int device_count() const = 0;
  virtual DeviceProperties properties(int index) const = 0;
  virtual DeviceMemory memory(int index) const = 0;
  /// Which kernels serve a device: "sm_90a" where there are some of its own, "portable" where those
  /// for all serve; empty when it is older than any of them.
  virtual std::string kernels(int index) const = 0;
  /// What dense products run on: "cuBLASLt 13.1.0 (FILE)", or "own kernels (no libcublasLt ...)".
  virtual std::string products() const = 0;

  /// Makes a device the calling thread's current one; returns the one that was.
  virtual int make_current(int index) = 0;

  virtual Allocator& allocator() = 0;
  /// Host memory that copies to and from the device do not have to stage.
  virtual std::shared_ptr<void> allocate_pinned(size_t bytes) = 0;

  virtual std::unique_ptr<DeviceStream> make_stream(int index, ThreadPool* threads) = 0;
  virtual std::unique_ptr<DeviceEvent> make_event(int index) = 0;
  /// Waits until all work of the stream is done; reports faults of that work.
  virtual void synchronize(const Stream& stream) = 0;

  /// In order of the stream. One side is device memory, the other device or host memory; pinned
  /// host memory must stay as it is until the stream has come to the copy.
  virtual void copy(void* to, const void* from, size_t bytes, const Stream& stream) = 0;
  virtual void fill(void* to, uint8_t value, size_t bytes, const Stream& stream) = 0;

  /// Copies many tensors through pinned buffers, the host side read by `threads`; `on_bytes` is
  /// told how many bytes have come to the device so far. All is there when it returns.
  virtual void upload(std::span<const Upload> uploads, int index, ThreadPool& threads,
                      FunctionRef<void(int64_t bytes)> on_bytes) = 0;

  /// Seconds on the device between the first and the last thing that `work` puts into the stream,
  /// measured there.
  virtual double time(const Stream& stream, FunctionRef<void()> work) = 0;

  /// Records what `work` puts into the stream, running none of it. `work` must not synchronize,
  /// allocate or read what the device computes. When it throws, nothing is recorded and the stream
  /// is as before.
  virtual std::unique_ptr<DeviceGraph> capture(const Stream& stream, FunctionRef<void()> work) = 0;
};

/// Makes a device current for a scope: kernels are launched on the current one. Nothing on the CPU.
class CurrentDevice {
 public:
  explicit CurrentDevice(Device device);
  ~CurrentDevice();
  CurrentDevice(const CurrentDevice&) = delete;
  CurrentDevice& operator=(const CurrentDevice&) = delete;

 private:
  DeviceRuntime* runtime_ = nullptr;
  int before_ = 0;
};

/// Null when this build has none for the device type (always for the CPU).
DeviceRuntime* find_device_runtime(DeviceType type);

/// Throws Unsupported when this build has none, DeviceError with the reason when the device cannot
/// be used (no driver, no such number), saying which can.
DeviceRuntime& device_runtime(Device device);

/// A stream of any device: the CPU's over `threads`, which must outlive it, or a new one of a GPU.
class OwnedStream {
 public:
  OwnedStream(Device device, ThreadPool& threads);
  const Stream& get() const { return gpu_ ? gpu_->get() : cpu_; }

 private:
  Stream cpu_;
  std::unique_ptr<DeviceStream> gpu_;
};

/// Copies between a host and a device tensor or two tensors of one device, in the order of the
/// stream; shapes and dtypes are equal, both contiguous. On the CPU a plain copy.
void copy_tensor(const TensorView& from, const MutableTensorView& to, const Stream& stream);

/// All bytes of a contiguous tensor become zero, in the order of the stream.
void clear_tensor(const MutableTensorView& tensor, const Stream& stream);

/// A copy of a contiguous tensor on the other side: on the stream's device, or on the host. In the
/// order of the stream; the tensor it is made of must stay until then.
Tensor to_device_of(const Stream& stream, const TensorView& host);
Tensor to_host(const Stream& stream, const TensorView& tensor);

/// Waits for the stream; nothing to do on the CPU.
void synchronize(const Stream& stream);

}  // namespace cadre

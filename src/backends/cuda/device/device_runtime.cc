#include "backends/cuda/device/device_runtime.h"

#include <algorithm>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/cublas_lt.h"
#include "backends/cuda/device/event.h"
#include "backends/cuda/device/upload.h"
#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

// Plain cudaMalloc and no pool: memory is taken between forwards only, in few large blocks
// (weights, caches, workspaces), and what is given back is the system's again at once. cudaFree
// waits for work that still uses the block. Blocks end at multiples of 16 bytes, as kernels read
// whole words of what is stored in bytes.
class CudaAllocator final : public Allocator {
 public:
  void* allocate(Device device, size_t bytes) override {
    const DeviceGuard guard(device.index);
    void* memory = nullptr;
    const cudaError_t result = cudaMalloc(&memory, (std::max<size_t>(bytes, 1) + 15) / 16 * 16);
    if (result == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      DeviceMemory left;
      CADRE_CUDA_CHECK(cudaMemGetInfo(&left.free_bytes, &left.total_bytes));
      throw DeviceError(str_cat(
          to_string(device), " memory: could not allocate ", bytes, " bytes (", format_bytes(bytes),
          "), ", format_bytes(left.free_bytes), " of ", format_bytes(left.total_bytes),
          " is free; use a smaller model, batch or context, or another GPU"));
    }
    check(result, "cudaMalloc", __FILE__, __LINE__);
    return memory;
  }
  void deallocate(Device /*device*/, void* memory) noexcept override { cudaFree(memory); }
};

class CudaStream final : public DeviceStream {
 public:
  CudaStream(int index, ThreadPool* threads) {
    const DeviceGuard guard(index);
    cudaStream_t handle = nullptr;
    CADRE_CUDA_CHECK(cudaStreamCreateWithFlags(&handle, cudaStreamNonBlocking));
    stream_ = {{DeviceType::kCuda, index}, threads, handle};
  }
  ~CudaStream() override { cudaStreamDestroy(stream_of(stream_)); }
  const Stream& get() const override { return stream_; }

 private:
  Stream stream_;
};

class CudaEvent final : public DeviceEvent {
 public:
  void record(const Stream& stream) override { event_.record(stream_of(stream)); }
  void wait() override { event_.synchronize(); }

 private:
  Event event_{cudaEventDisableTiming};
};

class CudaGraph final : public DeviceGraph {
 public:
  explicit CudaGraph(cudaGraph_t graph) {
    const cudaError_t result = cudaGraphInstantiate(&exec_, graph, 0);
    cudaGraphDestroy(graph);
    check(result, "cudaGraphInstantiate", __FILE__, __LINE__);
  }
  ~CudaGraph() override { cudaGraphExecDestroy(exec_); }
  void launch(const Stream& stream) override {
    const DeviceGuard guard(stream.device.index);
    CADRE_CUDA_CHECK(cudaGraphLaunch(exec_, stream_of(stream)));
  }

 private:
  cudaGraphExec_t exec_ = nullptr;
};

// Why the runtime sees no device at all.
std::string why_no_device(cudaError_t result) {
  cudaGetLastError();
  int driver = 0;
  if (cudaDriverGetVersion(&driver) != cudaSuccess || driver == 0) {
    return "no NVIDIA driver was found";
  }
  const auto version = [](int v) { return str_cat(v / 1000, ".", v % 1000 / 10); };
  if (result == cudaErrorInsufficientDriver) {
    return str_cat("the NVIDIA driver serves CUDA ", version(driver), ", this build needs ",
                   version(CUDART_VERSION), "; update the driver");
  }
  return result == cudaSuccess || result == cudaErrorNoDevice
             ? std::string("no NVIDIA GPU was found")
             : str_cat("no usable NVIDIA GPU: ", cudaGetErrorString(result));
}

class CudaRuntime final : public DeviceRuntime {
 public:
  CudaRuntime() {
    int count = 0;
    const cudaError_t result = cudaGetDeviceCount(&count);
    if (result != cudaSuccess || count == 0) {
      why_none_ = why_no_device(result);
      return;
    }
    for (int i = 0; i < count; ++i) {
      cudaDeviceProp p;
      CADRE_CUDA_CHECK(cudaGetDeviceProperties(&p, i));
      properties_.push_back({p.name, p.major, p.minor, p.multiProcessorCount, p.totalGlobalMem,
                             static_cast<size_t>(p.l2CacheSize)});
    }
  }

  const std::string& why_none() const override { return why_none_; }
  int device_count() const override { return static_cast<int>(properties_.size()); }
  DeviceProperties properties(int index) const override { return at(index); }
  const DeviceProperties& at(int index) const {
    if (index < 0 || index >= device_count()) {
      throw DeviceError(str_cat(to_string(Device{DeviceType::kCuda, index}), ": ",
                                device_count() == 0
                                    ? why_none_
                                    : str_cat("this machine has only ", device_count(), " GPUs")));
    }
    return properties_[static_cast<size_t>(index)];
  }
  DeviceMemory memory(int index) const override {
    const DeviceGuard guard(index);
    DeviceMemory memory;
    CADRE_CUDA_CHECK(cudaMemGetInfo(&memory.free_bytes, &memory.total_bytes));
    return memory;
  }
  std::string kernels(int index) const override {
    const DeviceProperties& p = at(index);
    if (p.major == 9 && p.minor == 0) return "sm_90a";
    return p.major >= 8 ? "portable" : "";
  }
  std::string products() const override {
    const CublasLt* lib = find_cublas_lt();
    return lib != nullptr ? str_cat("cuBLASLt ", lib->version, " (", lib->file, ")")
                          : str_cat("own kernels (", why_no_cublas_lt(), ")");
  }
  int make_current(int index) override {
    int before = 0;
    CADRE_CUDA_CHECK(cudaGetDevice(&before));
    if (index != before) CADRE_CUDA_CHECK(cudaSetDevice(index));
    return before;
  }
  Allocator& allocator() override { return allocator_; }

  std::shared_ptr<void> allocate_pinned(size_t bytes) override {
    void* memory = nullptr;
    // Portable: any device's copies take it.
    const cudaError_t result =
        cudaHostAlloc(&memory, std::max<size_t>(bytes, 1), cudaHostAllocPortable);
    if (result == cudaErrorMemoryAllocation) {
      cudaGetLastError();
      throw DeviceError(str_cat("pinned host memory: could not allocate ", bytes, " bytes (",
                                format_bytes(bytes),
                                "); free host memory, or raise the limit on "
                                "locked memory (ulimit -l)"));
    }
    check(result, "cudaHostAlloc", __FILE__, __LINE__);
    return {memory, [](void* p) { cudaFreeHost(p); }};
  }

  std::unique_ptr<DeviceStream> make_stream(int index, ThreadPool* threads) override {
    return std::make_unique<CudaStream>(index, threads);
  }

  std::unique_ptr<DeviceEvent> make_event(int index) override {
    const DeviceGuard guard(index);
    return std::make_unique<CudaEvent>();
  }

  void synchronize(const Stream& stream) override {
    const DeviceGuard guard(stream.device.index);
    CADRE_CUDA_CHECK(cudaStreamSynchronize(stream_of(stream)));
  }

  void copy(void* to, const void* from, size_t bytes, const Stream& stream) override {
    const DeviceGuard guard(stream.device.index);
    CADRE_CUDA_CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream_of(stream)));
  }

  void fill(void* to, uint8_t value, size_t bytes, const Stream& stream) override {
    const DeviceGuard guard(stream.device.index);
    CADRE_CUDA_CHECK(cudaMemsetAsync(to, value, bytes, stream_of(stream)));
  }

  void upload(std::span<const Upload> uploads, int index, ThreadPool& threads,
              FunctionRef<void(int64_t bytes)> on_bytes) override {
    cuda::upload(uploads, index, threads, on_bytes);
  }

  double time(const Stream& stream, FunctionRef<void()> work) override {
    const DeviceGuard guard(stream.device.index);
    struct Events {
      cudaEvent_t begin = nullptr;
      cudaEvent_t end = nullptr;
      ~Events() {
        if (begin != nullptr) cudaEventDestroy(begin);
        if (end != nullptr) cudaEventDestroy(end);
      }
    } events;
    CADRE_CUDA_CHECK(cudaEventCreate(&events.begin));
    CADRE_CUDA_CHECK(cudaEventCreate(&events.end));
    CADRE_CUDA_CHECK(cudaEventRecord(events.begin, stream_of(stream)));
    work();
    CADRE_CUDA_CHECK(cudaEventRecord(events.end, stream_of(stream)));
    CADRE_CUDA_CHECK(cudaEventSynchronize(events.end));
    float milliseconds = 0;
    CADRE_CUDA_CHECK(cudaEventElapsedTime(&milliseconds, events.begin, events.end));
    return static_cast<double>(milliseconds) / 1e3;
  }

  std::unique_ptr<DeviceGraph> capture(const Stream& stream, FunctionRef<void()> work) override {
    const DeviceGuard guard(stream.device.index);
    CADRE_CUDA_CHECK(cudaStreamBeginCapture(stream_of(stream), cudaStreamCaptureModeThreadLocal));
    cudaGraph_t graph = nullptr;
    try {
      work();
    } catch (...) {
      cudaStreamEndCapture(stream_of(stream), &graph);
      if (graph != nullptr) cudaGraphDestroy(graph);
      cudaGetLastError();
      throw;
    }
    CADRE_CUDA_CHECK(cudaStreamEndCapture(stream_of(stream), &graph));
    return std::make_unique<CudaGraph>(graph);
  }

 private:
  std::string why_none_;
  std::vector<DeviceProperties> properties_;
  CudaAllocator allocator_;
};

CudaRuntime& runtime() {
  static CudaRuntime& instance = *new CudaRuntime;  // outlives every object that holds memory
  return instance;
}

}  // namespace

DeviceRuntime& device_runtime() { return runtime(); }

const DeviceProperties& properties_of(int index) { return runtime().at(index); }

int compute_capability(int index) {
  if (index < 0 || index >= runtime().device_count()) return 0;
  const DeviceProperties& p = runtime().at(index);
  return 10 * p.major + p.minor;
}

}  // namespace cadre::cuda

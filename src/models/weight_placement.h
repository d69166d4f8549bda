// Copies of a checkpoint's weights: on a GPU of all of them, in the compute dtype (a few in
// float32) or, quantised, byte by byte; on the CPU of what the model does not read where it lies:
// weights that are dequantised, scales in a container that no kernel reads. One block of memory,
// every tensor at an aligned place, in the order in which the model asked for them: experts of a
// layer that the hub stores one by one lie evenly in it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/model.h"
#include "cadre/quantization.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"

namespace cadre {

/// What progress callbacks are told while weights are copied; counted in MiB.
inline constexpr std::string_view kLoadingWeights = "loading weights";

class WeightPlacement {
 public:
  static constexpr size_t kAlignment = 256;

  WeightPlacement(Device device, DType dtype) : device_(device), dtype_(dtype) {}

  /// Plans a place for a tensor on the host, in the compute dtype or another (one that it can be
  /// converted to on its way: see Upload); a name that is known keeps its place.
  void add(const std::string& name, const TensorView& host, std::string_view part) {
    add(name, host, part, dtype_);
  }
  void add(const std::string& name, const TensorView& host, std::string_view part, DType dtype);
  /// The same for a quantised weight that is dequantised to this dtype and shape (of as many
  /// elements). Scales in any container.
  void add_dequantized(const std::string& name, const QuantizedTensor& weight,
                       std::string_view part, DType dtype, const Dims& shape);
  /// The same for scales that come to another dtype, F32 or F8_E8M0.
  void add_scales(const std::string& name, const TensorView& host, std::string_view part,
                  DType dtype);

  Device device() const { return device_; }
  bool empty() const { return places_.empty(); }

  /// Takes the memory and brings the tensors into it. Throws DeviceError, before it begins, saying
  /// how much is needed for what, when the device has less; CheckpointError naming a scale that has
  /// no value in its new dtype.
  void load(ThreadPool& threads, const ProgressCallback& progress);

  bool holds(const std::string& name) const { return index_.count(name) != 0; }
  /// On the device; valid after load().
  TensorView view(const std::string& name) const;
  std::shared_ptr<const void> owner() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  enum class How : uint8_t { kUpload, kDequantize, kScales };
  struct Place {
    std::string name;
    How how;
    TensorView host;
    QuantizedTensor quantized;
    DType dtype;
    Dims shape;
    size_t offset;

    size_t bytes() const { return static_cast<size_t>(num_elements(shape)) * size_of(dtype); }
    // As its source has it: [2 E, N / 2, K] where the place is [E, N, K], say.
    Dims result_shape() const;
    void convert(const MutableTensorView& out, ThreadPool& threads) const;
  };

  void add(Place place, std::string_view part);
  void require_memory() const;
  void load_on_host(ThreadPool& threads, const ProgressCallback& progress);
  void upload(ThreadPool& threads, const ProgressCallback& progress);
  char* at(const Place& place) const { return static_cast<char*>(memory_.get()) + place.offset; }

  Device device_;
  DType dtype_;
  std::vector<Place> places_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, size_t, std::less<>> bytes_of_part_;
  size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
};

}  // namespace cadre

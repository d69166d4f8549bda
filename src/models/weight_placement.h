// A checkpoint's weights in the memory of a GPU: one block, every tensor in the compute dtype (a
// few in float32) at an aligned place, in the order in which the model asked for them. Experts of a
// layer that the hub stores one by one lie evenly in it.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/model.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"

namespace cadre {

/// What progress callbacks are told while weights stream to a GPU; counted in MiB.
inline constexpr std::string_view kLoadingWeights = "loading weights";

class WeightPlacement {
 public:
  static constexpr size_t kAlignment = 256;

  WeightPlacement(Device device, DType dtype) : device_(device), dtype_(dtype) {}

  /// Plans a place for a tensor on the host, in the compute dtype or another; a name that is known
  /// keeps its place.
  void add(const std::string& name, const TensorView& host, std::string_view part) {
    add(name, host, part, dtype_);
  }
  void add(const std::string& name, const TensorView& host, std::string_view part, DType dtype);

  /// Takes the memory and streams the tensors into it. Throws DeviceError, before it begins, saying
  /// how much is needed for what, when the device has less.
  void load(ThreadPool& threads, const ProgressCallback& progress);

  /// On the device; valid after load().
  TensorView view(const std::string& name) const;
  std::shared_ptr<const void> owner() const { return memory_; }
  size_t bytes() const { return bytes_; }

 private:
  struct Place {
    TensorView host;
    size_t offset;
    DType dtype;
  };

  void require_memory() const;

  Device device_;
  DType dtype_;
  std::vector<Place> places_;
  std::map<std::string, size_t, std::less<>> index_;
  std::map<std::string, size_t, std::less<>> bytes_of_part_;
  size_t bytes_ = 0;
  std::shared_ptr<void> memory_;
};

}  // namespace cadre

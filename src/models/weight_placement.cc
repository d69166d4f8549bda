#include "models/weight_placement.h"

#include "cadre/allocator.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {

void WeightPlacement::add(const std::string& name, const TensorView& host, std::string_view part,
                          DType dtype) {
  if (!index_.try_emplace(name, places_.size()).second) return;
  places_.push_back({host, bytes_, dtype});
  const size_t bytes = static_cast<size_t>(host.numel()) * size_of(dtype);
  const size_t padded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
  bytes_ += padded;
  bytes_of_part_[std::string(part)] += padded;
}

void WeightPlacement::require_memory() const {
  const size_t free = device_runtime(device_).memory(device_.index).free_bytes;
  if (bytes_ <= free) return;
  std::vector<std::string> parts;
  for (const auto& [part, bytes] : bytes_of_part_) {
    parts.push_back(str_cat(part, " ", format_bytes(bytes)));
  }
  throw DeviceError(str_cat("loading: the weights in ", name_of(dtype_), " need ",
                            format_bytes(bytes_), " of memory on ", to_string(device_), " (",
                            join(parts), "), ", format_bytes(free),
                            " is free; use another GPU, a smaller dtype or --device cpu"));
}

void WeightPlacement::load(ThreadPool& threads, const ProgressCallback& progress) {
  require_memory();
  memory_ = allocate_shared_memory(device_, bytes_);
  std::vector<Upload> uploads;
  for (const Place& place : places_) {
    uploads.push_back({place.host.data(), place.host.dtype(),
                       static_cast<char*>(memory_.get()) + place.offset, place.dtype,
                       place.host.numel()});
  }
  constexpr int64_t kMiB = int64_t{1} << 20;
  const auto total = static_cast<int64_t>(bytes_);
  device_runtime(device_).upload(uploads, device_.index, threads, [&](int64_t bytes) {
    if (progress) progress(kLoadingWeights, bytes / kMiB, total / kMiB);
  });
  if (progress) progress(kLoadingWeights, total / kMiB, total / kMiB);
}

TensorView WeightPlacement::view(const std::string& name) const {
  const auto found = index_.find(name);
  CADRE_ASSERT(found != index_.end() && memory_ != nullptr);
  const Place& place = places_[found->second];
  return {static_cast<const char*>(memory_.get()) + place.offset, place.dtype, place.host.shape(),
          device_};
}

}  // namespace cadre

#include "models/weight_placement.h"

#include <cstring>
#include <optional>
#include <utility>

#include "cadre/allocator.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"
#include "models/host_memory.h"

namespace cadre {
namespace {

constexpr int64_t kMiB = int64_t{1} << 20;

// Host memory that holds what is converted for a GPU until it has been sent.
constexpr size_t kStagedBytes = size_t{256} << 20;

// Tells how many bytes are there, in MiB.
class Progress {
 public:
  Progress(const ProgressCallback& callback, size_t total)
      : callback_(callback), total_(static_cast<int64_t>(total)) {}

  void at(int64_t bytes) const {
    if (callback_) callback_(kLoadingWeights, bytes / kMiB, total_ / kMiB);
  }
  void done() const { at(total_); }

 private:
  const ProgressCallback& callback_;
  int64_t total_;
};

}  // namespace

void WeightPlacement::add(const std::string& name, const TensorView& host, std::string_view part,
                          DType dtype) {
  add({name, How::kUpload, host, {}, dtype, host.shape(), 0}, part);
}

void WeightPlacement::add_dequantized(const std::string& name, const QuantizedTensor& weight,
                                      std::string_view part, DType dtype, const Dims& shape) {
  add({name, How::kDequantize, {}, weight, dtype, shape, 0}, part);
}

void WeightPlacement::add_scales(const std::string& name, const TensorView& host,
                                 std::string_view part, DType dtype) {
  add({name, How::kScales, host, {}, dtype, host.shape(), 0}, part);
}

void WeightPlacement::add(Place place, std::string_view part) {
  if (!index_.try_emplace(place.name, places_.size()).second) return;
  place.offset = bytes_;
  const size_t padded = (place.bytes() + kAlignment - 1) / kAlignment * kAlignment;
  bytes_ += padded;
  bytes_of_part_[std::string(part)] += padded;
  places_.push_back(std::move(place));
}

void WeightPlacement::require_memory() const {
  const bool on_cpu = device_.type == DeviceType::kCpu;
  const std::optional<size_t> free =
      on_cpu ? available_host_memory()
             : std::optional(device_runtime(device_).memory(device_.index).free_bytes);
  if (!free || bytes_ <= *free) return;
  std::vector<std::string> parts;
  for (const auto& [part, bytes] : bytes_of_part_) {
    parts.push_back(str_cat(part, " ", format_bytes(bytes)));
  }
  throw DeviceError(str_cat(
      "loading: the ", on_cpu ? "dequantised weights" : "weights", " in ", name_of(dtype_),
      " need ", format_bytes(bytes_), " of memory on ", to_string(device_), " (", join(parts),
      "), ", format_bytes(*free), " is free; ",
      on_cpu ? "load them as they are stored, without dequantising, or use a machine with more"
             : "use another GPU, a smaller dtype or --device cpu"));
}

Dims WeightPlacement::Place::result_shape() const {
  if (how != How::kDequantize) return shape;
  const TensorView& values = quantized.values;
  const int64_t columns = shape[shape.rank() - 1];
  return values.rank() == 2 ? Dims{values.dim(0), columns}
                            : Dims{values.dim(0), values.dim(1), columns};
}

void WeightPlacement::Place::convert(const MutableTensorView& out, ThreadPool& threads) const {
  Tensor storage;
  try {
    if (how == How::kScales) {
      const TensorView converted = convert_scales(name, host, dtype, storage);
      std::memcpy(out.mutable_data(), converted.data(), converted.nbytes());
      return;
    }
    QuantizedTensor weight = quantized;
    weight.scales = convert_scales(name, quantized.scales, quantized.layout.dtype, storage);
    dequantize(weight, out, &threads);
  } catch (const InvalidArgument& error) {
    throw CheckpointError(str_cat("loading: ", error.what()));
  }
}

void WeightPlacement::load(ThreadPool& threads, const ProgressCallback& progress) {
  require_memory();
  memory_ = allocate_shared_memory(device_, bytes_);
  if (device_.type == DeviceType::kCpu) {
    load_on_host(threads, progress);
  } else {
    upload(threads, progress);
  }
}

void WeightPlacement::load_on_host(ThreadPool& threads, const ProgressCallback& progress) {
  const Progress report(progress, bytes_);
  for (const Place& place : places_) {
    CADRE_ASSERT(place.how != How::kUpload);
    place.convert({at(place), place.dtype, place.result_shape()}, threads);
    report.at(static_cast<int64_t>(place.offset + place.bytes()));
  }
  report.done();
}

void WeightPlacement::upload(ThreadPool& threads, const ProgressCallback& progress) {
  const Progress report(progress, bytes_);
  std::vector<Upload> uploads;
  std::vector<Tensor> staged;  // what uploads point to, where it is not in a file
  size_t staged_bytes = 0;
  int64_t sent = 0;
  const auto flush = [&] {
    int64_t arrived = 0;
    device_runtime(device_).upload(uploads, device_.index, threads, [&](int64_t bytes) {
      arrived = bytes;
      report.at(sent + bytes);
    });
    sent += arrived;
    uploads.clear();
    staged.clear();
    staged_bytes = 0;
  };
  for (const Place& place : places_) {
    TensorView from = place.host;
    if (place.how != How::kUpload) {
      if (staged_bytes > 0 && staged_bytes + place.bytes() > kStagedBytes) flush();
      const Tensor& copy = staged.emplace_back(place.dtype, place.result_shape());
      place.convert(copy, threads);
      staged_bytes += place.bytes();
      from = copy.view();
    }
    uploads.push_back({from.data(), from.dtype(), at(place), place.dtype, from.numel()});
  }
  flush();
  report.done();
}

TensorView WeightPlacement::view(const std::string& name) const {
  const auto found = index_.find(name);
  CADRE_ASSERT(found != index_.end() && memory_ != nullptr);
  const Place& place = places_[found->second];
  return {at(place), place.dtype, place.shape, device_};
}

}  // namespace cadre

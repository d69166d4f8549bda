#include "models/image_inputs.h"

#include <algorithm>

#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "core/checked_math.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

std::string text_of(const ImageGrid& grid) { return str_cat(grid.t, " x ", grid.h, " x ", grid.w); }

// Empty when the product does not fit in 63 bits.
std::optional<int64_t> num_patches(const ImageGrid& grid) {
  const std::optional<int64_t> area = checked_multiply(grid.h, grid.w);
  return area ? checked_multiply(grid.t, *area) : std::nullopt;
}

}  // namespace

int64_t RopeShift::at(int64_t length) const {
  int64_t shift = 0;
  for (const auto& [from, value] : changes_) {
    if (from <= length) shift = value;
  }
  return shift;
}

void RopeShift::truncate(int64_t length) {
  while (!changes_.empty() && changes_.back().first > length) changes_.pop_back();
}

ImageInputs::ImageInputs(VisionTower tower, TokenId image_token_id, Device device)
    : tower_(std::move(tower)),
      image_token_id_(image_token_id),
      workspace_(device),
      features_(static_cast<size_t>(tower_.num_features())) {}

int64_t ImageInputs::tokens_of(const ImageGrid& grid) const {
  return grid.t * grid.h * grid.w / tower_.config().patches_per_token();
}

void ImageInputs::check_grids(const ForwardInput& input) const {
  const VisionConfig& config = tower_.config();
  std::optional<int64_t> values = 0;
  for (size_t i = 0; i < input.image_grids.size(); ++i) {
    const ImageGrid& grid = input.image_grids[i];
    const std::optional<int64_t> patches = num_patches(grid);
    if (grid.t < 1 || grid.h < 1 || grid.w < 1 || grid.h % config.merge_size != 0 ||
        grid.w % config.merge_size != 0 || !patches) {
      throw InvalidArgument(str_cat("forward: image ", i, ": grid ", text_of(grid),
                                    ": expected height and width in multiples of ",
                                    config.merge_size,
                                    " patches; use the model's image processor"));
    }
    const std::optional<int64_t> more = checked_multiply(*patches, config.patch_width);
    values = more && values ? checked_add(*values, *more) : std::nullopt;
  }
  if (values == static_cast<int64_t>(input.pixel_values.size())) return;
  throw InvalidArgument(
      str_cat("forward: the grids of ", input.image_grids.size(), " images ask for ",
              values ? str_cat(*values) : "more than 2^63", " pixel values in patches of ",
              config.patch_width, ", got ", input.pixel_values.size(),
              "; grids and pixel values must come from one run of the image processor"));
}

void ImageInputs::check(const ForwardInput& input) const {
  if (input.image_grids.empty() && input.pixel_values.empty()) return;
  check_grids(input);
  size_t image = 0;
  int64_t first = 0;
  for (size_t s = 0; s < input.num_tokens.size(); ++s) {
    const auto ids = input.token_ids.subspan(static_cast<size_t>(first),
                                             static_cast<size_t>(input.num_tokens[s]));
    first += input.num_tokens[s];
    for (auto at = ids.begin(); at != ids.end();) {
      if (*at != image_token_id_) {
        ++at;
        continue;
      }
      if (image == input.image_grids.size()) {
        throw InvalidArgument(str_cat("forward: sequence ", s, " has placeholders (token ",
                                      image_token_id_, ") of more images than the ", image,
                                      " given; give one image for each"));
      }
      const int64_t wanted = tokens_of(input.image_grids[image]);
      const auto end = std::find_if(at, at + std::min<int64_t>(wanted, ids.end() - at),
                                    [&](TokenId id) { return id != image_token_id_; });
      if (end - at != wanted) {
        throw InvalidArgument(str_cat(
            "forward: image ", image, ", grid ", text_of(input.image_grids[image]), ", takes ",
            wanted, " placeholders (token ", image_token_id_, "), sequence ", s, " has ", end - at,
            " in its place; expand each image's placeholder to its number of tokens"));
      }
      at = end;
      ++image;
    }
  }
  if (image == input.image_grids.size()) return;
  throw InvalidArgument(str_cat("forward: ", input.image_grids.size(), " images, but the text has ",
                                "placeholders (token ", image_token_id_, ") of ", image,
                                "; put one in the text for each image"));
}

void ImageInputs::run_tower(const ForwardInput& input, const Stream& stream) {
  const VisionConfig& config = tower_.config();
  int64_t tokens = 0;
  int64_t largest = 0;
  for (const ImageGrid& grid : input.image_grids) {
    tokens += tokens_of(grid);
    largest = std::max(largest, grid.h * grid.w);
  }
  if (tokens == 0) return;
  workspace_.reserve(tower_.workspace_bytes(largest, stream.threads->num_threads()));
  for (Tensor& feature : features_) {
    if (feature && feature->dim(0) >= tokens) continue;
    feature = Tensor(config.compute_dtype, {tokens, config.out_hidden_size}, stream.device);
  }
  std::span<const float> pixels = input.pixel_values;
  std::vector<MutableTensorView> outs(features_.size());
  int64_t done = 0;
  for (const ImageGrid& grid : input.image_grids) {
    const int64_t count = grid.h * grid.w / config.patches_per_token();
    const auto values = static_cast<size_t>(grid.h * grid.w * config.patch_width);
    for (int64_t frame = 0; frame < grid.t; ++frame) {
      for (size_t i = 0; i < outs.size(); ++i) outs[i] = features_[i]->slice(done, done + count);
      tower_.forward(pixels.first(values), grid.h, grid.w, outs, workspace_, stream);
      pixels = pixels.subspan(values);
      done += count;
    }
  }
}

void ImageInputs::place(const std::array<int64_t, kRopeAxes>& position) {
  for (const int64_t axis : position) positions_.push_back(static_cast<int32_t>(axis));
}

void ImageInputs::place_sequence(const ForwardInput& input, int64_t first, int64_t count,
                                 int64_t length, RopeShift& shift) {
  const int64_t merge = tower_.config().merge_size;
  int64_t position = length + shift.at(length);
  for (int64_t i = first; i < first + count;) {
    const bool is_image = next_grid_ < input.image_grids.size() &&
                          input.token_ids[static_cast<size_t>(i)] == image_token_id_;
    if (!is_image) {
      place({position, position, position});
      ++position;
      ++i;
      continue;
    }
    const ImageGrid& grid = input.image_grids[next_grid_++];
    for (int64_t t = 0; t < grid.t; ++t) {
      for (int64_t y = 0; y < grid.h / merge; ++y) {
        for (int64_t x = 0; x < grid.w / merge; ++x) {
          place({position + t, position + y, position + x});
          image_rows_.push_back(static_cast<int32_t>(i++));
        }
      }
    }
    position += std::max(grid.h, grid.w) / merge;
    const int64_t end = length + i - first;
    shift.add(end, position - end);
  }
}

void ImageInputs::begin(const ForwardInput& input, std::span<const int64_t> lengths,
                        std::span<const RopeShift> shifts, const Stream& stream) {
  positions_.clear();
  image_rows_.clear();
  next_grid_ = 0;
  shifts_.assign(shifts.begin(), shifts.end());
  run_tower(input, stream);
  const bool is_plain =
      input.image_grids.empty() &&
      std::all_of(shifts.begin(), shifts.end(), [](const RopeShift& s) { return s.is_zero(); });
  if (is_plain) return;
  int64_t first = 0;
  for (size_t s = 0; s < lengths.size(); ++s) {
    place_sequence(input, first, input.num_tokens[s], lengths[s], shifts_[s]);
    first += input.num_tokens[s];
  }
}

void ImageInputs::give(int64_t first, int64_t end, DecoderStep& step, const Stream& stream) {
  step_positions_.clear();
  if (positions_.empty()) return;
  for (int64_t axis = 0; axis < kRopeAxes; ++axis) {
    for (int64_t i = first; i < end; ++i) {
      step_positions_.push_back(positions_[static_cast<size_t>(i * kRopeAxes + axis)]);
    }
  }
  step.rope_positions = step_positions_;
  const auto from = std::lower_bound(image_rows_.begin(), image_rows_.end(), first);
  const auto to = std::lower_bound(from, image_rows_.end(), end);
  if (from == to) return;
  step_rows_.assign(from, to);
  for (int32_t& row : step_rows_) row -= static_cast<int32_t>(first);
  step_images_.rows = {step_rows_.data(), DType::kI32, {to - from}};
  if (stream.device.type != DeviceType::kCpu) {
    rows_on_device_ = to_device_of(stream, step_images_.rows);
    step_images_.rows = rows_on_device_.view();
  }
  step_images_.features.clear();
  for (const Tensor& feature : features_) {
    step_images_.features.push_back(
        feature->slice(from - image_rows_.begin(), to - image_rows_.begin()));
  }
  step.images = &step_images_;
}

void ImageInputs::store_shifts(std::span<RopeShift> shifts) const {
  std::copy(shifts_.begin(), shifts_.end(), shifts.begin());
}

size_t ImageInputs::bytes() const {
  size_t bytes = workspace_.capacity();
  for (const Tensor& feature : features_) bytes += feature ? feature->nbytes() : 0;
  return bytes;
}

}  // namespace cadre

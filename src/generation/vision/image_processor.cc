#include "cadre/image_processor.h"

#include <algorithm>
#include <cmath>
#include <filesystem>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "generation/vision/resize.h"
#include "io/checkpoint.h"
#include "io/json.h"

namespace cadre {
namespace {

constexpr int64_t kMaxSide = 4096;  // of a patch or merge group: products of a few fit in 63 bits
constexpr int64_t kChannels = 3;
constexpr int64_t kBicubic = 3;  // Pillow's number
constexpr double kMaxAspectRatio = 200;

// What Transformers' class assumes for a key that is left out: CLIP's statistics.
ImageProcessorConfig class_defaults() {
  ImageProcessorConfig config;
  config.patch_size = 14;
  config.min_pixels = int64_t{56} * 56;
  config.max_pixels = int64_t{28} * 28 * 1280;
  config.mean = {0.48145466f, 0.4578275f, 0.40821073f};
  config.std = {0.26862954f, 0.26130258f, 0.27577711f};
  return config;
}

std::array<float, 3> read_channels(const ConfigReader& reader, std::string_view key,
                                   const std::array<float, 3>& fallback) {
  if (!reader.has(key)) return fallback;
  const Json& value = reader.json().at(std::string(key));
  std::array<float, 3> result{};
  const bool is_list =
      value.is_array() && value.size() == result.size() &&
      std::all_of(value.begin(), value.end(), [](const Json& item) { return item.is_number(); });
  if (!is_list && !value.is_number()) {
    throw CheckpointError(str_cat(reader.origin(), ": ", reader.path(key),
                                  ": expected three numbers, got ", value.dump()));
  }
  for (size_t c = 0; c < result.size(); ++c) {
    result[c] = is_list ? value[c].get<float>() : value.get<float>();
  }
  return result;
}

void require_on(const ConfigReader& reader, std::string_view key) {
  if (reader.boolean_or(key, true)) return;
  throw Unsupported(str_cat(reader.origin(), ": ", reader.path(key),
                            " is false; this image processor always does that step: remove the key "
                            "or give pixel_values yourself"));
}

// min_pixels and max_pixels, or size {shortest_edge, longest_edge}, which the former overrule.
int64_t read_pixels(const ConfigReader& reader, std::string_view key, std::string_view edge,
                    int64_t fallback) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (reader.has(key)) return reader.integer(key, 1, kMax);
  if (!reader.has("size")) return fallback;
  return reader.object("size").integer_or(edge, fallback, 1, kMax);
}

ImageProcessorConfig read_config(const ConfigReader& reader) {
  for (const char* step : {"do_resize", "do_rescale", "do_normalize"}) require_on(reader, step);
  if (const int64_t filter = reader.integer_or("resample", kBicubic); filter != kBicubic) {
    throw Unsupported(str_cat(reader.origin(), ": resample is ", filter,
                              "; this image processor resizes with 3 (bicubic) only"));
  }
  const ImageProcessorConfig defaults = class_defaults();
  ImageProcessorConfig config;
  config.patch_size = reader.integer_or("patch_size", defaults.patch_size, 1, kMaxSide);
  config.temporal_patch_size =
      reader.integer_or("temporal_patch_size", defaults.temporal_patch_size, 1, kMaxSide);
  config.merge_size = reader.integer_or("merge_size", defaults.merge_size, 1, kMaxSide);
  config.min_pixels = read_pixels(reader, "min_pixels", "shortest_edge", defaults.min_pixels);
  config.max_pixels = read_pixels(reader, "max_pixels", "longest_edge", defaults.max_pixels);
  config.rescale_factor = reader.number_or("rescale_factor", defaults.rescale_factor);
  config.mean = read_channels(reader, "image_mean", defaults.mean);
  config.std = read_channels(reader, "image_std", defaults.std);
  return config;
}

// Of a folder whose processor nobody saved.
ImageProcessorConfig from_model_config(const ConfigReader& reader) {
  if (!reader.has("vision_config")) {
    throw CheckpointError(str_cat(reader.origin(),
                                  ": no vision_config: this model takes no images; choose a vision "
                                  "model, or leave the image away"));
  }
  const ConfigReader vision = reader.object("vision_config");
  ImageProcessorConfig config;
  config.patch_size = vision.integer_or("patch_size", config.patch_size, 1, kMaxSide);
  config.temporal_patch_size =
      vision.integer_or("temporal_patch_size", config.temporal_patch_size, 1, kMaxSide);
  config.merge_size = vision.integer_or("spatial_merge_size", config.merge_size, 1, kMaxSide);
  const int64_t side = config.patch_size * config.merge_size;
  config.min_pixels = side * side;
  config.max_pixels = std::max(
      config.min_pixels, vision.integer_or("num_position_embeddings", 2304, 1, int64_t{1} << 32) *
                             config.patch_size * config.patch_size);
  return config;
}

std::optional<ConfigReader> find_processor(const std::filesystem::path& folder) {
  const auto read = [&](const char* name) -> std::optional<ConfigReader> {
    if (!std::filesystem::exists(folder / name)) return std::nullopt;
    return ConfigReader(read_json_file(folder / name), (folder / name).string());
  };
  if (const auto whole = read("processor_config.json"); whole && whole->has("image_processor")) {
    return whole->object("image_processor");
  }
  return read("preprocessor_config.json");
}

// Python's round(): halves to even.
int64_t round_to(double value, int64_t factor) {
  return static_cast<int64_t>(std::nearbyint(value / static_cast<double>(factor))) * factor;
}

// One image's patches behind `out`; `image` is resized already.
void append_patches(const Image& image, const ImageProcessorConfig& config,
                    std::vector<float>& out) {
  std::array<std::array<float, 256>, kChannels> normalised;
  for (size_t c = 0; c < normalised.size(); ++c) {
    const auto factor = static_cast<float>(1 / config.rescale_factor);
    for (int v = 0; v < 256; ++v) {
      normalised[c][static_cast<size_t>(v)] =
          (static_cast<float>(v) - config.mean[c] * factor) / (config.std[c] * factor);
    }
  }
  const int64_t patch = config.patch_size;
  const int64_t merge = config.merge_size;
  const auto append_patch = [&](int64_t top, int64_t left) {
    for (int64_t c = 0; c < kChannels; ++c) {
      for (int64_t t = 0; t < config.temporal_patch_size; ++t) {
        for (int64_t y = top; y < top + patch; ++y) {
          const uint8_t* row = image.rgb.data() + kChannels * (y * image.width + left) + c;
          for (int64_t x = 0; x < patch; ++x) {
            out.push_back(normalised[static_cast<size_t>(c)][row[kChannels * x]]);
          }
        }
      }
    }
  };
  const int64_t group = patch * merge;
  for (int64_t top = 0; top < image.height; top += group) {
    for (int64_t left = 0; left < image.width; left += group) {
      for (int64_t i = 0; i < merge * merge; ++i) {
        append_patch(top + i / merge * patch, left + i % merge * patch);
      }
    }
  }
}

}  // namespace

ImageProcessor::ImageProcessor(const ImageProcessorConfig& config) : config_(config) {
  for (const int64_t size : {config.patch_size, config.temporal_patch_size, config.merge_size}) {
    if (size < 1 || size > kMaxSide) {
      throw InvalidArgument(
          str_cat("image processor: patch_size, temporal_patch_size and "
                  "merge_size must lie in [1, ",
                  kMaxSide, "], got ", size));
    }
  }
  if (config.min_pixels < 1 || config.min_pixels > config.max_pixels ||
      config.max_pixels > kMaxImagePixels) {
    throw InvalidArgument(
        str_cat("image processor: expected 1 <= min_pixels <= max_pixels <= ", kMaxImagePixels,
                ", got ", config.min_pixels, " and ", config.max_pixels));
  }
}

ImageProcessor ImageProcessor::from_pretrained(const std::string& path,
                                               const std::string& revision) {
  const std::filesystem::path folder = resolve_model_path(path, revision);
  if (const auto reader = find_processor(folder)) return ImageProcessor(read_config(*reader));
  const std::filesystem::path file = folder / "config.json";
  return ImageProcessor(from_model_config(ConfigReader(read_json_file(file), file.string())));
}

std::pair<int64_t, int64_t> ImageProcessor::resized(int64_t height, int64_t width) const {
  const auto [shorter, longer] = std::minmax(height, width);
  if (shorter < 1 || static_cast<double>(longer) / static_cast<double>(shorter) > kMaxAspectRatio) {
    throw InvalidArgument(str_cat("image of ", width, " x ", height, ": expected sides of at most ",
                                  kMaxAspectRatio, " times each other; crop it"));
  }
  const int64_t factor = config_.patch_size * config_.merge_size;
  const auto h = static_cast<double>(height);
  const auto w = static_cast<double>(width);
  const auto unit = static_cast<double>(factor);
  int64_t new_height = round_to(h, factor);
  int64_t new_width = round_to(w, factor);
  if (new_height * new_width > config_.max_pixels) {
    const double shrink = std::sqrt(h * w / static_cast<double>(config_.max_pixels));
    const auto fit = [&](double side) {
      return std::max(factor, static_cast<int64_t>(std::floor(side / shrink / unit)) * factor);
    };
    new_height = fit(h);
    new_width = fit(w);
  } else if (new_height * new_width < config_.min_pixels) {
    const double grow = std::sqrt(static_cast<double>(config_.min_pixels) / (h * w));
    const auto fit = [&](double side) {
      return static_cast<int64_t>(std::ceil(side * grow / unit)) * factor;
    };
    new_height = fit(h);
    new_width = fit(w);
  }
  return {new_height, new_width};
}

std::vector<TokenId> ImageProcessor::expand(std::span<const TokenId> ids,
                                            std::span<const ImageGrid> grids,
                                            TokenId image_token) const {
  const auto places = static_cast<size_t>(std::count(ids.begin(), ids.end(), image_token));
  if (places != grids.size()) {
    throw InvalidArgument(str_cat("image processor: ", grids.size(), " images, but the text has ",
                                  places, " places for them (token ", image_token,
                                  "); give one for each"));
  }
  std::vector<TokenId> result;
  size_t image = 0;
  for (const TokenId id : ids) {
    const int64_t count = id == image_token ? num_tokens(grids[image++]) : 1;
    result.insert(result.end(), static_cast<size_t>(count), id);
  }
  return result;
}

PixelValues ImageProcessor::process(std::span<const Image> images) const {
  PixelValues result;
  result.patch_width =
      kChannels * config_.temporal_patch_size * config_.patch_size * config_.patch_size;
  for (const Image& image : images) {
    const auto [height, width] = resized(image.height, image.width);
    const ImageGrid grid{1, height / config_.patch_size, width / config_.patch_size};
    result.values.reserve(result.values.size() +
                          static_cast<size_t>(grid.h * grid.w * result.patch_width));
    append_patches(resize_bicubic(image, height, width), config_, result.values);
    result.grids.push_back(grid);
  }
  return result;
}

}  // namespace cadre

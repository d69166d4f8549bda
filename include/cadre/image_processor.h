// From images to what a Qwen3-VL vision tower takes: resized, normalised, cut into patches. Follows
// Transformers' Qwen2VLImageProcessor with its torchvision backend, the one that it takes by
// default.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "cadre/image.h"
#include "cadre/token_id.h"

namespace cadre {

struct ImageProcessorConfig {
  int64_t patch_size = 16;  // pixels of a side
  int64_t temporal_patch_size = 2;
  int64_t merge_size = 2;  // patches of a side that become one token
  int64_t min_pixels = 1024;
  int64_t max_pixels = 16384;
  double rescale_factor = 1.0 / 255;
  std::array<float, 3> mean = {0.5f, 0.5f, 0.5f};
  std::array<float, 3> std = {0.5f, 0.5f, 0.5f};
};

/// Patches of one or more images, image after image. Within an image, the patches of one merge
/// group follow each other, and a patch holds [channel, time, y, x].
struct PixelValues {
  std::vector<float> values;  // [num_patches, patch_width]
  int64_t patch_width = 0;
  std::vector<ImageGrid> grids;  // one for each image
};

class ImageProcessor {
 public:
  /// Throws InvalidArgument for sizes that are not positive and for min_pixels > max_pixels.
  explicit ImageProcessor(const ImageProcessorConfig& config);

  /// Of a model's folder or hub id: `image_processor` in processor_config.json, else
  /// preprocessor_config.json, with the defaults of Transformers' class for keys that are left out.
  /// Where the folder has neither, from config.json: patches as the vision tower takes them, mean
  /// and std 0.5, at least one token's pixels, at most what the learned position table covers.
  /// Throws CheckpointError, and Unsupported for a resampling other than bicubic or a step that is
  /// switched off.
  static ImageProcessor from_pretrained(const std::string& path, const std::string& revision = "");

  const ImageProcessorConfig& config() const { return config_; }

  /// Height and width after resizing: multiples of patch_size * merge_size with about the aspect
  /// ratio of the image and min_pixels to max_pixels in all. Throws InvalidArgument for an image
  /// that is more than 200 times as long as wide.
  std::pair<int64_t, int64_t> resized(int64_t height, int64_t width) const;

  /// Throws as resized() does, naming the image by its index.
  PixelValues process(std::span<const Image> images) const;

  /// Tokens that stand for an image in the text.
  int64_t num_tokens(const ImageGrid& grid) const {
    return grid.t * (grid.h / config_.merge_size) * (grid.w / config_.merge_size);
  }

  /// `ids` with every `image_token` (VisionTokens::image) repeated for all tokens of its image.
  /// Throws InvalidArgument when there are not as many of them as grids.
  std::vector<TokenId> expand(std::span<const TokenId> ids, std::span<const ImageGrid> grids,
                              TokenId image_token) const;

 private:
  ImageProcessorConfig config_;
};

}  // namespace cadre

// Images: files decoded to RGB, and the grid of patches that a vision model sees.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <vector>

namespace cadre {

struct Image {
  int64_t height = 0;
  int64_t width = 0;
  std::vector<uint8_t> rgb;  // [height, width, 3]
};

/// An image cut into patches: how many in time, height and width (a row of `image_grid_thw`).
struct ImageGrid {
  int64_t t = 1;
  int64_t h = 0;
  int64_t w = 0;
  friend bool operator==(const ImageGrid&, const ImageGrid&) = default;
};

/// More pixels than any photograph has, and where Pillow refuses too.
inline constexpr int64_t kMaxImagePixels = 178'956'970;

/// JPEG, PNG or WebP, as far as this build has their libraries, to what Transformers' load_image
/// gives: gray, palette and CMYK become RGB, alpha is dropped, 16-bit samples keep their high byte
/// (gray ones are cut at 255, as Pillow does), of an animation the first picture is taken, and the
/// picture is turned as its EXIF or XMP orientation says. Sizes are checked before memory is taken.
/// `name` is for messages. Throws CheckpointError for a damaged or too large image and for a format
/// that is none of the three, Unsupported for a format that this build cannot read.
Image decode_image(std::span<const std::byte> bytes, const std::string& name,
                   int64_t max_pixels = kMaxImagePixels);

/// The same from a file.
Image load_image(const std::string& path);

}  // namespace cadre

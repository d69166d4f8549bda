// The decoders behind decode_image(), one per file format.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <string_view>

#include "cadre/image.h"

namespace cadre {

/// What is to be decoded.
struct ImageFile {
  std::span<const std::byte> bytes;
  std::string name;        // for messages
  int64_t max_pixels = 0;  // refuse more, before taking memory
};

/// A picture as it lies in the file, and what the file says of its orientation.
struct DecodedImage {
  Image image;
  int orientation = 1;  // EXIF's 1 .. 8
};

/// One row of the table that CMake writes.
struct ImageDecoder {
  std::string_view format;   // "JPEG"
  std::string_view package;  // what a build without it lacks
  /// Null: not in this build.
  DecodedImage (*decode)(const ImageFile& file);
};

/// In the order JPEG, PNG, WebP.
std::span<const ImageDecoder> compiled_image_decoders();

/// Throws CheckpointError: "image <name>: <what>".
[[noreturn]] void image_error(const std::string& name, std::string_view what);

/// An image of this size, zeroed. Throws CheckpointError when a side is not positive or there are
/// more pixels than the file may have.
Image make_image(int64_t height, int64_t width, const ImageFile& file);

/// The orientation that an EXIF block ("Exif\0\0" before it or not) states, else the one in an XMP
/// packet, else 1. Damaged blocks say nothing.
int read_orientation(std::span<const std::byte> exif, std::string_view xmp);

/// The picture turned upright.
Image apply_orientation(Image image, int orientation);

}  // namespace cadre

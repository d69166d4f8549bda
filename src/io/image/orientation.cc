// Which way up a camera held: the tag in EXIF and XMP metadata, and turning pictures by it.
#include <cstring>

#include "io/image/decoders.h"

namespace cadre {
namespace {

constexpr int kUpright = 1;
constexpr int kOrientationTag = 0x0112;
constexpr int kShort = 3;  // TIFF's type of 16-bit numbers

// Reads numbers of a TIFF block in its byte order; what lies outside reads as 0.
class TiffReader {
 public:
  TiffReader(std::span<const std::byte> bytes, bool is_big_endian)
      : bytes_(bytes), is_big_endian_(is_big_endian) {}

  uint32_t number(size_t offset, size_t size) const {
    if (offset > bytes_.size() || bytes_.size() - offset < size) return 0;
    uint32_t value = 0;
    for (size_t i = 0; i < size; ++i) {
      const size_t at = is_big_endian_ ? i : size - 1 - i;
      value = value << 8 | std::to_integer<uint32_t>(bytes_[offset + at]);
    }
    return value;
  }

 private:
  std::span<const std::byte> bytes_;
  bool is_big_endian_;
};

bool is_orientation(int64_t value) { return value >= kUpright && value <= 8; }

// 0 when the block does not say.
int orientation_in_exif(std::span<const std::byte> exif) {
  const auto begins_with = [&](std::string_view text) {
    return exif.size() >= text.size() && std::memcmp(exif.data(), text.data(), text.size()) == 0;
  };
  constexpr std::string_view kPrefix("Exif\0\0", 6);
  while (begins_with(kPrefix)) exif = exif.subspan(kPrefix.size());
  const bool is_big_endian = begins_with(std::string_view("MM\0*", 4));
  if (!is_big_endian && !begins_with(std::string_view("II*\0", 4))) return 0;
  const TiffReader tiff(exif, is_big_endian);
  const size_t directory = tiff.number(4, 4);
  const size_t entries = tiff.number(directory, 2);
  for (size_t i = 0; i < entries; ++i) {
    const size_t entry = directory + 2 + 12 * i;
    if (tiff.number(entry, 2) != kOrientationTag || tiff.number(entry + 2, 2) != kShort) continue;
    const uint32_t value = tiff.number(entry + 8, 2);
    return is_orientation(value) ? static_cast<int>(value) : 0;
  }
  return 0;
}

// tiff:Orientation="6" or <tiff:Orientation>6<; 0 when the packet does not say.
int orientation_in_xmp(std::string_view xmp) {
  constexpr std::string_view kName = "tiff:Orientation";
  for (size_t at = xmp.find(kName); at != xmp.npos; at = xmp.find(kName, at + 1)) {
    std::string_view rest = xmp.substr(at + kName.size());
    if (rest.starts_with("=\"")) {
      rest.remove_prefix(2);
    } else if (rest.starts_with(">")) {
      rest.remove_prefix(1);
    } else {
      continue;
    }
    if (!rest.empty() && is_orientation(rest[0] - '0')) return rest[0] - '0';
  }
  return 0;
}

}  // namespace

int read_orientation(std::span<const std::byte> exif, std::string_view xmp) {
  if (const int found = orientation_in_exif(exif); found != 0) return found;
  if (const int found = orientation_in_xmp(xmp); found != 0) return found;
  return kUpright;
}

// Orientations 2 to 8: the stored picture is mirrored left to right (2), turned by 180 degrees (3),
// mirrored top to bottom (4), transposed (5), to be turned clockwise (6), transposed along the
// other diagonal (7), to be turned counter-clockwise (8).
Image apply_orientation(Image image, int orientation) {
  if (orientation == kUpright) return image;
  const bool is_transposed = orientation >= 5;
  const bool flips_x = orientation == 2 || orientation == 3 || orientation == 7 || orientation == 8;
  const bool flips_y = orientation == 3 || orientation == 4 || orientation == 6 || orientation == 7;
  Image result;
  result.height = is_transposed ? image.width : image.height;
  result.width = is_transposed ? image.height : image.width;
  result.rgb.resize(image.rgb.size());
  uint8_t* out = result.rgb.data();
  for (int64_t y = 0; y < result.height; ++y) {
    for (int64_t x = 0; x < result.width; ++x, out += 3) {
      int64_t from_x = is_transposed ? y : x;
      int64_t from_y = is_transposed ? x : y;
      if (flips_x) from_x = image.width - 1 - from_x;
      if (flips_y) from_y = image.height - 1 - from_y;
      std::memcpy(out, image.rgb.data() + 3 * (from_y * image.width + from_x), 3);
    }
  }
  return result;
}

}  // namespace cadre

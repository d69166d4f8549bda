#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/file_map.h"
#include "io/image/decoders.h"

namespace cadre {
namespace {

// The table's format that the bytes begin like; empty for none.
std::string_view format_of(std::span<const std::byte> bytes) {
  const std::string_view head(reinterpret_cast<const char*>(bytes.data()),
                              std::min<size_t>(bytes.size(), 12));
  if (head.starts_with("\xff\xd8\xff")) return "JPEG";
  if (head.starts_with("\x89PNG\r\n\x1a\n")) return "PNG";
  if (head.starts_with("RIFF") && head.substr(4).ends_with("WEBP")) return "WebP";
  return {};
}

const ImageDecoder* find_decoder(std::string_view format) {
  for (const ImageDecoder& decoder : compiled_image_decoders()) {
    if (decoder.format == format) return &decoder;
  }
  return nullptr;
}

}  // namespace

void image_error(const std::string& name, std::string_view what) {
  throw CheckpointError(str_cat("image ", name, ": ", what));
}

Image make_image(int64_t height, int64_t width, const ImageFile& file) {
  if (height < 1 || width < 1 || height > file.max_pixels / width) {
    image_error(file.name, str_cat("expected 1 to ", file.max_pixels, " pixels, the header says ",
                                   width, " x ", height, "; make it smaller"));
  }
  Image image{height, width, {}};
  image.rgb.resize(static_cast<size_t>(height * width * 3));
  return image;
}

Image decode_image(std::span<const std::byte> bytes, const std::string& name, int64_t max_pixels) {
  const ImageDecoder* decoder = find_decoder(format_of(bytes));
  if (decoder == nullptr) {
    image_error(name,
                "expected a JPEG, PNG or WebP file, the first bytes are of none of them; "
                "convert it");
  }
  if (decoder->decode == nullptr) {
    throw Unsupported(str_cat("image ", name, ": this build of cadre reads no ", decoder->format,
                              ": it was made without ", decoder->package,
                              "; install that and build again, or convert the image"));
  }
  DecodedImage decoded = decoder->decode({bytes, name, max_pixels});
  return apply_orientation(std::move(decoded.image), decoded.orientation);
}

Image load_image(const std::string& path) {
  return decode_image(FileMap::open(path)->bytes(), path);
}

}  // namespace cadre

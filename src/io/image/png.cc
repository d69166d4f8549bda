// PNG through libpng, without its gamma and colour management: samples as they are, like Pillow.
#include <png.h>

#include <cstring>
#include <vector>

#include "core/str_cat.h"
#include "io/image/decoders.h"
#include "io/image/jump_guard.h"

namespace cadre {
namespace {

using Bytes = std::span<const std::byte>;

class PngReader {
 public:
  explicit PngReader(const ImageFile& file) : file_(file), rest_(file.bytes) {
    png_ = png_create_read_struct(
        PNG_LIBPNG_VER_STRING, this,
        [](png_structp png, png_const_charp message) {
          static_cast<PngReader*>(png_get_error_ptr(png))->guard_.fail(message);
        },
        [](png_structp, png_const_charp) {});
    if (png_ != nullptr) header_ = png_create_info_struct(png_);
    if (header_ == nullptr) {
      png_destroy_read_struct(&png_, nullptr, nullptr);
      image_error(file_.name, "PNG: libpng cannot start; out of memory, or of another version");
    }
    png_set_read_fn(png_, this, [](png_structp png, png_bytep out, size_t size) {
      auto& rest = static_cast<PngReader*>(png_get_io_ptr(png))->rest_;
      if (size > rest.size()) png_error(png, "the file is cut short; fetch it again");
      std::memcpy(out, rest.data(), size);
      rest = rest.subspan(size);
    });
  }
  ~PngReader() { png_destroy_read_struct(&png_, &header_, nullptr); }
  PngReader(const PngReader&) = delete;
  PngReader& operator=(const PngReader&) = delete;

  DecodedImage read() {
    run([&] { png_read_info(png_, header_); });
    const int64_t height = png_get_image_height(png_, header_);
    const int64_t width = png_get_image_width(png_, header_);
    DecodedImage result{make_image(height, width, file_)};
    is_gray16_ = png_get_color_type(png_, header_) == PNG_COLOR_TYPE_GRAY &&
                 png_get_bit_depth(png_, header_) == 16;
    run([&] { ask_for_rgb(); });
    const auto row_bytes = static_cast<size_t>(width) * (is_gray16_ ? 2 : 3);
    if (png_get_rowbytes(png_, header_) != row_bytes) {
      image_error(file_.name, "PNG: the samples do not become RGB");
    }
    read_pixels(result.image, row_bytes);
    result.orientation = orientation();
    return result;
  }

 private:
  template <typename Step>
  void run(const Step& step) {
    if (!guard_.run(step)) image_error(file_.name, str_cat("PNG: ", guard_.message()));
  }

  void ask_for_rgb() {
    if (!is_gray16_) {
      png_set_strip_16(png_);
      png_set_expand_gray_1_2_4_to_8(png_);
      png_set_palette_to_rgb(png_);
      png_set_gray_to_rgb(png_);
      png_set_strip_alpha(png_);
    }
    png_set_interlace_handling(png_);
    png_read_update_info(png_, header_);
  }

  // 16-bit gray lies in two bytes a sample, which fit into the three of its pixel.
  void read_pixels(Image& image, size_t row_bytes) {
    std::vector<png_bytep> rows(static_cast<size_t>(image.height));
    for (size_t y = 0; y < rows.size(); ++y) rows[y] = image.rgb.data() + y * row_bytes;
    run([&] {
      png_read_image(png_, rows.data());
      png_read_end(png_, header_);
    });
    if (!is_gray16_) return;
    for (int64_t i = image.height * image.width - 1; i >= 0; --i) {
      const uint8_t* sample = image.rgb.data() + 2 * i;
      const uint8_t value = sample[0] != 0 ? uint8_t{255} : sample[1];
      std::memset(image.rgb.data() + 3 * i, value, 3);
    }
  }

  int orientation() const {
    png_bytep exif = nullptr;
    png_uint_32 exif_bytes = 0;
    if (png_get_eXIf_1(png_, header_, &exif_bytes, &exif) == 0) exif_bytes = 0;
    png_textp texts = nullptr;
    int num_texts = 0;
    png_get_text(png_, header_, &texts, &num_texts);
    std::string_view xmp;
    for (int i = 0; i < num_texts; ++i) {
      if (std::string_view(texts[i].key) == "XML:com.adobe.xmp") xmp = texts[i].text;
    }
    return read_orientation(std::as_bytes(std::span(exif, exif_bytes)), xmp);
  }

  const ImageFile& file_;
  Bytes rest_;  // not read yet
  png_structp png_ = nullptr;
  png_infop header_ = nullptr;
  JumpGuard guard_;
  bool is_gray16_ = false;
};

}  // namespace

DecodedImage decode_png(const ImageFile& file) { return PngReader(file).read(); }

}  // namespace cadre

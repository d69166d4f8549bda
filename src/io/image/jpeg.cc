// JPEG through libjpeg(-turbo), with the settings that Pillow leaves alone: accurate DCT, fancy
// upsampling.
#include <cstdio>
// jpeglib.h wants cstdio before it.
#include <jerror.h>
#include <jpeglib.h>

#include <algorithm>
#include <vector>

#include "core/str_cat.h"
#include "io/image/decoders.h"
#include "io/image/jump_guard.h"

namespace cadre {
namespace {

using Bytes = std::span<const std::byte>;

// A progressive file may ask for any number of passes over the picture; real ones have about ten.
constexpr int kMaxScans = 500;
constexpr int kApp1 = JPEG_APP0 + 1;
constexpr std::string_view kExif("Exif\0\0", 6);
constexpr std::string_view kXmp("http://ns.adobe.com/xap/1.0/\0", 29);

// CMYK to RGB as Pillow computes it; the samples come inverted, as Adobe writes them.
void cmyk_to_rgb(const uint8_t* cmyk, int64_t width, uint8_t* rgb) {
  for (int64_t x = 0; x < width; ++x, cmyk += 4, rgb += 3) {
    const int black = cmyk[3];  // 255 = no black
    for (int c = 0; c < 3; ++c) {
      const int product = (255 - cmyk[c]) * black + 128;
      rgb[c] = static_cast<uint8_t>(std::max(black - (((product >> 8) + product) >> 8), 0));
    }
  }
}

class JpegReader {
 public:
  explicit JpegReader(const ImageFile& file) : file_(file) {
    info_.err = jpeg_std_error(&errors_);
    info_.client_data = this;
    errors_.error_exit = [](j_common_ptr info) {
      char message[JMSG_LENGTH_MAX];
      info->err->format_message(info, message);
      self(info).guard_.fail(message);
    };
    errors_.emit_message = [](j_common_ptr info, int level) {
      if (level >= 0) return;
      const int code = info->err->msg_code;
      self(info).is_cut_ |= code == JWRN_JPEG_EOF || code == JWRN_HIT_MARKER;
    };
    progress_.progress_monitor = [](j_common_ptr info) {
      if (reinterpret_cast<j_decompress_ptr>(info)->input_scan_number > kMaxScans) {
        self(info).guard_.fail("too many scans");
      }
    };
  }
  ~JpegReader() { jpeg_destroy_decompress(&info_); }
  JpegReader(const JpegReader&) = delete;
  JpegReader& operator=(const JpegReader&) = delete;

  DecodedImage read() {
    run([&] { read_header(); });
    const bool is_cmyk = info_.num_components == 4;
    if (info_.num_components != 1 && info_.num_components != 3 && !is_cmyk) {
      image_error(file_.name, str_cat("JPEG with ", info_.num_components,
                                      " components; expected gray, RGB, YCbCr or CMYK"));
    }
    info_.out_color_space = is_cmyk ? JCS_CMYK : JCS_RGB;
    DecodedImage result{make_image(info_.image_height, info_.image_width, file_), orientation()};
    std::vector<uint8_t> cmyk(is_cmyk ? size_t{4} * info_.image_width : 0);
    run([&] { read_rows(result.image, cmyk.data()); });
    if (is_cut_) image_error(file_.name, "JPEG is cut short or damaged; fetch it again");
    return result;
  }

 private:
  static JpegReader& self(j_common_ptr info) {
    return *static_cast<JpegReader*>(info->client_data);
  }

  template <typename Step>
  void run(const Step& step) {
    if (!guard_.run(step)) image_error(file_.name, str_cat("JPEG: ", guard_.message()));
  }

  void read_header() {
    jpeg_create_decompress(&info_);
    info_.progress = &progress_;
    jpeg_save_markers(&info_, kApp1, 0xFFFF);
    jpeg_mem_src(&info_, reinterpret_cast<const unsigned char*>(file_.bytes.data()),
                 file_.bytes.size());
    jpeg_read_header(&info_, TRUE);
  }

  // `cmyk`: a row of four components, or null.
  void read_rows(Image& image, uint8_t* cmyk) {
    jpeg_start_decompress(&info_);
    while (info_.output_scanline < info_.output_height) {
      uint8_t* rgb = image.rgb.data() + int64_t{3} * info_.output_scanline * image.width;
      JSAMPROW row = cmyk != nullptr ? cmyk : rgb;
      jpeg_read_scanlines(&info_, &row, 1);
      if (cmyk != nullptr) cmyk_to_rgb(cmyk, image.width, rgb);
    }
    jpeg_finish_decompress(&info_);
  }

  // Of the markers before the picture, which are gone when it is read.
  int orientation() const {
    Bytes exif;
    std::string_view xmp;
    for (auto* marker = info_.marker_list; marker != nullptr; marker = marker->next) {
      const std::string_view data(reinterpret_cast<const char*>(marker->data), marker->data_length);
      if (marker->marker != kApp1) continue;
      if (data.starts_with(kExif) && exif.empty()) exif = std::as_bytes(std::span(data));
      if (data.starts_with(kXmp)) xmp = data.substr(kXmp.size());
    }
    return read_orientation(exif, xmp);
  }

  const ImageFile& file_;
  jpeg_decompress_struct info_{};
  jpeg_error_mgr errors_{};
  jpeg_progress_mgr progress_{};
  JumpGuard guard_;
  bool is_cut_ = false;
};

}  // namespace

DecodedImage decode_jpeg(const ImageFile& file) { return JpegReader(file).read(); }

}  // namespace cadre

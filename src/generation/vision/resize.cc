#include "generation/vision/resize.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace cadre {
namespace {

constexpr int kMaxPrecision = 22;

// The sources of one output pixel along a line.
struct Source {
  int64_t first = 0;
  int64_t count = 0;
  const int16_t* weights = nullptr;
};

// Keys' cubic with a = -0.5.
double cubic(double x) {
  constexpr double kA = -0.5;
  x = std::abs(x);
  if (x < 1) return ((kA + 2) * x - (kA + 3)) * x * x + 1;
  if (x < 2) return (((x - 5) * x + 8) * x - 4) * kA;
  return 0;
}

// All output pixels of a line: weights as integers of `precision` fractional bits.
class Line {
 public:
  Line(int64_t from, int64_t to) {
    const double scale = static_cast<double>(from) / static_cast<double>(to);
    const double support = scale >= 1 ? 2 * scale : 2;
    stride_ = 2 * static_cast<int64_t>(std::ceil(support)) + 1;
    std::vector<double> exact(static_cast<size_t>(to * stride_));
    sources_.resize(static_cast<size_t>(to));
    double largest = 0;
    for (int64_t i = 0; i < to; ++i) {
      double* weights = exact.data() + i * stride_;
      sources_[static_cast<size_t>(i)] = weigh(i, from, scale, support, weights);
      largest = std::max(largest, *std::max_element(weights, weights + stride_));
    }
    while (precision_ < kMaxPrecision &&
           static_cast<int>(0.5 + largest * (1 << (precision_ + 1))) < (1 << 15)) {
      ++precision_;
    }
    weights_.resize(exact.size());
    for (size_t i = 0; i < exact.size(); ++i) {
      const double scaled = exact[i] * (1 << precision_);
      weights_[i] = static_cast<int16_t>(scaled < 0 ? scaled - 0.5 : scaled + 0.5);
    }
    for (size_t i = 0; i < sources_.size(); ++i) {
      sources_[i].weights = weights_.data() + i * static_cast<size_t>(stride_);
    }
  }

  const Source& source(int64_t i) const { return sources_[static_cast<size_t>(i)]; }

  /// `from` steps by `step` bytes.
  uint8_t mix(const Source& source, const uint8_t* from, int64_t step) const {
    int32_t sum = 1 << (precision_ - 1);
    for (int64_t j = 0; j < source.count; ++j) sum += from[j * step] * source.weights[j];
    return static_cast<uint8_t>(std::clamp(sum >> precision_, 0, 255));
  }

 private:
  // Fills `weights` with those of output pixel `i`, which add up to 1.
  Source weigh(int64_t i, int64_t from, double scale, double support, double* weights) const {
    const double center = scale * (static_cast<double>(i) + 0.5);
    const double inverse = scale >= 1 ? 1 / scale : 1;
    const int64_t first = std::max<int64_t>(static_cast<int64_t>(center - support + 0.5), 0);
    const int64_t last = std::min(static_cast<int64_t>(center + support + 0.5), from);
    const int64_t count = std::clamp<int64_t>(last - first, 0, stride_);
    double total = 0;
    for (int64_t j = 0; j < count; ++j) {
      weights[j] = cubic((static_cast<double>(j + first) - center + 0.5) * inverse);
      total += weights[j];
    }
    for (int64_t j = 0; j < count && total != 0; ++j) weights[j] /= total;
    return {first, count, nullptr};
  }

  int64_t stride_ = 0;  // weights of an output pixel
  int precision_ = 0;
  std::vector<int16_t> weights_;
  std::vector<Source> sources_;
};

Image empty_image(int64_t height, int64_t width) {
  Image image{height, width, {}};
  image.rgb.resize(static_cast<size_t>(3 * height * width));
  return image;
}

Image resize_width(const Image& image, int64_t width) {
  const Line line(image.width, width);
  Image result = empty_image(image.height, width);
  uint8_t* out = result.rgb.data();
  for (int64_t y = 0; y < image.height; ++y) {
    const uint8_t* row = image.rgb.data() + 3 * y * image.width;
    for (int64_t x = 0; x < width; ++x) {
      const Source& source = line.source(x);
      for (int64_t c = 0; c < 3; ++c) *out++ = line.mix(source, row + 3 * source.first + c, 3);
    }
  }
  return result;
}

Image resize_height(const Image& image, int64_t height) {
  const Line line(image.height, height);
  Image result = empty_image(height, image.width);
  const int64_t row_bytes = 3 * image.width;
  uint8_t* out = result.rgb.data();
  for (int64_t y = 0; y < height; ++y) {
    const Source& source = line.source(y);
    const uint8_t* rows = image.rgb.data() + source.first * row_bytes;
    for (int64_t x = 0; x < row_bytes; ++x) *out++ = line.mix(source, rows + x, row_bytes);
  }
  return result;
}

}  // namespace

Image resize_bicubic(const Image& image, int64_t height, int64_t width) {
  if (width == image.width && height == image.height) return image;
  if (width == image.width) return resize_height(image, height);
  if (height == image.height) return resize_width(image, width);
  return resize_height(resize_width(image, width), height);
}

}  // namespace cadre

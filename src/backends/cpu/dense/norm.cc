#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

// The sum of squares in sixteen fixed lanes, added up pairwise: vectorises, and the order depends
// on the width alone.
float sum_of_squares(const void* row, DType dtype, int64_t width) {
  constexpr int kLanes = 16;
  std::array<float, kBlock> values;
  std::array<float, kLanes> lanes{};
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    load_floats(at(row, dtype, begin), dtype, count, values.data());
    std::fill(values.begin() + count, values.end(), 0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        const float value = values[static_cast<size_t>(i + lane)];
        lanes[static_cast<size_t>(lane)] += value * value;
      }
    }
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

}  // namespace

void norm_row(const void* x, DType x_dtype, const TensorView& weight, float eps, int64_t width,
              void* out, DType out_dtype) {
  std::array<float, kBlock> values;
  std::array<float, kBlock> weights;
  const float mean = sum_of_squares(x, x_dtype, width) / static_cast<float>(width);
  const float factor = 1.0f / std::sqrt(mean + eps);
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    load_floats(at(x, x_dtype, begin), x_dtype, count, values.data());
    load_floats(at(weight.data(), weight.dtype(), begin), weight.dtype(), count, weights.data());
    for (int64_t i = 0; i < count; ++i) {
      const auto k = static_cast<size_t>(i);
      values[k] = values[k] * factor * weights[k];
    }
    store_floats(values.data(), count, out_dtype, at(out, out_dtype, begin));
  }
}

void CpuDenseOps::rms_norm(const TensorView& x, const TensorView& weight, float eps,
                           MutableTensorView out, const Stream& stream) {
  const int64_t width = row_width(x);
  CADRE_ASSERT(weight.numel() == width && out.numel() == x.numel());
  for_row_ranges(stream, num_rows(x), 4 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      norm_row(at(x.data(), x.dtype(), row * width), x.dtype(), weight, eps, width,
               at(out.mutable_data(), out.dtype(), row * width), out.dtype());
    }
  });
}

}  // namespace cadre::cpu

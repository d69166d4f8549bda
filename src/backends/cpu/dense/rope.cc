#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

// Elements i and i + half of a head, `count` pairs from `begin` on, through the stack.
void rotate_pairs(std::byte* head, DType dtype, int64_t begin, int64_t count, int64_t half,
                  const float* cos, const float* sin) {
  std::array<float, kBlock> low;
  std::array<float, kBlock> high;
  load_floats(at(head, dtype, begin), dtype, count, low.data());
  load_floats(at(head, dtype, begin + half), dtype, count, high.data());
  for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
    const float a = low[i];
    const float b = high[i];
    low[i] = a * cos[i] - b * sin[i];
    high[i] = b * cos[i] + a * sin[i];
  }
  store_floats(low.data(), count, dtype, at(head, dtype, begin));
  store_floats(high.data(), count, dtype, at(head, dtype, begin + half));
}

}  // namespace

void CpuDenseOps::rope_angles(const TensorView& positions, const TensorView& inverse_frequencies,
                              float scale, MutableTensorView cos, MutableTensorView sin,
                              const Stream& stream) {
  const int64_t half = inverse_frequencies.dim(0);
  const int64_t count = positions.dim(0);
  const int32_t* position_of = positions.as<int32_t>();
  const float* inverse = inverse_frequencies.as<float>();
  CADRE_ASSERT(cos.numel() == count * half && sin.numel() == count * half);
  float* cos_out = cos.as<float>();
  float* sin_out = sin.as<float>();
  for_row_ranges(stream, count, 40 * half, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      const auto position = static_cast<float>(position_of[t]);
      for (int64_t i = 0; i < half; ++i) {
        const float angle = position * inverse[i];
        cos_out[t * half + i] = std::cos(angle) * scale;
        sin_out[t * half + i] = std::sin(angle) * scale;
      }
    }
  });
}

void CpuDenseOps::rope(MutableTensorView x, const TensorView& cos, const TensorView& sin,
                       const Stream& stream) {
  const int64_t heads = x.dim(1);
  const int64_t head_dim = x.dim(2);
  const int64_t half = cos.dim(1);
  CADRE_ASSERT(2 * half <= head_dim && cos.dim(0) == x.dim(0));
  const float* cos_data = cos.as<float>();
  const float* sin_data = sin.as<float>();
  for_row_ranges(stream, x.dim(0), 6 * heads * half, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin * heads; row < end * heads; ++row) {
      std::byte* head = at(x.mutable_data(), x.dtype(), row * head_dim);
      const int64_t angles = row / heads * half;
      for (int64_t i = 0; i < half; i += kBlock) {
        rotate_pairs(head, x.dtype(), i, std::min(kBlock, half - i), half, cos_data + angles + i,
                     sin_data + angles + i);
      }
    }
  });
}

}  // namespace cadre::cpu

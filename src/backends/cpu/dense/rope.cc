#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
void rotate_head(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t half,
                 const float* cos, const float* sin, RopePairs pairs, float sign) {
  std::array<float, 2 * kBlock> all;  // `count` pairs through the stack
  for (int64_t begin = 0; begin < half; begin += kBlock) {
    const int64_t count = std::min(kBlock, half - begin);
    const bool neighbours = pairs == RopePairs::kNeighbours;
    // Where the first and second elements of the pairs lie, in memory and in `all`.
    const int64_t low = neighbours ? 2 * begin : begin;
    const int64_t high = neighbours ? low + count : begin + half;
    load_floats(at(from, from_dtype, low), from_dtype, count, all.data());
    load_floats(at(from, from_dtype, high), from_dtype, count, all.data() + count);
    const size_t step = neighbours ? 2 : 1;
    const size_t second = neighbours ? 1 : static_cast<size_t>(count);
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const float a = all[i * step];
      const float b = all[i * step + second];
      const float c = cos[begin + static_cast<int64_t>(i)];
      const float s = sign * sin[begin + static_cast<int64_t>(i)];
      all[i * step] = a * c - b * s;
      all[i * step + second] = b * c + a * s;
    }
    store_floats(all.data(), count, to_dtype, at(to, to_dtype, low));
    store_floats(all.data() + count, count, to_dtype, at(to, to_dtype, high));
  }
}

namespace {

struct Angles {
  const MutableTensorView& cos;  // [num_tokens, half] f32
  const MutableTensorView& sin;
};

// Of angle_of(t, i): token t, frequency i.
template <typename AngleOf>
void fill_angles(int64_t half, float scale, const Angles& out, const Stream& stream,
                 const AngleOf& angle_of) {
  const int64_t count = out.cos.dim(0);
  CADRE_ASSERT(out.cos.numel() == count * half && out.sin.numel() == count * half);
  float* cos = out.cos.as<float>();
  float* sin = out.sin.as<float>();
  for_row_ranges(stream, count, 40 * half, [&](int64_t begin, int64_t end, int) {
    for (int64_t t = begin; t < end; ++t) {
      for (int64_t i = 0; i < half; ++i) {
        const float angle = angle_of(t, i);
        cos[t * half + i] = std::cos(angle) * scale;
        sin[t * half + i] = std::sin(angle) * scale;
      }
    }
  });
}

}  // namespace

void CpuDenseOps::rope_angles(const TensorView& positions, const TensorView& inverse_frequencies,
                              float scale, MutableTensorView cos, MutableTensorView sin,
                              const Stream& stream) {
  const int32_t* position_of = positions.as<int32_t>();
  const float* inverse = inverse_frequencies.as<float>();
  fill_angles(inverse_frequencies.dim(0), scale, {cos, sin}, stream, [=](int64_t t, int64_t i) {
    return static_cast<float>(position_of[t]) * inverse[i];
  });
}

void CpuDenseOps::rope_angles_on_axes(const AxisPositions& where,
                                      const TensorView& inverse_frequencies, float scale,
                                      MutableTensorView cos, MutableTensorView sin,
                                      const Stream& stream) {
  const int64_t count = where.positions.dim(1);
  const int32_t* position_of = where.positions.as<int32_t>();
  const int32_t* axis_of = where.axes.as<int32_t>();
  const float* inverse = inverse_frequencies.as<float>();
  CADRE_ASSERT(count == cos.dim(0) && where.axes.dim(0) == inverse_frequencies.dim(0));
  fill_angles(inverse_frequencies.dim(0), scale, {cos, sin}, stream, [=](int64_t t, int64_t i) {
    return static_cast<float>(position_of[axis_of[i] * count + t]) * inverse[i];
  });
}

void CpuDenseOps::dynamic_rope_angles(const TensorView& positions,
                                      const TensorView& inverse_frequencies, const DynamicNtk& ntk,
                                      MutableTensorView cos, MutableTensorView sin,
                                      const Stream& stream) {
  const int64_t half = inverse_frequencies.dim(0);
  const int32_t* position_of = positions.as<int32_t>();
  const float* inverse = inverse_frequencies.as<float>();
  CADRE_ASSERT(half > 1 && ntk.context > 0);
  fill_angles(half, 1.0f, {cos, sin}, stream, [=](int64_t t, int64_t i) {
    const int32_t position = position_of[t];
    float frequency = inverse[i];
    if (position >= ntk.context) {
      const float growth =
          ntk.factor * static_cast<float>(position + 1) / static_cast<float>(ntk.context) -
          (ntk.factor - 1.0f);
      frequency *= std::pow(growth, -static_cast<float>(i) / static_cast<float>(half - 1));
    }
    return static_cast<float>(position) * frequency;
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
      rotate_head(head, x.dtype(), head, x.dtype(), half, cos_data + angles, sin_data + angles,
                  RopePairs::kHalves);
    }
  });
}

void CpuDenseOps::rope_pairs(MutableTensorView x, int64_t first, const TensorView& cos,
                             const TensorView& sin, bool inverse, const Stream& stream) {
  const int64_t heads = x.dim(1);
  const int64_t head_dim = x.dim(2);
  const int64_t half = cos.dim(1);
  CADRE_ASSERT(first >= 0 && first + 2 * half <= head_dim && cos.dim(0) == x.dim(0));
  const float* cos_data = cos.as<float>();
  const float* sin_data = sin.as<float>();
  const float sign = inverse ? -1.0f : 1.0f;
  for_row_ranges(stream, x.dim(0), 6 * heads * half, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin * heads; row < end * heads; ++row) {
      const int64_t angles = row / heads * half;
      std::byte* pairs = at(x.mutable_data(), x.dtype(), row * head_dim + first);
      rotate_head(pairs, x.dtype(), pairs, x.dtype(), half, cos_data + angles, sin_data + angles,
                  RopePairs::kNeighbours, sign);
    }
  });
}

}  // namespace cadre::cpu

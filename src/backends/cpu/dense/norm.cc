#include <algorithm>
#include <array>
#include <cmath>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

// The sum of fn(value) over a row in sixteen fixed lanes, added up pairwise: vectorises, and the
// order depends on the width alone.
template <typename Fn>
float sum_of(const void* row, DType dtype, int64_t width, const Fn& fn) {
  constexpr int kLanes = 16;
  std::array<float, kBlock> values;
  std::array<float, kLanes> lanes{};
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    load_floats(at(row, dtype, begin), dtype, count, values.data());
    for (int64_t i = 0; i < count; ++i) {
      values[static_cast<size_t>(i)] = fn(values[static_cast<size_t>(i)]);
    }
    std::fill(values.begin() + count, values.end(), 0.0f);
    for (int64_t i = 0; i < count; i += kLanes) {
      for (int lane = 0; lane < kLanes; ++lane) {
        lanes[static_cast<size_t>(lane)] += values[static_cast<size_t>(i + lane)];
      }
    }
  }
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
}

float square(float x) { return x * x; }

}  // namespace

float sum_of_squares(const void* row, DType dtype, int64_t width) {
  return sum_of(row, dtype, width, square);
}

void norm_row(const void* x, DType x_dtype, const TensorView& weight, float eps, int64_t width,
              void* out, DType out_dtype) {
  std::array<float, kBlock> values;
  std::array<float, kBlock> weights;
  const float mean = sum_of(x, x_dtype, width, square) / static_cast<float>(width);
  const float factor = 1.0f / std::sqrt(mean + eps);
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    load_floats(at(x, x_dtype, begin), x_dtype, count, values.data());
    if (weight) {
      load_floats(at(weight.data(), weight.dtype(), begin), weight.dtype(), count, weights.data());
    } else {
      std::fill_n(weights.begin(), count, 1.0f);
    }
    for (int64_t i = 0; i < count; ++i) {
      const auto k = static_cast<size_t>(i);
      values[k] = values[k] * factor * weights[k];
    }
    store_floats(values.data(), count, out_dtype, at(out, out_dtype, begin));
  }
}

namespace {

struct LayerNormArgs {
  const TensorView& weight;
  const TensorView& bias;
  float eps;
};

void layer_norm_row(const void* x, DType x_dtype, const LayerNormArgs& args, void* out,
                    DType out_dtype) {
  const int64_t width = args.weight.numel();
  const auto count_of_all = static_cast<float>(width);
  const float mean = sum_of(x, x_dtype, width, [](float v) { return v; }) / count_of_all;
  const float variance =
      sum_of(x, x_dtype, width, [mean](float v) { return square(v - mean); }) / count_of_all;
  const float factor = 1.0f / std::sqrt(variance + args.eps);
  std::array<float, kBlock> values;
  std::array<float, kBlock> weights;
  std::array<float, kBlock> biases;
  const auto load = [](const TensorView& from, int64_t begin, int64_t count, float* to) {
    load_floats(at(from.data(), from.dtype(), begin), from.dtype(), count, to);
  };
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    load_floats(at(x, x_dtype, begin), x_dtype, count, values.data());
    load(args.weight, begin, count, weights.data());
    load(args.bias, begin, count, biases.data());
    for (int64_t i = 0; i < count; ++i) {
      const auto k = static_cast<size_t>(i);
      values[k] = (values[k] - mean) * factor * weights[k] + biases[k];
    }
    store_floats(values.data(), count, out_dtype, at(out, out_dtype, begin));
  }
}

}  // namespace

void CpuDenseOps::rms_norm(const TensorView& x, const TensorView& weight, float eps,
                           MutableTensorView out, const Stream& stream) {
  const int64_t width = row_width(x);
  CADRE_ASSERT((!weight || weight.numel() == width) && out.numel() == x.numel());
  for_row_ranges(stream, num_rows(x), 4 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      norm_row(at(x.data(), x.dtype(), row * width), x.dtype(), weight, eps, width,
               at(out.mutable_data(), out.dtype(), row * width), out.dtype());
    }
  });
}

void CpuDenseOps::layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                             float eps, MutableTensorView out, const Stream& stream) {
  const int64_t width = row_width(x);
  CADRE_ASSERT(weight.numel() == width && bias.numel() == width && out.numel() == x.numel());
  for_row_ranges(stream, num_rows(x), 8 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      layer_norm_row(at(x.data(), x.dtype(), row * width), x.dtype(), {weight, bias, eps},
                     at(out.mutable_data(), out.dtype(), row * width), out.dtype());
    }
  });
}

}  // namespace cadre::cpu

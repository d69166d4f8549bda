#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

float activate(float x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1.0f + std::exp(-x));
    case Activation::kGelu:
      return 0.5f * x * (1.0f + std::erf(x * 0.70710678118654752f));
    case Activation::kGeluTanh:
      return 0.5f * x * (1.0f + std::tanh(0.79788456080286536f * (x + 0.044715f * x * x * x)));
    case Activation::kRelu:
      return x < 0.0f ? 0.0f : x;  // keeps a NaN
    case Activation::kRelu2:
      return x < 0.0f ? 0.0f : x * x;
  }
  CADRE_ASSERT(false);
}

// Copies row `source_row` of x to row `row` of out, converting when the dtypes differ.
void copy_row(const TensorView& x, int64_t source_row, const MutableTensorView& out, int64_t row) {
  const int64_t width = row_width(x);
  std::array<float, kBlock> values;
  for (int64_t begin = 0; begin < width; begin += kBlock) {
    const int64_t count = std::min(kBlock, width - begin);
    const std::byte* source = at(x.data(), x.dtype(), source_row * width + begin);
    std::byte* target = at(out.mutable_data(), out.dtype(), row * width + begin);
    if (x.dtype() == out.dtype()) {
      std::memcpy(target, source, static_cast<size_t>(count) * size_of(x.dtype()));
    } else {
      load_floats(source, x.dtype(), count, values.data());
      store_floats(values.data(), count, out.dtype(), target);
    }
  }
}

// out[i] = fn(a[i], b[i]) over `count` elements; out may be a or b.
template <typename Fn>
void map_two(const std::byte* a, DType a_dtype, const std::byte* b, DType b_dtype, int64_t count,
             std::byte* out, DType out_dtype, const Fn& fn) {
  std::array<float, kBlock> x;
  std::array<float, kBlock> y;
  for (int64_t begin = 0; begin < count; begin += kBlock) {
    const int64_t n = std::min(kBlock, count - begin);
    load_floats(at(a, a_dtype, begin), a_dtype, n, x.data());
    load_floats(at(b, b_dtype, begin), b_dtype, n, y.data());
    for (size_t i = 0; i < static_cast<size_t>(n); ++i) x[i] = fn(x[i], y[i]);
    store_floats(x.data(), n, out_dtype, at(out, out_dtype, begin));
  }
}

// The same over whole tensors of one shape.
template <typename Fn>
void map_rows(const TensorView& a, const TensorView& b, const MutableTensorView& out, int64_t cost,
              const Stream& stream, const Fn& fn) {
  CADRE_ASSERT(a.numel() == out.numel() && b.numel() == out.numel());
  const int64_t width = row_width(out);
  for_row_ranges(stream, num_rows(out), cost * width, [&](int64_t begin, int64_t end, int) {
    map_two(at(a.data(), a.dtype(), begin * width), a.dtype(),
            at(b.data(), b.dtype(), begin * width), b.dtype(), (end - begin) * width,
            at(out.mutable_data(), out.dtype(), begin * width), out.dtype(), fn);
  });
}

}  // namespace

void CpuDenseOps::embedding(const TensorView& ids, const TensorView& table, MutableTensorView out,
                            const Stream& stream) {
  gather_rows(table, ids, out, stream);
}

void CpuDenseOps::gather_rows(const TensorView& x, const TensorView& rows, MutableTensorView out,
                              const Stream& stream) {
  const int64_t count = rows.dim(0);
  const int32_t* indices = rows.as<int32_t>();
  CADRE_ASSERT(out.dim(0) >= count && row_width(out) == row_width(x));
  for_row_ranges(stream, count, row_width(x), [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) copy_row(x, indices[i], out, i);
  });
}

void CpuDenseOps::add(MutableTensorView y, const TensorView& x, const Stream& stream) {
  map_rows(y, x, y, 1, stream, [](float a, float b) { return a + b; });
}

void CpuDenseOps::add_sigmoid_gated(MutableTensorView y, const TensorView& x,
                                    const TensorView& gate, const Stream& stream) {
  CADRE_ASSERT(gate.numel() == num_rows(y) && x.numel() == y.numel());
  const int64_t width = row_width(y);
  const float* gates = gate.as<float>();
  for_row_ranges(stream, num_rows(y), 2 * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t row = begin; row < end; ++row) {
      const float factor = 1.0f / (1.0f + std::exp(-gates[row]));
      std::byte* target = at(y.mutable_data(), y.dtype(), row * width);
      map_two(target, y.dtype(), at(x.data(), x.dtype(), row * width), x.dtype(), width, target,
              y.dtype(), [factor](float a, float b) { return a + b * factor; });
    }
  });
}

void CpuDenseOps::scale(MutableTensorView x, float factor, const Stream& stream) {
  map_rows(x, x, x, 1, stream, [factor](float a, float) { return a * factor; });
}

void CpuDenseOps::clamp(MutableTensorView x, float limit, const Stream& stream) {
  map_rows(x, x, x, 1, stream,
           [limit](float a, float) { return a < -limit ? -limit : (a > limit ? limit : a); });
}

void CpuDenseOps::clamp_gated(MutableTensorView gate, MutableTensorView up, float limit,
                              const Stream& stream) {
  map_rows(gate, gate, gate, 1, stream, [limit](float a, float) { return a > limit ? limit : a; });
  clamp(up, limit, stream);
}

void CpuDenseOps::gated_activation(const TensorView& gate, const TensorView& up,
                                   Activation activation, MutableTensorView out,
                                   const Stream& stream) {
  map_rows(gate, up, out, 16, stream,
           [activation](float a, float b) { return activate(a, activation) * b; });
}

void CpuDenseOps::plain_activation(const TensorView& x, Activation activation,
                                   MutableTensorView out, const Stream& stream) {
  map_rows(x, x, out, 16, stream, [activation](float a, float) { return activate(a, activation); });
}

void CpuDenseOps::add_weighted_rows(const TensorView& table, const TensorView& rows,
                                    const TensorView& weights, MutableTensorView y,
                                    const Stream& stream) {
  const int64_t width = row_width(y);
  const int64_t parts = rows.dim(1);
  CADRE_ASSERT(rows.dim(0) == num_rows(y) && weights.numel() == rows.numel() &&
               row_width(table) == width);
  const int32_t* row_of = rows.as<int32_t>();
  const float* weight_of = weights.as<float>();
  for_row_ranges(stream, num_rows(y), 2 * parts * width, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin * parts; i < end * parts; ++i) {
      const float weight = weight_of[i];
      std::byte* target = at(y.mutable_data(), y.dtype(), i / parts * width);
      map_two(target, y.dtype(), at(table.data(), table.dtype(), row_of[i] * width), table.dtype(),
              width, target, y.dtype(), [weight](float a, float b) { return a + weight * b; });
    }
  });
}

void CpuDenseOps::scatter_rows(const TensorView& x, const TensorView& rows, Accumulate accumulate,
                               MutableTensorView y, const Stream& stream) {
  const int64_t width = row_width(y);
  const int32_t* row_of = rows.as<int32_t>();
  CADRE_ASSERT(rows.dim(0) == num_rows(x) && row_width(x) == width);
  for_row_ranges(stream, rows.dim(0), width, [&](int64_t begin, int64_t end, int) {
    for (int64_t i = begin; i < end; ++i) {
      if (accumulate == Accumulate::kOverwrite) {
        copy_row(x, i, y, row_of[i]);
        continue;
      }
      std::byte* target = at(y.mutable_data(), y.dtype(), row_of[i] * width);
      map_two(target, y.dtype(), at(x.data(), x.dtype(), i * width), x.dtype(), width, target,
              y.dtype(), [](float a, float b) { return a + b; });
    }
  });
}

}  // namespace cadre::cpu

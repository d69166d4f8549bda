// Between floats and stored values, block by block.
#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "cadre/quantization.h"
#include "cadre/thread_pool.h"
#include "core/str_cat.h"
#include "quant/float8.h"
#include "quant/stored_values.h"

namespace cadre {
namespace {

template <typename Fn>
void for_each_index(int64_t count, ThreadPool* threads, Fn fn) {
  if (threads == nullptr) {
    for (int64_t i = 0; i < count; ++i) fn(i);
  } else {
    threads->parallel_for(count, [&](int64_t i, int) { fn(i); });
  }
}

// [N, K] as [1, N, K]; others as they are. Only views of rank 2 and 3 come here.
TensorView with_experts(const TensorView& t) {
  if (t.rank() == 3) return t;
  return {t.data(), t.dtype(), {1, t.dim(0), t.dim(1)}, {0, t.stride(0), t.stride(1)}, t.device()};
}

void check_weight(std::string_view where, std::string_view name, const TensorView& t) {
  const bool fits = (t.rank() == 2 || t.rank() == 3) && plain_format(t.dtype()) &&
                    t.device().type == DeviceType::kCpu && (t.numel() == 0 || t.data() != nullptr);
  if (fits) return;
  throw InvalidArgument(str_cat(where, ": expected ", name, " as [N, K] or [E, N, K] of float32, ",
                                "bfloat16 or float16 on cpu, got ", describe(name, t)));
}

const char* address(const TensorView& t, int64_t e, int64_t n, int64_t k) {
  return static_cast<const char*>(t.data()) +
         (e * t.stride(0) + n * t.stride(1) + k * t.stride(2)) *
             static_cast<int64_t>(size_of(t.dtype()));
}

template <typename T>
T load(const char* at) {
  T value;
  std::memcpy(&value, at, sizeof value);
  return value;
}

float load_plain(const char* at, DType dtype) {
  if (dtype == DType::kF32) return load<float>(at);
  if (dtype == DType::kBF16) return static_cast<float>(load<BFloat16>(at));
  return static_cast<float>(load<Float16>(at));
}

// ---- floats to stored values -------------------------------------------------------------------

// The smallest power of two that is not less than `value` (positive, at most 2^127); at least
// 2^-127.
uint8_t e8m0_above(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (bits <= 0x00400000u) return 0;  // up to 2^-127
  return static_cast<uint8_t>((bits + 0x7fffffu) >> 23);
}

struct BlockScale {
  float value = 1;
  uint8_t e8m0 = 127;
};

BlockScale scale_from_e8m0(uint8_t code) { return {e8m0_to_float(code), code}; }

// The value of float_to_e2m1() of a magnitude, without branches: adding 1.5 * 2^23 units leaves
// whole units, rounded to even. The unit is 0.5 below 2, 1 below 4 and 2 above.
float nearest_e2m1(float magnitude) {
  const float half = (magnitude + 0x1.8p22f) - 0x1.8p22f;
  const float one = (magnitude + 0x1.8p23f) - 0x1.8p23f;
  const float two = (magnitude + 0x1.8p24f) - 0x1.8p24f;
  const float nearest = magnitude < 2 ? half : magnitude < 4 ? one : two;
  return nearest < kMaxE2m1 ? nearest : kMaxE2m1;
}

// Of the values divided by the scale, a power of two: the quotients are exact.
double squared_error_as_e2m1(const std::vector<float>& block, float scale) {
  const float inverse = 1 / scale;
  double sum = 0;
  for (const float value : block) {
    const float magnitude = std::fabs(value) * inverse;
    const float delta = magnitude - nearest_e2m1(magnitude);
    sum += double{delta} * delta;
  }
  return sum;
}

BlockScale scale_of(const std::vector<float>& block, float amax, StorageFormat format,
                    DType scale_dtype) {
  const bool is_fp4 = format == StorageFormat::kFp4;
  const float exact = amax / (is_fp4 ? kMaxE2m1 : kMaxE4m3);
  if (exact == 0) return {};  // zeros, or too small for any scale
  if (scale_dtype == DType::kF32) return {exact, 0};
  const uint8_t code = e8m0_above(exact);
  if (!is_fp4 || code == 0) return scale_from_e8m0(code);
  // Half the scale clips the largest values and is finer for all others.
  const BlockScale above = scale_from_e8m0(code);
  const BlockScale half = scale_from_e8m0(static_cast<uint8_t>(code - 1));
  return squared_error_as_e2m1(block, half.value) < 4 * squared_error_as_e2m1(block, above.value)
             ? half
             : above;
}

// A tensor [E, N, K] and where its blocks go.
class Quantizer {
 public:
  Quantizer(const TensorView& weight, StorageFormat format, const ScaleLayout& layout,
            const QuantizedWeight& out)
      : weight_(weight),
        format_(format),
        dtype_(layout.dtype),
        rows_(layout.block_rows == 0 ? weight.dim(1) : layout.block_rows),
        cols_(layout.block_cols == 0 ? weight.dim(2) : layout.block_cols),
        values_(static_cast<uint8_t*>(out.values->mutable_data())),
        scales_(static_cast<char*>(out.scales->mutable_data())),
        row_bytes_(row_bytes(format, weight.dim(2))),
        scale_rows_(scale_shape(layout, weight.dim(1), weight.dim(2))[0]),
        scale_cols_(scale_shape(layout, weight.dim(1), weight.dim(2))[1]) {}

  int64_t num_block_rows() const { return weight_.dim(0) * scale_rows_; }

  void quantize_block_row(int64_t index) const {
    const int64_t e = index / scale_rows_, first = index % scale_rows_ * rows_;
    std::vector<float> block;
    for (int64_t col = 0; col < scale_cols_; ++col) {
      const Block b{e, first, first + std::min(rows_, weight_.dim(1) - first), col * cols_,
                    col * cols_ + std::min(cols_, weight_.dim(2) - col * cols_)};
      const float amax = read(b, block);
      const BlockScale scale = scale_of(block, amax, format_, dtype_);
      const int64_t at = index * scale_cols_ + col;
      if (dtype_ == DType::kF32) {
        std::memcpy(scales_ + at * 4, &scale.value, 4);
      } else {
        scales_[at] = static_cast<char>(scale.e8m0);
      }
      write(b, block, scale.value);
    }
  }

 private:
  struct Block {
    int64_t expert, row_begin, row_end, col_begin, col_end;
  };

  // Returns the largest magnitude.
  float read(const Block& b, std::vector<float>& block) const {
    block.resize(static_cast<size_t>((b.row_end - b.row_begin) * (b.col_end - b.col_begin)));
    const int64_t step = weight_.stride(2) * static_cast<int64_t>(size_of(weight_.dtype()));
    float* to = block.data();
    uint32_t largest = 0;  // bits without the sign are ordered as magnitudes are, NaN above all
    for (int64_t n = b.row_begin; n < b.row_end; ++n) {
      const char* from = address(weight_, b.expert, n, b.col_begin);
      for (int64_t k = b.col_begin; k < b.col_end; ++k, from += step) {
        *to = load_plain(from, weight_.dtype());
        largest = std::max(largest, std::bit_cast<uint32_t>(*to++) & 0x7fffffffu);
      }
    }
    if (largest >= 0x7f800000u) fail_not_finite(b, block);
    return std::bit_cast<float>(largest);
  }

  [[noreturn]] void fail_not_finite(const Block& b, const std::vector<float>& block) const {
    const auto at =
        std::find_if(block.begin(), block.end(), [](float value) { return !std::isfinite(value); });
    const int64_t index = at - block.begin(), cols = b.col_end - b.col_begin;
    throw InvalidArgument(str_cat("quantize: expected finite values, got ", *at, " at [", b.expert,
                                  ", ", b.row_begin + index / cols, ", ",
                                  b.col_begin + index % cols, "] of ",
                                  describe("weight", weight_)));
  }

  void write(const Block& b, const std::vector<float>& block, float scale) const {
    size_t i = 0;
    for (int64_t n = b.row_begin; n < b.row_end; ++n) {
      uint8_t* row = values_ + (b.expert * weight_.dim(1) + n) * row_bytes_;
      for (int64_t k = b.col_begin; k < b.col_end; ++k) {
        const float value = block[i++] / scale;
        if (format_ != StorageFormat::kFp4) {
          row[k] = float_to_e4m3(value);
        } else if (k % 2 == 0) {  // a block begins with an even k
          row[k / 2] = float_to_e2m1(value);
        } else {
          row[k / 2] = static_cast<uint8_t>(row[k / 2] | float_to_e2m1(value) << 4);
        }
      }
    }
  }

  const TensorView& weight_;
  StorageFormat format_;
  DType dtype_;
  int64_t rows_, cols_;  // of a block
  uint8_t* values_;
  char* scales_;
  int64_t row_bytes_, scale_rows_, scale_cols_;
};

// ---- stored values to floats -------------------------------------------------------------------

// The first dimension in front of rows and columns, if any, and then these.
Dims shape_like(const TensorView& tensor, int64_t rows, int64_t columns) {
  return tensor.rank() == 3 ? Dims{tensor.dim(0), rows, columns} : Dims{rows, columns};
}

[[noreturn]] void fail(std::string_view name, const TensorView& got, const std::string& expected,
                       const TensorView& out) {
  throw InvalidArgument(str_cat("dequantize: ", name, ": expected ", expected, " for ",
                                describe("out", out), ", got ", describe(name, got)));
}

// Values as [.., N, stored bytes of a row].
TensorView checked_values(const QuantizedTensor& weight, const TensorView& out) {
  TensorView values = weight.values;
  const bool is_fp4 = weight.format == StorageFormat::kFp4;
  const int last = out.rank() - 1;
  const int64_t k = out.dim(last);
  const bool dtype_fits = is_fp4 ? values.dtype() == DType::kI8 || values.dtype() == DType::kU8
                                 : values.dtype() == DType::kF8E4M3;
  const Dims shape = shape_like(out, out.dim(last - 1), row_bytes(weight.format, k));
  if (is_fp4) values = with_whole_rows(values, out.rank());
  if (!dtype_fits || !(values.shape() == shape) || values.device().type != DeviceType::kCpu ||
      (values.numel() != 0 && values.data() == nullptr) ||
      (shape[last] > 1 && values.stride(last) != 1)) {
    fail("values", weight.values,
         str_cat(is_fp4 ? "int8 or uint8 " : "float8_e4m3 ", shape,
                 " on cpu with stride 1 in the last dimension"),
         out);
  }
  return with_experts(values);
}

// Scales as [E, block rows, block columns].
TensorView checked_scales(const QuantizedTensor& weight, const TensorView& out) {
  const TensorView& scales = weight.scales;
  const int last = out.rank() - 1;
  const Dims blocks = scale_shape(weight.layout, out.dim(last - 1), out.dim(last));
  const Dims shape = shape_like(out, blocks[0], blocks[1]);
  const bool is_e8m0 = weight.layout.dtype == DType::kF8E8M0;
  const bool dtype_fits =
      scales.dtype() == weight.layout.dtype || (is_e8m0 && scales.dtype() == DType::kU8);
  const bool is_one_each = weight.format == StorageFormat::kFp8Tensor && scales.is_contiguous() &&
                           scales.numel() == num_elements(shape);
  if (!dtype_fits || !(scales.shape() == shape || is_one_each) ||
      scales.device().type != DeviceType::kCpu ||
      (scales.numel() != 0 && scales.data() == nullptr)) {
    fail("scales", scales, str_cat(name_of(weight.layout.dtype), " ", shape, " on cpu"), out);
  }
  return with_experts(scales.shape() == shape ? scales : scales.reshape(shape));
}

float load_scale(const char* at, DType dtype) {
  return dtype == DType::kF32 ? load<float>(at) : e8m0_to_float(static_cast<uint8_t>(*at));
}

// `count` values from the k-th on of a stored row, times the scale.
template <typename T>
void dequantize_run(const uint8_t* row, bool is_fp4, int64_t k, int64_t count, float scale,
                    T* out) {
  if (!is_fp4) {
    for (int64_t i = 0; i < count; ++i) out[i] = T(e4m3_to_float(row[k + i]) * scale);
    return;
  }
  T values[16];
  for (uint8_t code = 0; code < 16; ++code) values[code] = T(e2m1_to_float(code) * scale);
  for (int64_t i = 0; i < count; ++i, ++k) {
    out[i] = values[k % 2 == 0 ? row[k / 2] & 15 : row[k / 2] >> 4];
  }
}

struct Dequantizer {
  StorageFormat format;
  ScaleLayout layout;
  TensorView values;  // all of rank 3
  TensorView scales;
  TensorView out;

  template <typename T>
  void row(int64_t e, int64_t n) const {
    const int64_t k_end = out.dim(2);
    const int64_t step = layout.block_cols == 0 ? std::max<int64_t>(k_end, 1) : layout.block_cols;
    const int64_t scale_row = layout.block_rows == 0 ? 0 : n / layout.block_rows;
    const auto* stored = reinterpret_cast<const uint8_t*>(address(values, e, n, 0));
    T* to = reinterpret_cast<T*>(const_cast<char*>(address(out, e, n, 0)));
    for (int64_t k = 0; k < k_end; k += std::min(step, k_end - k)) {
      const float scale = load_scale(address(scales, e, scale_row, k / step), scales.dtype());
      dequantize_run(stored, format == StorageFormat::kFp4, k, std::min(step, k_end - k), scale,
                     to + k);
    }
  }

  void row_of_any_dtype(int64_t e, int64_t n) const {
    if (out.dtype() == DType::kF32) return row<float>(e, n);
    if (out.dtype() == DType::kBF16) return row<BFloat16>(e, n);
    row<Float16>(e, n);
  }
};

}  // namespace

QuantizedWeight quantize(const TensorView& weight, StorageFormat format, const ScaleLayout& layout,
                         ThreadPool* threads) {
  check_weight("quantize", "weight", weight);
  validate(format, layout);
  const TensorView all = with_experts(weight);
  const Dims blocks = scale_shape(layout, all.dim(1), all.dim(2));
  const DType stored = format == StorageFormat::kFp4 ? DType::kI8 : DType::kF8E4M3;
  QuantizedWeight out{format, layout,
                      Tensor(stored, shape_like(weight, all.dim(1), row_bytes(format, all.dim(2)))),
                      Tensor(layout.dtype, shape_like(weight, blocks[0], blocks[1]))};
  const Quantizer quantizer(all, format, layout, out);
  for_each_index(quantizer.num_block_rows(), threads,
                 [&](int64_t i) { quantizer.quantize_block_row(i); });
  return out;
}

void dequantize(const QuantizedTensor& weight, const MutableTensorView& out, ThreadPool* threads) {
  check_weight("dequantize", "out", out);
  validate(weight.format, weight.layout);
  const int last = out.rank() - 1;
  if (out.dim(last) > 1 && out.stride(last) != 1) {
    throw InvalidArgument(str_cat("dequantize: expected stride 1 in the last dimension, not ",
                                  out.stride(last), ", got ", describe("out", out)));
  }
  const Dequantizer dequantizer{weight.format, weight.layout, checked_values(weight, out),
                                checked_scales(weight, out), with_experts(out)};
  const int64_t rows = dequantizer.out.dim(1);
  constexpr int64_t kRows = 16;  // that a thread takes at a time
  const int64_t runs = (rows + kRows - 1) / kRows;
  for_each_index(dequantizer.out.dim(0) * runs, threads, [&](int64_t i) {
    const int64_t end = std::min(rows, (i % runs + 1) * kRows);
    for (int64_t n = i % runs * kRows; n < end; ++n) dequantizer.row_of_any_dtype(i / runs, n);
  });
}

}  // namespace cadre

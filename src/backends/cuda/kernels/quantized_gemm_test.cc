// The grouped GEMM of quantised weights against double loops over the decoded codes: formats,
// blocks, layouts, dtypes, groups, gates.
#include "backends/cuda/kernels/quantized_gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "core/str_cat.h"
#include "quant/float8.h"
#include "support/gpu.h"

namespace cadre::cuda {
namespace {

using test::Gpu;

constexpr ScaleLayout kBlocks128 = {DType::kF32, 128, 128};
constexpr ScaleLayout kMx = {DType::kF8E8M0, 1, 32};

struct QuantizedCase {
  StorageFormat format = StorageFormat::kFp8Block;
  ScaleLayout layout = kBlocks128;
  DType dtype = DType::kBF16;
  int64_t x_group = 128;                              // of codes; -1: x holds values
  std::vector<int64_t> rows = {0, 3, 64, 0, 130, 1};  // of each group
  int64_t n = 200;
  int64_t k = 320;
  bool gather = false;
  bool dual = false;
  bool transposed = false;
  int64_t shift = 0;       // bytes off alignment, of W and codes
  int64_t row_offset = 0;  // of scale blocks
  bool table = false;
  bool accumulate = false;
};

int64_t ceil_div(int64_t a, int64_t b) { return b == 0 ? 1 : (a + b - 1) / b; }

// Matrices of all groups, in one place; scales of a group in [blocks of rows][blocks of columns].
struct Weights {
  Tensor codes;
  Tensor scales;
  Tensor codes_gpu;
  Tensor scales_gpu;
  Tensor table_gpu;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  int64_t group_stride = 0;
  int64_t scale_rows = 0;
  int64_t scale_cols = 0;
};

class Fixture {
 public:
  explicit Fixture(const QuantizedCase& c) : c_(c) {}

  Weights make_weights() {
    const auto groups = static_cast<int64_t>(c_.rows.size());
    const bool is_fp4 = c_.format == StorageFormat::kFp4;
    Weights w;
    w.row_stride = c_.transposed ? 1 : row_bytes(c_.format, c_.k) + c_.shift;
    w.col_stride = c_.transposed ? c_.n + c_.shift : 1;
    w.group_stride = c_.transposed ? c_.k * w.col_stride : c_.n * w.row_stride;
    w.codes = Tensor(DType::kU8, {c_.shift + groups * w.group_stride});
    for (int64_t i = 0; i < w.codes->numel(); ++i) {
      auto byte = static_cast<uint8_t>(random_());
      if (!is_fp4 && (byte & 0x7f) == 0x7f) byte ^= 8;  // no NaN
      w.codes->as<uint8_t>()[i] = byte;
    }
    w.scale_rows = ceil_div(c_.n + c_.row_offset, c_.layout.block_rows);
    w.scale_cols = ceil_div(c_.k, c_.layout.block_cols);
    w.scales = Tensor(c_.layout.dtype, {groups * w.scale_rows * w.scale_cols});
    for (int64_t i = 0; i < w.scales->numel(); ++i) {
      if (c_.layout.dtype == DType::kF32) {
        w.scales->as<float>()[i] = 1e-3f + uniform() * 0.01f;
      } else {
        static_cast<uint8_t*>(w.scales->mutable_data())[i] =
            static_cast<uint8_t>(116 + random_() % 8);
      }
    }
    w.codes_gpu = gpu_.to_device(w.codes);
    w.scales_gpu = gpu_.to_device(w.scales);
    return w;
  }

  double weight(const Weights& w, int64_t g, int64_t n, int64_t k) const {
    const uint8_t* codes = w.codes->as<uint8_t>() + c_.shift + g * w.group_stride;
    const int64_t row = ceil_div_down(n + c_.row_offset, c_.layout.block_rows);
    const int64_t col = ceil_div_down(k, c_.layout.block_cols);
    const int64_t at = (g * w.scale_rows + row) * w.scale_cols + col;
    const double scale = c_.layout.dtype == DType::kF32
                             ? w.scales->as<float>()[at]
                             : e8m0_to_float(static_cast<const uint8_t*>(w.scales->data())[at]);
    if (c_.format == StorageFormat::kFp4) {
      const uint8_t two = codes[n * w.row_stride + k / 2];
      return e2m1_to_float(static_cast<uint8_t>(k % 2 == 0 ? two : two >> 4)) * scale;
    }
    return e4m3_to_float(codes[n * w.row_stride + k * w.col_stride]) * scale;
  }

  DeviceMatrices on_device(Weights& w) {
    const size_t scale_bytes = size_of(c_.layout.dtype);
    const auto matrix = [&](int64_t g) {
      DeviceMatrix m;
      m.data = w.codes_gpu->as<uint8_t>() + c_.shift + g * w.group_stride;
      m.row_stride = w.row_stride;
      m.col_stride = w.col_stride;
      m.scales = static_cast<const char*>(w.scales_gpu->data()) +
                 static_cast<size_t>(g * w.scale_rows * w.scale_cols) * scale_bytes;
      m.scale_row_stride = w.scale_cols;
      m.scale_row_offset = c_.row_offset;
      return m;
    };
    DeviceMatrices d;
    d.first = matrix(0);
    d.expert_stride = w.group_stride;
    d.scale_expert_bytes = w.scale_rows * w.scale_cols * static_cast<int64_t>(scale_bytes);
    if (!c_.table) return d;
    const auto groups = static_cast<int64_t>(c_.rows.size());
    const Tensor table(DType::kU8, {groups * static_cast<int64_t>(sizeof(DeviceMatrix))});
    for (int64_t g = 0; g < groups; ++g) {
      const DeviceMatrix m = matrix(g);
      std::memcpy(table->as<uint8_t>() + g * static_cast<int64_t>(sizeof(m)), &m, sizeof(m));
    }
    w.table_gpu = gpu_.to_device(table);
    d.expert_stride = 0;
    d.table = static_cast<const DeviceMatrix*>(w.table_gpu->data());
    return d;
  }

  void check(double bound);

 private:
  static int64_t ceil_div_down(int64_t a, int64_t b) { return b == 0 ? 0 : a / b; }
  float uniform() { return static_cast<float>(random_() >> 8) * 0x1p-24f; }

  const QuantizedCase& c_;
  Gpu gpu_;
  std::mt19937 random_{9};
};

void set(const MutableTensorView& t, int64_t i, float value) {
  if (t.dtype() == DType::kF32) t.as<float>()[i] = value;
  if (t.dtype() == DType::kBF16) t.as<BFloat16>()[i] = BFloat16(value);
  if (t.dtype() == DType::kF16) t.as<Float16>()[i] = Float16(value);
}
float get(const TensorView& t, int64_t i) {
  if (t.dtype() == DType::kF32) return t.as<float>()[i];
  if (t.dtype() == DType::kBF16) return static_cast<float>(t.as<BFloat16>()[i]);
  return static_cast<float>(t.as<Float16>()[i]);
}

void Fixture::check(double bound) {
  const auto groups = static_cast<int64_t>(c_.rows.size());
  const Tensor offsets(DType::kI32, {groups + 1});
  offsets->as<int32_t>()[0] = 0;
  for (int64_t g = 0; g < groups; ++g) {
    offsets->as<int32_t>()[g + 1] =
        offsets->as<int32_t>()[g] + static_cast<int32_t>(c_.rows[static_cast<size_t>(g)]);
  }
  const int64_t rows = offsets->as<int32_t>()[groups];
  constexpr int64_t kTopK = 3;
  const int64_t x_rows = c_.gather ? rows / kTopK + 1 : rows;
  const Tensor pairs(DType::kI32, {rows});
  for (int64_t r = 0; r < rows; ++r) {
    pairs->as<int32_t>()[r] =
        static_cast<int32_t>(random_() % static_cast<uint64_t>(x_rows * kTopK));
  }
  const bool has_codes = c_.x_group >= 0;
  const int64_t x_stride = c_.k + c_.shift;
  const Tensor x(has_codes ? DType::kU8 : c_.dtype, {c_.shift + x_rows * x_stride});
  const int64_t x_groups = has_codes ? ceil_div(c_.k, c_.x_group) : 1;
  const Tensor x_scales(DType::kF32, {x_groups * x_rows});
  for (int64_t i = 0; i < x->numel(); ++i) {
    if (has_codes) {
      x->as<uint8_t>()[i] = static_cast<uint8_t>(random_() % 0x7f | (random_() & 0x80));
    } else {
      set(x, i, 2 * uniform() - 1);
    }
  }
  for (int64_t i = 0; i < x_scales->numel(); ++i)
    x_scales->as<float>()[i] = 0.001f + uniform() * 0.01f;
  const auto x_at = [&](int64_t r, int64_t k) -> double {
    const int64_t at = c_.shift + r * x_stride + k;
    if (!has_codes) return get(x, at);
    const int64_t group = c_.x_group == 0 ? 0 : k / c_.x_group;
    return double{e4m3_to_float(x->as<uint8_t>()[at])} * x_scales->as<float>()[group * x_rows + r];
  };

  Weights w = make_weights();
  Weights up = make_weights();
  const Tensor out(DType::kF32, {rows, c_.n});
  for (int64_t i = 0; i < out->numel(); ++i) out->as<float>()[i] = uniform();
  const Tensor x_gpu = gpu_.to_device(x);
  const Tensor x_scales_gpu = gpu_.to_device(x_scales);
  const Tensor offsets_gpu = gpu_.to_device(offsets);
  const Tensor pairs_gpu = gpu_.to_device(pairs);
  const Tensor out_gpu = gpu_.to_device(out);
  QuantizedGemm args;
  args.format = c_.format;
  args.layout = c_.layout;
  if (has_codes) {
    args.x_scales = x_scales_gpu->as<float>();
    args.x_scale_row_stride = 1;
    args.x_scale_group_stride = x_rows;
    args.x_group = c_.x_group;
  }
  PortableGemm& gemm = args.gemm;
  gemm.dtype = c_.dtype;
  gemm.num_groups = groups;
  gemm.offsets = offsets_gpu->as<int32_t>();
  gemm.max_rows = rows;
  gemm.n = c_.n;
  gemm.k = c_.k;
  gemm.x =
      static_cast<const char*>(x_gpu->data()) + static_cast<size_t>(c_.shift) * size_of(x->dtype());
  gemm.x_stride = x_stride;
  if (c_.gather) gemm.pair_of_row = pairs_gpu->as<int32_t>();
  gemm.top_k = kTopK;
  gemm.w = on_device(w);
  if (c_.dual) gemm.up_w = on_device(up);
  gemm.apply_gate = c_.dual;
  gemm.out = out_gpu->mutable_data();
  gemm.out_dtype = DType::kF32;
  gemm.out_stride = c_.n;
  gemm.accumulate = c_.accumulate;
  quantized_gemm(args, gpu_.stream());
  const Tensor got = gpu_.to_host(out_gpu);

  double difference = 0;
  double norm = 0;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = offsets->as<int32_t>()[g]; r < offsets->as<int32_t>()[g + 1]; ++r) {
      const int64_t source = c_.gather ? pairs->as<int32_t>()[r] / kTopK : r;
      for (int64_t n = 0; n < c_.n; ++n) {
        double sum = 0;
        double up_sum = 0;
        for (int64_t k = 0; k < c_.k; ++k) {
          sum += x_at(source, k) * weight(w, g, n, k);
          if (c_.dual) up_sum += x_at(source, k) * weight(up, g, n, k);
        }
        if (c_.dual) sum = sum / (1 + std::exp(-sum)) * up_sum;
        if (c_.accumulate) sum += out->as<float>()[r * c_.n + n];
        const double delta = got->as<float>()[r * c_.n + n] - sum;
        difference += delta * delta;
        norm += sum * sum;
      }
    }
  }
  EXPECT_TRUE(std::sqrt(difference / norm) <= bound) << std::sqrt(difference / norm);
}

// Products are exact, so only float32 sums round.
void check(const QuantizedCase& c) {
  Fixture(c).check(c.dtype == DType::kF32 && c.x_group < 0 ? 2e-6 : 4e-6);
}

TEST(QuantizedGemm, EveryFormatInEveryDtype) {
  CADRE_REQUIRE_GPU();
  struct Form {
    StorageFormat format;
    ScaleLayout layout;
  };
  const Form forms[] = {{StorageFormat::kFp8Block, kBlocks128},
                        {StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}},
                        {StorageFormat::kFp8Block, {DType::kF32, 96, 96}},
                        {StorageFormat::kFp8Block, {DType::kF32, 40, 100}},
                        {StorageFormat::kFp8Block, {DType::kF32, 1, 0}},
                        {StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}},
                        {StorageFormat::kMxFp8, kMx},
                        {StorageFormat::kFp4, kMx}};
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const Form& form : forms) {
      for (const int64_t x_group : {128, 32, 0, -1}) {
        for (const bool dual : {false, true}) {
          SCOPED_TRACE(str_cat(name_of(form.format), " ", form.layout.block_rows, " x ",
                               form.layout.block_cols, " ", name_of(dtype), " group ", x_group,
                               dual ? " dual" : ""));
          check({.format = form.format,
                 .layout = form.layout,
                 .dtype = dtype,
                 .x_group = x_group,
                 .rows = {0, 3, 66},
                 .n = 70,
                 .k = 160,
                 .dual = dual});
        }
      }
    }
  }
}

TEST(QuantizedGemm, SizesBesideTheTilesAndBlocks) {
  CADRE_REQUIRE_GPU();
  for (const int64_t k : {1, 2, 31, 33, 64, 96, 160, 192, 320, 576, 768}) {
    for (const auto format : {StorageFormat::kFp8Block, StorageFormat::kFp4}) {
      const bool is_fp4 = format == StorageFormat::kFp4;
      SCOPED_TRACE(str_cat(name_of(format), " k ", k));
      check({.format = format,
             .layout = is_fp4 ? kMx : kBlocks128,
             .x_group = is_fp4 ? -1 : 128,
             .rows = {5, 65},
             .n = k % 3 == 0 ? 192 : 129,
             .k = k});
    }
  }
}

TEST(QuantizedGemm, LayoutsOfAnyStrideAndAlignment) {
  CADRE_REQUIRE_GPU();
  for (const bool dual : {false, true}) {
    check({.gather = true, .dual = dual});
    check({.dual = dual, .transposed = true});
    check({.gather = true, .dual = dual, .shift = 1, .table = true});
    check({.dual = dual, .transposed = true, .shift = 3});
    check({.dual = dual, .row_offset = 40});
    check({.format = StorageFormat::kFp4,
           .layout = kMx,
           .x_group = -1,
           .gather = true,
           .dual = dual,
           .shift = 1,
           .table = true});
    check({.format = StorageFormat::kMxFp8,
           .layout = kMx,
           .x_group = -1,
           .dual = dual,
           .row_offset = 7});
  }
}

TEST(QuantizedGemm, AddsToWhatIsThere) {
  CADRE_REQUIRE_GPU();
  check({.rows = {33}, .accumulate = true});
}

}  // namespace
}  // namespace cadre::cuda

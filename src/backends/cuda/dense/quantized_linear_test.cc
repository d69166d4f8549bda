// Products with quantised weights against double loops that round activations as
// quant/activations.h does: formats, schemes, few rows and many, groups, unaligned tensors.
#include <algorithm>
#include <cmath>
#include <limits>
#include <utility>

#include "backends/cuda/dense/ops_fixture.h"
#include "core/str_cat.h"
#include "quant/activations.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

struct Form {
  StorageFormat format;
  ScaleLayout layout;
  ActivationScheme activations;
};

constexpr Form kForms[] = {
    {StorageFormat::kFp8Block, {DType::kF32, 128, 128}, ActivationScheme::kDynamic},
    {StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}, ActivationScheme::kDynamic},
    {StorageFormat::kFp8Block, {DType::kF32, 96, 96}, ActivationScheme::kDynamic},
    {StorageFormat::kFp8Block, {DType::kF32, 128, 128}, ActivationScheme::kStatic},
    {StorageFormat::kFp8Block, {DType::kF32, 128, 128}, ActivationScheme::kNone},
    {StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}, ActivationScheme::kDynamic},
    {StorageFormat::kMxFp8, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone},
    {StorageFormat::kFp4, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone},
    {StorageFormat::kFp4, {DType::kF8E8M0, 1, 32}, ActivationScheme::kDynamic}};

int64_t blocks(int64_t size, int64_t block) { return block == 0 ? 1 : (size + block - 1) / block; }

class GpuQuantizedLinear : public GpuOpsTest {
 protected:
  /// A weight on both sides; `shift` bytes off alignment.
  struct Weight {
    LinearWeights gpu;
    std::vector<double> values;  // [n, k]
    std::vector<Tensor> tensors;
    int64_t n = 0;
  };

  Weight make_weight(const Form& form, int64_t n, int64_t k, int64_t shift = 0) {
    const bool is_fp4 = form.format == StorageFormat::kFp4;
    const int64_t width = row_bytes(form.format, k);
    const DType dtype = is_fp4 ? DType::kI8 : DType::kF8E4M3;
    const Tensor codes(DType::kU8, {shift + n * width});
    for (int64_t i = 0; i < codes->numel(); ++i) {
      auto code = static_cast<uint8_t>(random_());
      if (!is_fp4 && (code & 0x7f) == 0x7f) code ^= 1;  // no NaN
      codes->as<uint8_t>()[i] = code;
    }
    const int64_t rows = blocks(n, form.layout.block_rows);
    const int64_t columns = blocks(k, form.layout.block_cols);
    const Tensor scales(form.layout.dtype, {rows, columns});
    std::vector<double> scale_values;
    for (int64_t i = 0; i < scales->numel(); ++i) {
      if (form.layout.dtype == DType::kF32) {
        scales->as<float>()[i] = 1e-3f + static_cast<float>(random_() % 1000) * 1e-5f;
        scale_values.push_back(scales->as<float>()[i]);
      } else {
        const auto code = static_cast<uint8_t>(117 + random_() % 6);
        static_cast<uint8_t*>(scales->mutable_data())[i] = code;
        scale_values.push_back(e8m0_to_float(code));
      }
    }
    Weight w;
    w.n = n;
    for (int64_t i = 0; i < n; ++i) {
      for (int64_t j = 0; j < k; ++j) {
        const int64_t row = form.layout.block_rows == 0 ? 0 : i / form.layout.block_rows;
        const int64_t column = form.layout.block_cols == 0 ? 0 : j / form.layout.block_cols;
        const uint8_t* from = codes->as<uint8_t>() + shift + i * width;
        const float code =
            is_fp4 ? e2m1_to_float(static_cast<uint8_t>(from[j / 2] >> (j % 2 == 0 ? 0 : 4)))
                   : e4m3_to_float(from[j]);
        w.values.push_back(code * scale_values[static_cast<size_t>(row * columns + column)]);
      }
    }
    w.tensors = {to_gpu(codes), to_gpu(scales)};
    w.gpu.weight = TensorView(w.tensors[0]->as<uint8_t>() + shift, dtype, {n, width}, kGpu);
    w.gpu.scales = w.tensors[1];
    w.gpu.scale_layout = form.layout;
    w.gpu.activations = form.activations;
    w.gpu.input_scale = 0.013f;
    return w;
  }

  static std::vector<double> rounded(const Form& form, const TensorView& x, float input_scale) {
    std::vector<double> values = to_doubles(x);
    if (form.activations == ActivationScheme::kNone) return values;
    const int64_t k = x.dim(1);
    const int64_t group = form.format == StorageFormat::kFp4 ? 32 : 128;
    std::vector<uint8_t> codes(static_cast<size_t>(k));
    std::vector<float> scales(static_cast<size_t>(blocks(k, group)), input_scale);
    for (int64_t r = 0; r < x.dim(0); ++r) {
      const auto row = values.begin() + r * k;
      const std::vector<float> floats(row, row + k);
      if (form.activations == ActivationScheme::kStatic) {
        quantize_activations(floats.data(), k, input_scale, codes.data());
      } else {
        quantize_activations(floats.data(), k, group, codes.data(), scales.data());
      }
      for (int64_t i = 0; i < k; ++i) {
        row[i] = double{e4m3_to_float(codes[static_cast<size_t>(i)])} *
                 scales[static_cast<size_t>(i / group)];
      }
    }
    return values;
  }

  static std::vector<double> reference(const Form& form, const TensorView& x, const Weight& w,
                                       const TensorView& bias) {
    const std::vector<double> a = rounded(form, x, w.gpu.input_scale);
    const std::vector<double> b = bias ? to_doubles(bias) : std::vector<double>();
    const auto k = static_cast<size_t>(x.dim(1));
    std::vector<double> result;
    for (size_t i = 0; i < static_cast<size_t>(x.dim(0)); ++i) {
      for (size_t j = 0; j < static_cast<size_t>(w.n); ++j) {
        double sum = b.empty() ? 0 : b[j];
        for (size_t l = 0; l < k; ++l) sum += a[i * k + l] * w.values[j * k + l];
        result.push_back(sum);
      }
    }
    return result;
  }

  // Codes and their products are exact, so only float32 sums and the output round.
  static constexpr double kExact = 5e-6;
  // Of Hopper's e4m3 products, whose sums of 128 of k keep about 13 bits (docs/numerics.md).
  static constexpr double kNative = 1e-3;
  static double limit(DType out, double sums = kExact) { return std::max(bound(out), sums); }

  void check(const Form& form, DType dtype, int64_t rows, int64_t n, int64_t k, int64_t shift = 0,
             double sums = kExact) {
    const Tensor x = random(dtype, {rows, k});
    const Tensor gpu_x = to_gpu(x);
    Weight w = make_weight(form, n, k, shift);
    const Tensor bias = random(dtype, {n});
    const Tensor gpu_bias = to_gpu(bias);
    for (const bool has_bias : {false, true}) {
      w.gpu.bias = has_bias ? TensorView(gpu_bias.view()) : TensorView();
      const auto expected =
          reference(form, x, w, has_bias ? TensorView(bias.view()) : TensorView());
      for (const DType out_dtype : {dtype, DType::kF32}) {
        const Tensor out = poisoned(out_dtype, {rows, n});
        ops_->linear(gpu_x, w.gpu, out, *workspace_, stream_);
        EXPECT_LE(test::relative_error(values(out), expected), limit(out_dtype, sums));
        const auto once = bits(out);
        poison(out);
        ops_->linear(gpu_x, w.gpu, out, *workspace_, stream_);
        EXPECT_EQ(bits(out), once);
      }
    }
  }
};

TEST_F(GpuQuantizedLinear, EveryFormatAndNumberOfRows) {
  for (const DType dtype : kComputeDtypes) {
    for (const Form& form : kForms) {
      for (const int64_t rows : {1, 3, 5, 16, 17, 70}) {
        SCOPED_TRACE(str_cat(name_of(dtype), " ", name_of(form.format), " ",
                             static_cast<int>(form.activations), " rows ", rows));
        check(form, dtype, rows, 67, 576);
      }
    }
  }
}

TEST_F(GpuQuantizedLinear, OddSizesAndUnalignedTensors) {
  for (const Form& form : kForms) {
    SCOPED_TRACE(str_cat(name_of(form.format), " ", static_cast<int>(form.activations)));
    check(form, DType::kBF16, 2, 1, 16);
    check(form, DType::kBF16, 2, 130, 2048, 1);
    if (form.format != StorageFormat::kFp4) check(form, DType::kBF16, 3, 9, 131);
    check(form, DType::kF16, 4, 33, 160);
  }
}

TEST_F(GpuQuantizedLinear, AddsAndTakesGroupsWithPlainWeights) {
  for (const int64_t rows : {2, 40}) {
    const Tensor x = random(DType::kBF16, {rows, 256});
    const Tensor gpu_x = to_gpu(x);
    std::vector<Weight> quantized;
    for (const Form& form : kForms) quantized.push_back(make_weight(form, 40, 256));
    const Tensor plain = random(DType::kBF16, {24, 256});
    const Tensor gpu_plain = to_gpu(plain);
    const LinearWeights plain_weights{gpu_plain.view(), {}};
    std::vector<const LinearWeights*> all;
    std::vector<Tensor> outs;
    std::vector<MutableTensorView> views;
    for (const Weight& w : quantized) all.push_back(&w.gpu);
    all.insert(all.begin() + 2, &plain_weights);
    for (const LinearWeights* w : all) {
      outs.push_back(poisoned(DType::kF32, {rows, w->weight.dim(0)}));
      views.push_back(outs.back());
    }
    ops_->linear_group(gpu_x, all, views, *workspace_, stream_);
    for (size_t i = 0; i < quantized.size(); ++i) {
      const auto expected = reference(kForms[i], x, quantized[i], {});
      const double most = limit(DType::kF32, rows > 16 ? kNative : kExact);
      EXPECT_LE(test::relative_error(values(outs[i < 2 ? i : i + 1]), expected), most) << i;
      const Tensor before = random(DType::kF32, {rows, 40});
      const Tensor sum = to_gpu(before);
      ops_->linear_add(gpu_x, quantized[i].gpu, sum, *workspace_, stream_);
      std::vector<double> total = to_doubles(before);
      for (size_t j = 0; j < total.size(); ++j) total[j] += expected[j];
      EXPECT_LE(test::relative_error(values(sum), total), most) << i;
    }
  }
}

// Blocks of 128 of K with float32 and E8M0 scales, and one scale for all: what fp8_rows() and the
// GEMM of Hopper take.
constexpr Form kBlockForms[] = {kForms[0], kForms[1], kForms[5]};

TEST_F(GpuQuantizedLinear, FewRowsOfFp8) {
  for (const Form& form : kBlockForms) {
    SCOPED_TRACE(str_cat(name_of(form.format), " ", name_of(form.layout.dtype)));
    check(form, DType::kBF16, 1, 4100, 128);      // many tiles a block
    check(form, DType::kF16, 8, 300, 4096 + 48);  // K ends inside a unit, N inside a block
    check(form, DType::kF32, 16, 131, 2048);
  }
}

// Rows that leave no room for a long ring, or none at all: fewer at a time.
TEST_F(GpuQuantizedLinear, FewRowsOfALongK) {
  check(kForms[0], DType::kBF16, 1, 40, 18432);
  check(kForms[0], DType::kBF16, 8, 24, 18432);
  check(kForms[0], DType::kBF16, 16, 24, 7168);
  check(kForms[1], DType::kBF16, 13, 24, 18432);
}

TEST_F(GpuQuantizedLinear, ManyRowsOfFp8) {
  for (const Form& form : kBlockForms) {
    for (const int64_t rows : {17, 64, 130, 300}) {
      SCOPED_TRACE(str_cat(name_of(form.format), " ", name_of(form.layout.dtype), " rows ", rows));
      check(form, DType::kBF16, rows, 8, 160, 0, kNative);
      check(form, DType::kF16, rows, 136, 576, 0, kNative);
      check(form, DType::kF32, rows, 520, 1024, 0, kNative);
    }
  }
}

// Few tiles and a long K, which is cut into parts that are added afterwards.
TEST_F(GpuQuantizedLinear, PartsOfALongK) {
  for (const Form& form : kBlockForms) {
    SCOPED_TRACE(str_cat(name_of(form.format), " ", name_of(form.layout.dtype)));
    check(form, DType::kBF16, 40, 264, 4096, 0, kNative);
    check(form, DType::kF32, 150, 36, 7168, 0, kNative);
    const Weight w = make_weight(form, 136, 4096);
    const Tensor x = random(DType::kF16, {70, 4096});
    const Tensor before = random(DType::kF32, {70, 136});
    const Tensor sum = to_gpu(before);
    ops_->linear_add(to_gpu(x), w.gpu, sum, *workspace_, stream_);
    std::vector<double> total = reference(form, x, w, {});
    const std::vector<double> old = to_doubles(before);
    for (size_t i = 0; i < total.size(); ++i) total[i] += old[i];
    expect_near(sum, total, limit(DType::kF32, kNative));
  }
}

// Many weights of one x, also beyond what one launch or one quantisation serves; results added.
TEST_F(GpuQuantizedLinear, ManyWeightsOfFp8) {
  for (const int64_t rows : {3, 40}) {
    const Tensor x = random(DType::kBF16, {rows, 384});
    const Tensor gpu_x = to_gpu(x);
    std::vector<Weight> weights;
    std::vector<Tensor> outs;
    std::vector<const LinearWeights*> all;
    std::vector<MutableTensorView> views;
    for (int64_t i = 0; i < 18; ++i) {
      weights.push_back(make_weight(kBlockForms[i % 3], 24 + 8 * i, 384));
      outs.push_back(poisoned(DType::kF32, {rows, weights.back().n}));
      views.push_back(outs.back());
    }
    for (const Weight& w : weights) all.push_back(&w.gpu);
    ops_->linear_group(gpu_x, all, views, *workspace_, stream_);
    for (size_t i = 0; i < weights.size(); ++i) {
      const auto expected = reference(kBlockForms[i % 3], x, weights[i], {});
      expect_near(outs[i], expected, limit(DType::kF32, rows > 16 ? kNative : kExact));
      ops_->linear_add(gpu_x, weights[i].gpu, outs[i], *workspace_, stream_);
      std::vector<double> twice = expected;
      for (double& value : twice) value *= 2;
      expect_near(outs[i], twice, limit(DType::kF32, rows > 16 ? kNative : kExact));
    }
  }
}

// A token that is not finite spoils its own results alone, and all of them.
TEST_F(GpuQuantizedLinear, KeepsNanToItsToken) {
  const Weight w = make_weight(kForms[0], 136, 640);
  for (const int64_t rows : {7, 90}) {
    const Tensor x = random(DType::kBF16, {rows, 640});
    const Tensor out = poisoned(DType::kF32, {rows, 136});
    ops_->linear(to_gpu(x), w.gpu, out, *workspace_, stream_);
    const std::vector<double> clean = values(out);
    set(x, 5 * 640 + 300, std::numeric_limits<float>::infinity());
    ops_->linear(to_gpu(x), w.gpu, out, *workspace_, stream_);
    const std::vector<double> spoiled = values(out);
    for (size_t i = 0; i < clean.size(); ++i) {
      if (i / 136 == 5) {
        EXPECT_TRUE(std::isnan(spoiled[i])) << i;
      } else {
        EXPECT_EQ(spoiled[i], clean[i]) << i;
      }
    }
  }
}

// x of other rows in the recorded place gives what a call gives.
TEST_F(GpuQuantizedLinear, ReplaysInAGraph) {
  const Weight w = make_weight(kForms[0], 264, 512);
  const Weight v = make_weight(kForms[1], 72, 512);
  const LinearWeights* all[] = {&w.gpu, &v.gpu};
  for (const int64_t rows : {5, 150}) {
    const Tensor first = random(DType::kBF16, {rows, 512});
    const Tensor second = random(DType::kBF16, {rows, 512});
    const Tensor x = to_gpu(first);
    const Tensor a = poisoned(DType::kBF16, {rows, 264});
    const Tensor b = poisoned(DType::kBF16, {rows, 72});
    const MutableTensorView outs[] = {a, b};
    const auto graph =
        runtime_->capture(stream_, [&] { ops_->linear_group(x, all, outs, *workspace_, stream_); });
    for (const Tensor& rows_of_x : {first, second, first}) {
      copy_tensor(rows_of_x.view(), x, stream_);
      poison(a);
      poison(b);
      graph->launch(stream_);
      const auto replayed = std::pair(bits(a), bits(b));
      ops_->linear_group(x, all, outs, *workspace_, stream_);
      EXPECT_EQ(replayed, std::pair(bits(a), bits(b)));
    }
    EXPECT_LE(test::relative_error(values(a), reference(kForms[0], first, w, {})),
              limit(DType::kBF16, kNative));
  }
}

// The workspace that a layer reserves is enough, also where the group asks for two kinds of codes.
TEST_F(GpuQuantizedLinear, KeepsToItsWorkspace) {
  const Weight fp8 = make_weight(kForms[0], 40, 320);
  const Weight fp4 = make_weight(kForms[8], 40, 320);
  const Tensor gpu_x = to_gpu(random(DType::kBF16, {33, 320}));
  Workspace workspace(kGpu, ops_->linear_workspace_bytes(33, 320, DType::kBF16, 1));
  const Tensor a = poisoned(DType::kF32, {33, 40});
  const Tensor b = poisoned(DType::kF32, {33, 40});
  const LinearWeights* all[] = {&fp8.gpu, &fp4.gpu};
  const MutableTensorView outs[] = {a, b};
  EXPECT_NO_THROW(ops_->linear_group(gpu_x, all, outs, workspace, stream_));
}

}  // namespace
}  // namespace cadre::cuda

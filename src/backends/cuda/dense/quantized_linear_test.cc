// Products with quantised weights against double loops that round activations as
// quant/activations.h does: formats, schemes, few rows and many, groups, unaligned tensors.
#include <algorithm>

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
  static double limit(DType out) { return std::max(bound(out), 5e-6); }

  void check(const Form& form, DType dtype, int64_t rows, int64_t n, int64_t k, int64_t shift = 0) {
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
        EXPECT_LE(test::relative_error(values(out), expected), limit(out_dtype));
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
      EXPECT_LE(test::relative_error(values(outs[i < 2 ? i : i + 1]), expected), limit(DType::kF32))
          << i;
      const Tensor before = random(DType::kF32, {rows, 40});
      const Tensor sum = to_gpu(before);
      ops_->linear_add(gpu_x, quantized[i].gpu, sum, *workspace_, stream_);
      std::vector<double> total = to_doubles(before);
      for (size_t j = 0; j < total.size(); ++j) total[j] += expected[j];
      EXPECT_LE(test::relative_error(values(sum), total), limit(DType::kF32)) << i;
    }
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

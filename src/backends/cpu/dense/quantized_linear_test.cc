// Products with quantised weights against the recipe in float64: codes of activations as
// quant/activations.h makes them (which has tests of its own), all sums and scales exact.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/ops_fixture.h"
#include "quant/activations.h"
#include "quant/float8.h"

namespace cadre::cpu {
namespace {

struct Case {
  const char* name;
  DType weight;  // F8_E4M3, or I8 for FP4
  ScaleLayout layout;
  ActivationScheme activations;
};

const Case kCases[] = {
    {"blocks of 128", DType::kF8E4M3, {DType::kF32, 128, 128}, ActivationScheme::kDynamic},
    {"powers of two", DType::kF8E4M3, {DType::kF8E8M0, 128, 128}, ActivationScheme::kDynamic},
    {"blocks of 32 x 96", DType::kF8E4M3, {DType::kF32, 32, 96}, ActivationScheme::kDynamic},
    {"one scale", DType::kF8E4M3, {DType::kF32, 0, 0}, ActivationScheme::kDynamic},
    {"static", DType::kF8E4M3, {DType::kF32, 0, 0}, ActivationScheme::kStatic},
    {"static, blocks", DType::kF8E4M3, {DType::kF32, 128, 128}, ActivationScheme::kStatic},
    {"mxfp8", DType::kF8E4M3, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone},
    {"fp4", DType::kI8, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone},
};

int64_t blocks(int64_t size, int64_t block) { return block == 0 ? 1 : (size + block - 1) / block; }

class QuantizedLinear : public OpsTest {
 protected:
  // Random codes without NaN, scales between 2^-12 and 2^-4 of which the float32 ones are no powers
  // of two.
  void make(const Case& c, int64_t n, int64_t k) {
    weight_ = Tensor(c.weight, {n, c.weight == DType::kI8 ? (k + 1) / 2 : k});
    scales_ =
        Tensor(c.layout.dtype, {blocks(n, c.layout.block_rows), blocks(k, c.layout.block_cols)});
    for (int64_t i = 0; i < weight_->numel(); ++i) {
      auto code = static_cast<uint8_t>(random_() % 256);
      if (c.weight == DType::kF8E4M3 && code % 128 == 127) code = 0x38;
      weight_->as<uint8_t>()[i] = code;
    }
    for (int64_t i = 0; i < scales_->numel(); ++i) {
      const auto exponent = static_cast<int>(random_() % 9) - 12;
      if (c.layout.dtype == DType::kF32) {
        scales_->as<float>()[i] = std::ldexp(1.37f, exponent);
      } else {
        scales_->as<uint8_t>()[i] = static_cast<uint8_t>(127 + exponent);
      }
    }
    weights_ = {weight_.view(), {}, scales_.view(), c.layout, c.activations, 0.031f};
  }

  double weight_at(int64_t n, int64_t k) const {
    const ScaleLayout& layout = weights_.scale_layout;
    const auto* codes = weight_->as<uint8_t>() + n * weight_->stride(0);
    const int64_t at = (layout.block_rows == 0 ? 0 : n / layout.block_rows) * scales_->dim(1) +
                       (layout.block_cols == 0 ? 0 : k / layout.block_cols);
    const double scale = layout.dtype == DType::kF32
                             ? static_cast<double>(scales_->as<float>()[at])
                             : std::ldexp(1.0, scales_->as<uint8_t>()[at] - 127);
    if (weight_->dtype() == DType::kF8E4M3) return scale * e4m3_to_float(codes[k]);
    const int two = codes[k / 2];
    return scale * e2m1_to_float(static_cast<uint8_t>(k % 2 == 0 ? two & 15 : two >> 4));
  }

  // Row t of x as it enters.
  std::vector<double> entering(const Tensor& x, int64_t t) const {
    const int64_t k = x->dim(1);
    const std::vector<double> row = test::to_doubles(x->slice(t, t + 1));
    if (weights_.activations == ActivationScheme::kNone) return row;
    const std::vector<float> values(row.begin(), row.end());
    std::vector<uint8_t> codes(values.size());
    std::vector<float> scales(static_cast<size_t>(blocks(k, 128)), weights_.input_scale);
    if (weights_.activations == ActivationScheme::kDynamic) {
      quantize_activations(values.data(), k, 128, codes.data(), scales.data());
    } else {
      quantize_activations(values.data(), k, weights_.input_scale, codes.data());
    }
    std::vector<double> result;
    for (size_t i = 0; i < codes.size(); ++i) {
      result.push_back(double{e4m3_to_float(codes[i])} * scales[i / 128]);
    }
    return result;
  }

  std::vector<double> expected(const Tensor& x, const Tensor& bias) const {
    std::vector<double> result;
    for (int64_t t = 0; t < x->dim(0); ++t) {
      const std::vector<double> row = entering(x, t);
      for (int64_t n = 0; n < weight_->dim(0); ++n) {
        double sum = bias ? test::to_doubles(bias.view())[static_cast<size_t>(n)] : 0;
        for (size_t k = 0; k < row.size(); ++k)
          sum += row[k] * weight_at(n, static_cast<int64_t>(k));
        result.push_back(sum);
      }
    }
    return result;
  }

  Tensor weight_;
  Tensor scales_;
  LinearWeights weights_;
};

TEST_F(QuantizedLinear, EveryFormatMatchesFloat64) {
  for (const Case& c : kCases) {
    for (const DType dtype : kComputeDtypes) {
      SCOPED_TRACE(std::string(c.name) + " in " + std::string(name_of(dtype)));
      make(c, 160, 320);
      const Tensor bias = random(dtype, {160});
      weights_.bias = bias.view();
      const Tensor x = random(dtype, {3, 320});
      const Tensor out(DType::kF32, {3, 160});
      ops_.linear(x, weights_, out, workspace_, stream_);
      expect_near(out.view(), expected(x, bias), 1e-6);
      const Tensor rounded(dtype, {3, 160});
      ops_.linear(x, weights_, rounded, workspace_, stream_);
      expect_near(rounded.view(), expected(x, bias), bound(dtype));
    }
  }
}

TEST_F(QuantizedLinear, SizesThatFillNoBlock) {
  for (const Case& c : kCases) {
    for (const int64_t k : {1, 31, 64, 129, 576}) {
      SCOPED_TRACE(std::string(c.name) + ", k = " + std::to_string(k));
      make(c, 37, k);
      const Tensor x = random(DType::kF32, {2, k});
      const Tensor out(DType::kF32, {2, 37});
      ops_.linear(x, weights_, out, workspace_, stream_);
      expect_near(out.view(), expected(x, {}), 1e-6);
    }
  }
}

TEST_F(QuantizedLinear, GroupsAndSumsAreTheSameProducts) {
  make(kCases[0], 160, 256);
  const Tensor x = random(DType::kBF16, {5, 256});
  const Tensor y(DType::kF32, {5, 160});
  const Tensor z(DType::kF32, {5, 160});
  const Tensor sum(DType::kF32, {5, 160});
  std::fill_n(sum->as<float>(), sum->numel(), 2.0f);
  const LinearWeights* const both[] = {&weights_, &weights_};
  const MutableTensorView outs[] = {y, z};
  ops_.linear_group(x, both, outs, workspace_, stream_);
  ops_.linear_add(x, weights_, sum, workspace_, stream_);
  for (int64_t i = 0; i < y->numel(); ++i) {
    ASSERT_EQ(y->as<float>()[i], z->as<float>()[i]);
    ASSERT_EQ(sum->as<float>()[i], 2.0f + y->as<float>()[i]);
  }
}

TEST_F(QuantizedLinear, ATokenHasTheSameBitsInAnyBatchAndScalesAtAnyAddress) {
  make(kCases[2], 64, 192);
  const Tensor x = random(DType::kF32, {130, 192});
  const Tensor all(DType::kF32, {130, 64});
  ops_.linear(x, weights_, all, workspace_, stream_);
  std::vector<std::byte> bytes(scales_->nbytes() + 1);
  std::memcpy(bytes.data() + 1, scales_->data(), scales_->nbytes());
  weights_.scales = {bytes.data() + 1, DType::kF32, scales_->shape()};
  for (const int64_t t : {0, 63, 64, 129}) {
    const Tensor one(DType::kF32, {1, 64});
    ops_.linear(x->slice(t, t + 1), weights_, one, workspace_, stream_);
    for (int64_t n = 0; n < 64; ++n) {
      ASSERT_EQ(one->as<float>()[n], all->as<float>()[t * 64 + n]) << t << ", " << n;
    }
  }
}

TEST_F(QuantizedLinear, ANaNStaysInItsToken) {
  make(kCases[0], 32, 256);
  const Tensor x = random(DType::kF32, {3, 256});
  x->as<float>()[256 + 5] = std::nanf("");
  const Tensor out(DType::kF32, {3, 32});
  ops_.linear(x, weights_, out, workspace_, stream_);
  for (int64_t i = 0; i < out->numel(); ++i) {
    ASSERT_EQ(std::isnan(out->as<float>()[i]), i / 32 == 1) << i;
  }
}

TEST_F(QuantizedLinear, StatedWorkspaceSuffices) {
  for (const int64_t tokens : {1, 64, 200}) {
    make(kCases[0], 40, 512);
    Workspace exact({},
                    ops_.linear_workspace_bytes(tokens, 512, DType::kBF16, threads_.num_threads()));
    const Tensor x = random(DType::kBF16, {tokens, 512});
    const Tensor out(DType::kF32, {tokens, 40});
    EXPECT_NO_THROW(ops_.linear(x, weights_, out, exact, stream_));
  }
}

}  // namespace
}  // namespace cadre::cpu

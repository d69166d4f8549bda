// Row-wise operations against float64.
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/ops_fixture.h"
#include "backends/cpu/kernels/isa.h"
#include "cadre/error.h"
#include "core/device_runtime.h"
#include "support/allocation_counter.h"

namespace cadre::cpu {
namespace {

TensorView vector_view(const std::vector<int32_t>& values) {
  return {values.data(), DType::kI32, {static_cast<int64_t>(values.size())}};
}
TensorView vector_view(const std::vector<float>& values) {
  return {values.data(), DType::kF32, {static_cast<int64_t>(values.size())}};
}

using test::to_doubles;

class RowOps : public OpsTest {};

TEST_F(RowOps, MissingDeviceIsUnsupportedAndSaysWhatThereIs) {
  if (find_device_runtime(DeviceType::kCuda) != nullptr) GTEST_SKIP() << "a build with CUDA";
  try {
    dense_ops(DeviceType::kCuda);
    FAIL() << "expected Unsupported";
  } catch (const Unsupported& error) {
    EXPECT_NE(std::string(error.what()).find("cuda"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find("available: cpu"), std::string::npos);
  }
}

TEST_F(RowOps, TheInstructionSetIsTheOneOfTheKernels) {
  EXPECT_EQ(dense_ops(DeviceType::kCpu).instruction_set(), name_of(active_isa()));
}

std::vector<double> norm_reference(const TensorView& x, const TensorView& weight, double eps) {
  const std::vector<double> values = to_doubles(x);
  const std::vector<double> weights = to_doubles(weight);
  std::vector<double> result;
  for (size_t row = 0; row < values.size(); row += weights.size()) {
    double sum = 0;
    for (size_t i = 0; i < weights.size(); ++i) sum += values[row + i] * values[row + i];
    const double rms = std::sqrt(sum / static_cast<double>(weights.size()) + eps);
    for (size_t i = 0; i < weights.size(); ++i) {
      result.push_back(values[row + i] / rms * weights[i]);
    }
  }
  return result;
}

TEST_F(RowOps, RmsNormOfAnyWidthAndDtype) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t width : {1, 5, 64, 511, 513, 2048, 2051}) {
      const Tensor x = random(dtype, {7, width}, 3);
      const Tensor weight = random(DType::kBF16, {width});
      const Tensor out(dtype, {7, width});
      ops_.rms_norm(x.view(), weight.view(), 1e-5f, out, stream_);
      expect_near(out.view(), norm_reference(x.view(), weight.view(), 1e-5), bound(dtype));
    }
  }
}

TEST_F(RowOps, RmsNormOfHeadsInPlaceWithAnUnalignedWeight) {
  const Tensor x = random(DType::kF32, {5, 3, 10});
  const Tensor aligned = random(DType::kBF16, {10});
  std::vector<std::byte> bytes(21);
  std::memcpy(bytes.data() + 1, aligned->data(), 20);
  const TensorView weight(bytes.data() + 1, DType::kBF16, {10});
  const std::vector<double> reference = norm_reference(x.view(), aligned.view(), 1e-6);
  ops_.rms_norm(x.view(), weight, 1e-6f, x, stream_);
  expect_near(x.view(), reference, 1e-6);
}

TEST_F(RowOps, RmsNormOfARowDoesNotDependOnTheOthers) {
  const Tensor x = random(DType::kBF16, {300, 257});
  const Tensor weight = random(DType::kF32, {257});
  const Tensor all(DType::kF32, {300, 257});
  const Tensor one(DType::kF32, {1, 257});
  ops_.rms_norm(x.view(), weight.view(), 1e-6f, all, stream_);
  ops_.rms_norm(x->slice(211, 212), weight.view(), 1e-6f, one, stream_);
  EXPECT_EQ(std::memcmp(all->slice(211, 212).data(), one->data(), 257 * sizeof(float)), 0);
}

TEST_F(RowOps, LinearWithBiasIntoEitherDtype) {
  for (const DType dtype : kComputeDtypes) {
    for (const DType out_dtype : {dtype, DType::kF32}) {
      const Tensor x = random(dtype, {3, 130});
      const Tensor weight = random(dtype, {9, 130});
      const Tensor bias = random(DType::kF32, {9});
      const Tensor out(out_dtype, {3, 9});
      ops_.linear(x.view(), {weight.view(), bias.view()}, out, workspace_, stream_);
      const auto a = to_doubles(x.view());
      const auto w = to_doubles(weight.view());
      const auto b = to_doubles(bias.view());
      std::vector<double> reference;
      for (size_t i = 0; i < 3 * 9; ++i) {
        double sum = b[i % 9];
        for (size_t k = 0; k < 130; ++k) sum += a[i / 9 * 130 + k] * w[i % 9 * 130 + k];
        reference.push_back(sum);
      }
      expect_near(out.view(), reference, bound(out_dtype));
    }
  }
}

TEST_F(RowOps, EmbeddingAndGatherConvert) {
  const Tensor table = random(DType::kF16, {11, 600});
  const Tensor out(DType::kF32, {3, 600});
  const std::vector<int32_t> ids = {10, 0, 10};
  ops_.embedding(vector_view(ids), table.view(), out, stream_);
  const Tensor same(DType::kF16, {3, 600});
  ops_.gather_rows(table.view(), vector_view(ids), same, stream_);
  const auto values = to_doubles(table.view());
  for (const TensorView& result : {TensorView(out.view()), TensorView(same.view())}) {
    const auto got = to_doubles(result);
    for (size_t i = 0; i < got.size(); ++i) {
      ASSERT_EQ(got[i], values[static_cast<size_t>(ids[i / 600]) * 600 + i % 600]);
    }
  }
}

TEST_F(RowOps, AddIntoFloatFromSixteenBits) {
  const Tensor y = random(DType::kF32, {40, 1025});
  const Tensor x = random(DType::kBF16, {40, 1025});
  std::vector<double> reference = to_doubles(y.view());
  const auto added = to_doubles(x.view());
  for (size_t i = 0; i < reference.size(); ++i) reference[i] += added[i];
  ops_.add(y, x.view(), stream_);
  expect_near(y.view(), reference, 1e-6);
}

TEST_F(RowOps, AddSigmoidGated) {
  const Tensor y = random(DType::kF32, {4, 700});
  const Tensor x = random(DType::kF32, {4, 700});
  const Tensor gate = random(DType::kF32, {4, 1}, 4);
  std::vector<double> reference = to_doubles(y.view());
  const auto added = to_doubles(x.view());
  const auto gates = to_doubles(gate.view());
  for (size_t i = 0; i < reference.size(); ++i) {
    reference[i] += added[i] / (1 + std::exp(-gates[i / 700]));
  }
  ops_.add_sigmoid_gated(y, x.view(), gate.view(), stream_);
  expect_near(y.view(), reference, 1e-6);
}

TEST_F(RowOps, ScaleMultipliesInPlace) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(dtype, {7, 601});
    std::vector<double> reference = to_doubles(x.view());
    for (double& value : reference) value *= static_cast<double>(0.3f);
    ops_.scale(x, 0.3f, stream_);
    expect_near(x.view(), reference, bound(dtype));
  }
}

TEST_F(RowOps, ClampKeepsNaN) {
  const Tensor x(DType::kBF16, {1, 5});
  const float values[] = {-3, -0.5f, 0.25f, 7, NAN};
  for (int64_t i = 0; i < 5; ++i) set(x, i, values[i]);
  ops_.clamp(x, 0.5f, stream_);
  const auto got = to_doubles(x.view());
  EXPECT_EQ(std::vector<double>(got.begin(), got.begin() + 4),
            (std::vector<double>{-0.5, -0.5, 0.25, 0.5}));
  EXPECT_TRUE(std::isnan(got[4]));
}

double activation_reference(double x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return x / (1 + std::exp(-x));
    case Activation::kGelu:
      return x * 0.5 * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return std::max(x, 0.0);
    case Activation::kRelu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
  }
  return 0;
}

TEST_F(RowOps, GatedActivations) {
  for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                      Activation::kRelu, Activation::kRelu2}) {
    for (const DType dtype : kComputeDtypes) {
      const Tensor gate = random(DType::kF32, {9, 515}, 3);
      const Tensor up = random(DType::kF32, {9, 515});
      const Tensor out(dtype, {9, 515});
      ops_.gated_activation(gate.view(), up.view(), activation, out, stream_);
      std::vector<double> reference = to_doubles(gate.view());
      const auto ups = to_doubles(up.view());
      for (size_t i = 0; i < reference.size(); ++i) {
        reference[i] = activation_reference(reference[i], activation) * ups[i];
      }
      expect_near(out.view(), reference, bound(dtype));
    }
  }
}

TEST_F(RowOps, RopeRotatesHalvesAndLeavesTheRest) {
  for (const DType dtype : kComputeDtypes) {
    constexpr size_t kHalf = 3;
    constexpr size_t kDim = 10;  // the last four stay
    const std::vector<int32_t> positions = {0, 7, 100};
    const std::vector<float> frequencies = {1.0f, 0.3f, 0.01f};
    const Tensor x = random(dtype, {3, 2, kDim});
    const auto before = to_doubles(x.view());
    const Tensor cos(DType::kF32, {3, kHalf});
    const Tensor sin(DType::kF32, {3, kHalf});
    ops_.rope_angles(vector_view(positions), vector_view(frequencies), 1.5f, cos, sin, stream_);
    ops_.rope(x, cos.view(), sin.view(), stream_);
    std::vector<double> reference = before;
    for (size_t row = 0; row < 6; ++row) {
      for (size_t i = 0; i < kHalf; ++i) {
        const double angle =
            static_cast<double>(static_cast<float>(positions[row / 2]) * frequencies[i]);
        const double a = before[row * kDim + i];
        const double b = before[row * kDim + kHalf + i];
        reference[row * kDim + i] = 1.5 * (a * std::cos(angle) - b * std::sin(angle));
        reference[row * kDim + kHalf + i] = 1.5 * (b * std::cos(angle) + a * std::sin(angle));
      }
    }
    expect_near(x.view(), reference, bound(dtype));
  }
}

// growth at position 39: 2 * 40 / 16 - 1 = 4
TEST_F(RowOps, DynamicAnglesFallAsTheSequenceGrows) {
  const std::vector<int32_t> positions = {3, 15, 16, 39, 5000};
  const std::vector<float> frequencies = {1.0f, 0.1f, 0.01f};
  const Tensor cos(DType::kF32, {5, 3});
  const Tensor sin(DType::kF32, {5, 3});
  ops_.dynamic_rope_angles(vector_view(positions), vector_view(frequencies), {2.0f, 16}, cos, sin,
                           stream_);
  const auto c = to_doubles(cos.view());
  const auto s = to_doubles(sin.view());
  for (size_t i = 0; i < c.size(); ++i) {
    const int position = positions[i / 3];
    const double growth = position < 16 ? 1 : 2.0 * (position + 1) / 16 - 1;
    const double frequency =
        static_cast<double>(frequencies[i % 3]) * std::pow(growth, -static_cast<double>(i % 3) / 2);
    EXPECT_NEAR(c[i], std::cos(position * frequency), 2e-5) << i;
    EXPECT_NEAR(s[i], std::sin(position * frequency), 2e-5) << i;
  }
}

TEST_F(RowOps, NoTokensAndNoAllocations) {
  const Tensor x = random(DType::kF32, {64, 2048});
  const Tensor none(DType::kF32, {0, 2048});
  const Tensor weight = random(DType::kF32, {2048});
  const Tensor gate = random(DType::kF32, {64, 1});
  const std::vector<int32_t> ids = {1, 2};
  const test::AllocationCounter counter;
  ops_.rms_norm(none.view(), weight.view(), 1e-6f, none, stream_);
  ops_.add(none, none.view(), stream_);
  ops_.rms_norm(x.view(), weight.view(), 1e-6f, x, stream_);
  ops_.add(x, x.view(), stream_);
  ops_.add_sigmoid_gated(x, x.view(), gate.view(), stream_);
  ops_.clamp(x, 2, stream_);
  ops_.scale(x, 2, stream_);
  ops_.gated_activation(x.view(), x.view(), Activation::kSilu, x, stream_);
  ops_.gather_rows(x.view(), vector_view(ids), x, stream_);
  const int64_t allocations = counter.count();
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace cadre::cpu

// What models with images need, against float64.
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/ops_fixture.h"

namespace cadre::cpu {
namespace {

using test::to_doubles;

class VisionOps : public OpsTest {};

Tensor integers(const std::vector<int32_t>& values, const Dims& shape) {
  Tensor tensor(DType::kI32, shape);
  std::memcpy(tensor->mutable_data(), values.data(), values.size() * sizeof(int32_t));
  return tensor;
}

std::vector<double> layer_norm_reference(const TensorView& x, const TensorView& weight,
                                         const TensorView& bias, double eps) {
  const auto values = to_doubles(x);
  const auto weights = to_doubles(weight);
  const auto biases = to_doubles(bias);
  const size_t width = weights.size();
  std::vector<double> result;
  for (size_t row = 0; row < values.size(); row += width) {
    double mean = 0;
    for (size_t i = 0; i < width; ++i) mean += values[row + i] / static_cast<double>(width);
    double variance = 0;
    for (size_t i = 0; i < width; ++i) {
      variance += std::pow(values[row + i] - mean, 2) / static_cast<double>(width);
    }
    for (size_t i = 0; i < width; ++i) {
      result.push_back((values[row + i] - mean) / std::sqrt(variance + eps) * weights[i] +
                       biases[i]);
    }
  }
  return result;
}

TEST_F(VisionOps, TheCpuHasThem) { EXPECT_TRUE(ops_.has_vision_ops()); }

TEST_F(VisionOps, LayerNormOfAnyWidthAndDtype) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t width : {2, 5, 64, 513, 2051}) {
      const Tensor x = random(dtype, {7, width}, 3);
      for (int64_t i = 0; i < width; ++i) set(x->slice(2, 3), i, 100 + static_cast<float>(i % 3));
      const Tensor weight = random(DType::kBF16, {width});
      const Tensor bias = random(DType::kBF16, {width});
      const Tensor out(dtype, {7, width});
      ops_.layer_norm(x.view(), weight.view(), bias.view(), 1e-6f, out, stream_);
      // The third row's mean is a hundred times its spread.
      expect_near(out.view(), layer_norm_reference(x.view(), weight.view(), bias.view(), 1e-6),
                  dtype == DType::kF32 ? 1e-5 : bound(dtype));
    }
  }
}

TEST_F(VisionOps, PlainActivations) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(DType::kF32, {9, 515}, 3);
    const Tensor out(dtype, {9, 515});
    const auto values = to_doubles(x.view());
    std::vector<double> tanh_form;
    std::vector<double> exact;
    for (const double v : values) {
      tanh_form.push_back(0.5 * v *
                          (1 + std::tanh(std::sqrt(2 / M_PI) * (v + 0.044715 * v * v * v))));
      exact.push_back(v * 0.5 * std::erfc(-v / std::sqrt(2.0)));
    }
    ops_.plain_activation(x.view(), Activation::kGeluTanh, out, stream_);
    expect_near(out.view(), tanh_form, bound(dtype));
    ops_.plain_activation(x.view(), Activation::kGelu, out, stream_);
    expect_near(out.view(), exact, bound(dtype));
  }
}

TEST_F(VisionOps, AnglesTakeThePositionOfTheirAxis) {
  const Tensor positions = integers({0, 7, 100, 5, 2, 31}, {2, 3});
  const Tensor axes = integers({0, 1, 1, 0}, {4});
  const Tensor frequencies = random(DType::kF32, {4});
  const Tensor cos(DType::kF32, {3, 4});
  const Tensor sin(DType::kF32, {3, 4});
  ops_.rope_angles_on_axes({positions.view(), axes.view()}, frequencies.view(), 1.5f, cos, sin,
                           stream_);
  for (int64_t t = 0; t < 3; ++t) {
    for (int64_t i = 0; i < 4; ++i) {
      const int32_t position = positions->as<int32_t>()[axes->as<int32_t>()[i] * 3 + t];
      const float angle = static_cast<float>(position) * frequencies->as<float>()[i];
      EXPECT_NEAR(cos->as<float>()[t * 4 + i], 1.5 * std::cos(static_cast<double>(angle)), 1e-6);
      EXPECT_NEAR(sin->as<float>()[t * 4 + i], 1.5 * std::sin(static_cast<double>(angle)), 1e-6);
    }
  }
}

TEST_F(VisionOps, WeightedRowsAreAdded) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor table = random(dtype, {5, 600});
    const Tensor rows = integers({0, 4, 4, 1, 2, 2}, {2, 3});
    const Tensor weights = random(DType::kF32, {2, 3});
    const Tensor y = random(DType::kF32, {2, 600});
    std::vector<double> reference = to_doubles(y.view());
    const auto values = to_doubles(table.view());
    for (size_t i = 0; i < 6; ++i) {
      for (size_t c = 0; c < 600; ++c) {
        const auto row = static_cast<size_t>(rows->as<int32_t>()[i]);
        reference[i / 3 * 600 + c] +=
            static_cast<double>(weights->as<float>()[i]) * values[row * 600 + c];
      }
    }
    ops_.add_weighted_rows(table.view(), rows.view(), weights.view(), y, stream_);
    expect_near(y.view(), reference, 1e-6);
  }
}

TEST_F(VisionOps, RowsAreScatteredOrAdded) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(dtype, {2, 600});
    const Tensor rows = integers({3, 1}, {2});
    const Tensor y = random(DType::kF32, {4, 600});
    auto overwritten = to_doubles(y.view());
    auto added = overwritten;
    const auto values = to_doubles(x.view());
    for (size_t i = 0; i < 1200; ++i) {
      const size_t target = (i < 600 ? 3 : 1) * 600 + i % 600;
      overwritten[target] = values[i];
      added[target] = 2 * values[i];
    }
    ops_.scatter_rows(x.view(), rows.view(), Accumulate::kOverwrite, y, stream_);
    EXPECT_EQ(to_doubles(y.view()), overwritten);
    ops_.scatter_rows(x.view(), rows.view(), Accumulate::kAdd, y, stream_);
    for (size_t i = 0; i < 600; ++i) added[i] = overwritten[i];
    for (size_t i = 1200; i < 1800; ++i) added[i] = overwritten[i];
    EXPECT_EQ(to_doubles(y.view()), added);
  }
}

TEST_F(VisionOps, AttentionThatSeesAllOfItsSequence) {
  constexpr int64_t kHeads = 3;
  constexpr int64_t kDim = 20;
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t n : {1, 5, 64, 150}) {
      const Tensor q = random(dtype, {n, kHeads, kDim});
      const Tensor keys = random(dtype, {1, kHeads, n, kDim});
      const Tensor values = random(dtype, {1, kHeads, n, kDim});
      const Tensor out(dtype, q->shape());
      const std::vector<SequenceSpan> sequence = {{0, 0, n, 0}};
      ops_.attention({.q = q.view(),
                      .keys = keys.view(),
                      .values = values.view(),
                      .tokens = {sequence},
                      .scale = 0.3f,
                      .out = out,
                      .is_causal = false},
                     workspace_, stream_);
      const auto wide_q = to_doubles(q.view());
      const auto wide_keys = to_doubles(keys.view());
      const auto wide_values = to_doubles(values.view());
      std::vector<double> reference(wide_q.size(), 0);
      for (int64_t i = 0; i < n * kHeads; ++i) {
        double sum = 0;
        double* row = reference.data() + i * kDim;
        for (int64_t j = 0; j < n; ++j) {
          const int64_t key = ((i % kHeads) * n + j) * kDim;
          double score = 0;
          for (int64_t d = 0; d < kDim; ++d) {
            score +=
                wide_q[static_cast<size_t>(i * kDim + d)] * wide_keys[static_cast<size_t>(key + d)];
          }
          const double weight = std::exp(score * static_cast<double>(0.3f));
          sum += weight;
          for (int64_t d = 0; d < kDim; ++d) {
            row[d] += weight * wide_values[static_cast<size_t>(key + d)];
          }
        }
        for (int64_t d = 0; d < kDim; ++d) row[d] /= sum;
      }
      expect_near(out.view(), reference, 2 * bound(dtype));
    }
  }
}

}  // namespace
}  // namespace cadre::cpu

// What models with images need, against the CPU's operations in float32 on the same numbers, which
// have tests against float64 of their own.
#include <cmath>

#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

class GpuVisionOps : public GpuOpsTest {};

TEST_F(GpuVisionOps, TheGpuHasThem) { EXPECT_TRUE(ops_->has_vision_ops()); }

TEST_F(GpuVisionOps, LayerNormOfAnyWidthAndDtype) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t width : {2, 5, 64, 513, 1152, 2051}) {
      const Tensor x = random(dtype, {7, width}, 3);
      for (int64_t i = 0; i < width; ++i) set(x->slice(2, 3), i, 100 + static_cast<float>(i % 3));
      const Tensor weight = random(DType::kBF16, {width});
      const Tensor bias = random(DType::kBF16, {width});
      const Tensor expected(DType::kF32, {7, width});
      cpu_.layer_norm(wide(x.view()).view(), weight.view(), bias.view(), 1e-6f, expected, host_);
      const Tensor out = poisoned(dtype, {7, width});
      ops_->layer_norm(to_gpu(x.view()).view(), to_gpu(weight.view()).view(),
                       to_gpu(bias.view()).view(), 1e-6f, out, stream_);
      expect_as(out.view(), expected, dtype == DType::kF32 ? 1e-5 : bound(dtype));
    }
  }
}

TEST_F(GpuVisionOps, PlainActivations) {
  for (const DType dtype : kComputeDtypes) {
    for (const Activation activation :
         {Activation::kGeluTanh, Activation::kGelu, Activation::kSilu}) {
      const Tensor x = random(dtype, {9, 515}, 3);
      const Tensor expected(DType::kF32, {9, 515});
      cpu_.plain_activation(wide(x.view()).view(), activation, expected, host_);
      const Tensor out = poisoned(dtype, {9, 515});
      ops_->plain_activation(to_gpu(x.view()).view(), activation, out, stream_);
      expect_as(out.view(), expected, 2 * bound(dtype));
    }
  }
}

TEST_F(GpuVisionOps, AnglesTakeThePositionOfTheirAxis) {
  const Tensor positions = integers({0, 7, 100, 5, 2, 31}, {2, 3});
  const Tensor axes = integers({0, 1, 1, 0}, {4});
  const Tensor frequencies = random(DType::kF32, {4});
  const Tensor expected_cos(DType::kF32, {3, 4});
  const Tensor expected_sin(DType::kF32, {3, 4});
  cpu_.rope_angles_on_axes({positions.view(), axes.view()}, frequencies.view(), 1.5f, expected_cos,
                           expected_sin, host_);
  const Tensor cos = poisoned(DType::kF32, {3, 4});
  const Tensor sin = poisoned(DType::kF32, {3, 4});
  ops_->rope_angles_on_axes({to_gpu(positions.view()).view(), to_gpu(axes.view()).view()},
                            to_gpu(frequencies.view()).view(), 1.5f, cos, sin, stream_);
  expect_as(cos.view(), expected_cos, 1e-6);
  expect_as(sin.view(), expected_sin, 1e-6);
}

TEST_F(GpuVisionOps, WeightedRowsAreAdded) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor table = random(dtype, {5, 600});
    const Tensor rows = integers({0, 4, 4, 1, 2, 2}, {2, 3});
    const Tensor weights = random(DType::kF32, {2, 3});
    const Tensor y = random(DType::kF32, {2, 600});
    const Tensor gpu = to_gpu(y.view());
    cpu_.add_weighted_rows(table.view(), rows.view(), weights.view(), y, host_);
    ops_->add_weighted_rows(to_gpu(table.view()).view(), to_gpu(rows.view()).view(),
                            to_gpu(weights.view()).view(), gpu, stream_);
    expect_as(gpu.view(), y, 1e-6);
  }
}

TEST_F(GpuVisionOps, RowsAreScatteredOrAdded) {
  for (const DType dtype : kComputeDtypes) {
    const Tensor x = random(dtype, {2, 600});
    const Tensor rows = integers({3, 1}, {2});
    const Tensor y = random(DType::kF32, {4, 600});
    const Tensor gpu = to_gpu(y.view());
    const Tensor gpu_x = to_gpu(x.view());
    const Tensor gpu_rows = to_gpu(rows.view());
    for (const Accumulate accumulate : {Accumulate::kOverwrite, Accumulate::kAdd}) {
      cpu_.scatter_rows(x.view(), rows.view(), accumulate, y, host_);
      ops_->scatter_rows(gpu_x.view(), gpu_rows.view(), accumulate, gpu, stream_);
      EXPECT_EQ(values(gpu.view()), to_doubles(y.view()));
    }
  }
}

TEST_F(GpuVisionOps, AttentionThatSeesAllOfItsSequence) {
  for (const DType dtype : kComputeDtypes) {
    for (const auto& [n, heads, dim] : {std::tuple<int64_t, int64_t, int64_t>{1, 3, 20},
                                        {5, 3, 20},
                                        {64, 2, 72},
                                        {150, 4, 64},
                                        {700, 16, 72},
                                        {300, 80, 128}}) {
      const Tensor q = random(dtype, {n, heads, dim});
      const Tensor keys = random(dtype, {1, heads, n, dim});
      const Tensor values = random(dtype, {1, heads, n, dim});
      const std::vector<SequenceSpan> sequence = {{0, 0, n, 0}};
      const float scale = 1.0f / std::sqrt(static_cast<float>(dim));
      const Tensor wide_q = wide(q.view());
      const Tensor wide_keys = wide(keys.view());
      const Tensor wide_values = wide(values.view());
      const Tensor expected(DType::kF32, q->shape());
      Workspace room({}, cpu_.attention_workspace_bytes({heads, heads, dim}, n, 1));
      cpu_.attention({.q = wide_q.view(),
                      .keys = wide_keys.view(),
                      .values = wide_values.view(),
                      .tokens = {sequence},
                      .scale = scale,
                      .out = expected,
                      .is_causal = false},
                     room, host_);
      const GpuTokens tokens = gpu_tokens(sequence, stream_);
      const Tensor gpu_q = to_gpu(q.view());
      const Tensor gpu_keys = to_gpu(keys.view());
      const Tensor gpu_values = to_gpu(values.view());
      const Tensor out = poisoned(dtype, q->shape());
      ops_->attention({.q = gpu_q.view(),
                       .keys = gpu_keys.view(),
                       .values = gpu_values.view(),
                       .tokens = tokens.get(),
                       .scale = scale,
                       .out = out,
                       .is_causal = false},
                      *workspace_, stream_);
      expect_as(out.view(), expected, dtype == DType::kF32 ? 2e-6 : 1.5 * bound(dtype));
    }
  }
}

}  // namespace
}  // namespace cadre::cuda

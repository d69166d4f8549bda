// Latent attention and what goes with it on a GPU against the CPU's operations, which are held to
// float64 by their own tests.
#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

/// Elements [first, first + count) of every head.
MutableTensorView part(const MutableTensorView& x, int64_t first, int64_t count) {
  auto* data =
      static_cast<std::byte*>(x.mutable_data()) + static_cast<size_t>(first) * size_of(x.dtype());
  return {data, x.dtype(), {x.dim(0), x.dim(1), count}, x.strides(), x.device()};
}

struct Step {
  LatentShape shape;
  int64_t nope;  // elements of q in front of what rotates
  int64_t max_tokens;
  std::vector<SequenceSpan> sequences;
};

// DeepSeek-V3's shape, V2-Lite's, others; decoding, prefill, both; many splits and none.
const Step kSteps[] = {
    {{128, 512, 64}, 128, 700, {{1, 0, 1, 690}}},
    {{128, 512, 64}, 128, 200, {{2, 0, 1, 130}, {0, 1, 3, 0}, {1, 4, 5, 129}}},
    {{16, 512, 64}, 128, 300, {{0, 0, 1, 299}, {1, 1, 1, 0}, {2, 2, 1, 31}, {3, 3, 1, 32}}},
    {{16, 512, 64}, 128, 200, {{0, 0, 150, 17}, {1, 150, 37, 0}}},
    {{5, 512, 64}, 128, 100, {{0, 0, 20, 3}}},
    {{4, 32, 16}, 24, 200, {{2, 0, 1, 130}, {0, 1, 37, 0}, {1, 38, 5, 129}}},
    {{3, 26, 6}, 12, 400, {{0, 0, 1, 390}, {1, 1, 2, 300}}},
    {{7, 512, 128}, 9, 150, {{0, 0, 3, 140}}},
    {{1, 1, 2}, 1, 20, {{0, 0, 9, 11}}},
};

class GpuLatent : public GpuOpsTest {
 protected:
  GpuLatent() : threads_(2), cpu_stream_(Stream::cpu(threads_)), cpu_workspace_({}, 64 << 20) {}

  static int64_t num_tokens(const Step& step) {
    return step.sequences.back().first_row + step.sequences.back().num_tokens;
  }

  ThreadPool threads_;
  Stream cpu_stream_;
  Workspace cpu_workspace_;
  DenseOps& cpu_ = dense_ops(DeviceType::kCpu);
};

TEST_F(GpuLatent, AttentionEqualsTheCpu) {
  for (const DType dtype : kComputeDtypes) {
    for (const Step& step : kSteps) {
      SCOPED_TRACE(testing::Message() << name_of(dtype) << " rank " << step.shape.rank << " heads "
                                      << step.shape.num_heads << " tokens " << num_tokens(step));
      const auto& [shape, nope, max_tokens, sequences] = step;
      const int64_t tokens = num_tokens(step);
      const Tensor q_latent = random(dtype, {tokens, shape.num_heads, shape.rank});
      const Tensor q = random(dtype, {tokens, shape.num_heads, nope + shape.rope_dim});
      const Tensor rows = random(dtype, {4, 1, max_tokens, shape.rank + shape.rope_dim});
      const float scale = 1.5f / std::sqrt(static_cast<float>(shape.rank + shape.rope_dim));
      const Tensor expected(dtype, q_latent->shape());
      cpu_.latent_attention({q_latent.view(),
                             part(q, nope, shape.rope_dim),
                             rows.view(),
                             {sequences},
                             scale,
                             expected},
                            cpu_workspace_, cpu_stream_);

      const Tensor gpu_latent = to_gpu(q_latent.view());
      const Tensor gpu_q = to_gpu(q.view());
      const Tensor gpu_rows = to_gpu(rows.view());
      const GpuTokens gpu = gpu_tokens(sequences, stream_);
      Workspace exact(kGpu,
                      ops_->latent_attention_workspace_bytes(shape, tokens * shape.num_heads, 1));
      std::vector<std::byte> first;
      for (int run = 0; run < 3; ++run) {
        const Tensor out = poisoned(dtype, q_latent->shape());
        ops_->latent_attention({gpu_latent.view(), part(gpu_q, nope, shape.rope_dim),
                                gpu_rows.view(), gpu.get(), scale, out},
                               exact, stream_);
        if (run == 0) {
          first = bits(out.view());
          expect_near(out.view(), to_doubles(expected.view()),
                      dtype == DType::kF32 ? 3e-6 : 2 * bound(dtype));
        } else {
          EXPECT_EQ(bits(out.view()), first);
        }
      }
    }
  }
}

TEST_F(GpuLatent, FreshRowsAndQueriesEqualTheCpu) {
  for (const DType dtype : kComputeDtypes) {
    for (const Step& step : kSteps) {
      const auto& [shape, nope, max_tokens, sequences] = step;
      const int64_t tokens = num_tokens(step);
      const int64_t width = shape.rank + shape.rope_dim;
      const Tensor fresh = random(DType::kF32, {tokens, width}, 3);
      const Tensor norm = random(dtype, {shape.rank});
      const Tensor q = random(dtype, {tokens, shape.num_heads, nope + shape.rope_dim});
      const Tensor rows = random(dtype, {4, 1, max_tokens, width});
      const Tensor cos = random(DType::kF32, {tokens, shape.rope_dim / 2});
      const Tensor sin = random(DType::kF32, {tokens, shape.rope_dim / 2});
      const Tensor gpu_q = to_gpu(q.view());
      const Tensor gpu_rows = to_gpu(rows.view());
      const Tensor gpu_fresh = to_gpu(fresh.view());
      const Tensor gpu_norm = to_gpu(norm.view());
      const Tensor gpu_cos = to_gpu(cos.view());
      const Tensor gpu_sin = to_gpu(sin.view());
      const GpuTokens gpu = gpu_tokens(sequences, stream_);
      const bool interleaved = shape.num_heads % 2 == 0;
      ops_->finish_latent(
          {gpu_fresh.view(), gpu_norm.view(), 1e-5f, part(gpu_q, nope, shape.rope_dim), interleaved,
           gpu_cos.view(), gpu_sin.view(), gpu.get(), gpu_rows},
          stream_);
      cpu_.finish_latent({fresh.view(),
                          norm.view(),
                          1e-5f,
                          part(q, nope, shape.rope_dim),
                          interleaved,
                          cos.view(),
                          sin.view(),
                          {sequences},
                          rows},
                         cpu_stream_);
      expect_near(gpu_rows.view(), to_doubles(rows.view()), bound(dtype));
      expect_near(gpu_q.view(), to_doubles(q.view()), bound(dtype));
    }
  }
}

TEST_F(GpuLatent, LinearHeadsEqualTheCpu) {
  struct Shape {
    int64_t tokens, heads, n, k, beside;
    bool across;
  };
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& s : {Shape{1, 128, 512, 128, 64, true}, Shape{1, 128, 128, 512, 0, false},
                           Shape{16, 16, 512, 128, 64, true}, Shape{17, 16, 128, 512, 0, false},
                           Shape{150, 3, 512, 128, 64, true}, Shape{130, 3, 128, 512, 0, false},
                           Shape{5, 4, 32, 24, 16, true}, Shape{70, 4, 40, 72, 8, false},
                           Shape{3, 3, 26, 12, 6, true}, Shape{9, 2, 10, 26, 1, false}}) {
      SCOPED_TRACE(testing::Message()
                   << name_of(dtype) << " " << s.tokens << " tokens, " << s.n << " x " << s.k);
      const Tensor x = random(dtype, {s.tokens, s.heads, s.k + s.beside});
      const Tensor w = random(dtype, {s.heads, s.across ? s.k : s.n, s.across ? s.n : s.k});
      const auto weight = [&](const TensorView& from) {
        return TensorView(from.data(), dtype, {s.heads, s.n, s.k},
                          s.across ? Dims{s.n * s.k, 1, s.n} : Dims{s.n * s.k, s.k, 1},
                          from.device());
      };
      const Tensor expected(dtype, {s.tokens, s.heads, s.n});
      cpu_.linear_heads(part(x, 0, s.k), weight(w.view()), expected, cpu_workspace_, cpu_stream_);
      const Tensor gpu_x = to_gpu(x.view());
      const Tensor gpu_w = to_gpu(w.view());
      const Tensor out = poisoned(dtype, expected->shape());
      ops_->linear_heads(part(gpu_x, 0, s.k), weight(gpu_w.view()), out, *workspace_, stream_);
      expect_near(out.view(), to_doubles(expected.view()),
                  dtype == DType::kF32 ? 2e-6 : bound(dtype));
    }
  }
}

}  // namespace
}  // namespace cadre::cuda

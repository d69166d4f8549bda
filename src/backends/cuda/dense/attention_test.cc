// Attention against float64, in all ways that a step can be cut.
#include <algorithm>
#include <cmath>

#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

struct Shape {
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t window;
};

class GpuAttention : public GpuOpsTest {
 protected:
  static constexpr int64_t kSlots = 3;

  void fill(DType dtype, const Shape& shape, int64_t rows, int64_t max_tokens) {
    shape_ = shape;
    max_tokens_ = max_tokens;
    const Tensor q = random(dtype, {rows, shape.heads, shape.dim});
    const Tensor keys = random(dtype, {kSlots, shape.kv_heads, max_tokens, shape.dim});
    const Tensor values = random(dtype, {kSlots, shape.kv_heads, max_tokens, shape.dim});
    wide_q_ = to_doubles(q.view());
    wide_keys_ = to_doubles(keys.view());
    wide_values_ = to_doubles(values.view());
    q_ = to_gpu(q.view());
    keys_ = to_gpu(keys.view());
    values_ = to_gpu(values.view());
    out_ = poisoned(dtype, q_->shape());
    sinks_ = {};
    wide_sinks_.clear();
  }
  void add_sinks() {
    const Tensor sinks = random(DType::kF32, {shape_.heads}, 3);
    wide_sinks_ = to_doubles(sinks.view());
    sinks_ = to_gpu(sinks.view());
  }

  void attend(const GpuTokens& tokens) {
    Workspace exact(kGpu, ops_->attention_workspace_bytes(
                              {shape_.heads, shape_.kv_heads, shape_.dim}, q_->dim(0), 1));
    attend(tokens, exact);
    runtime_->synchronize(stream_);
  }
  void attend(const GpuTokens& tokens, Workspace& workspace) {
    ops_->attention({q_.view(), keys_.view(), values_.view(), tokens.get(), scale(), shape_.window,
                     out_, sinks_.view()},
                    workspace, stream_);
  }
  float scale() const { return 1.5f / std::sqrt(static_cast<float>(shape_.dim)); }

  // Row t of sequence s, head h.
  std::vector<double> reference_row(const SequenceSpan& s, int64_t t, int64_t h) const {
    const int64_t position = s.past + t;
    const int64_t first =
        shape_.window > 0 ? std::max<int64_t>(0, position - shape_.window + 1) : 0;
    const int64_t kv_head = h / (shape_.heads / shape_.kv_heads);
    const auto dim = static_cast<size_t>(shape_.dim);
    const double* query =
        wide_q_.data() + static_cast<size_t>((s.first_row + t) * shape_.heads + h) * dim;
    const size_t head = static_cast<size_t>((s.slot * shape_.kv_heads + kv_head) * max_tokens_);
    const double* keys = wide_keys_.data() + head * dim;
    const double* values = wide_values_.data() + head * dim;
    std::vector<double> result(dim, 0);
    double sum = wide_sinks_.empty() ? 0 : std::exp(wide_sinks_[static_cast<size_t>(h)]);
    for (int64_t j = first; j <= position; ++j) {
      double score = 0;
      for (size_t d = 0; d < dim; ++d) score += query[d] * keys[static_cast<size_t>(j) * dim + d];
      const double weight = std::exp(score * static_cast<double>(scale()));
      sum += weight;
      for (size_t d = 0; d < dim; ++d) {
        result[d] += weight * values[static_cast<size_t>(j) * dim + d];
      }
    }
    for (double& value : result) value /= sum;
    return result;
  }

  // The error over every `step`-th row and head.
  double error(const std::vector<SequenceSpan>& sequences, int64_t step = 1) {
    const std::vector<double> got = values(out_.view());
    std::vector<double> some;
    std::vector<double> reference;
    int64_t index = 0;
    for (const SequenceSpan& s : sequences) {
      for (int64_t t = 0; t < s.num_tokens; ++t) {
        for (int64_t h = 0; h < shape_.heads; ++h) {
          if (index++ % step != 0) continue;
          const auto row = reference_row(s, t, h);
          reference.insert(reference.end(), row.begin(), row.end());
          const auto from = ((s.first_row + t) * shape_.heads + h) * shape_.dim;
          some.insert(some.end(), got.begin() + from, got.begin() + from + shape_.dim);
        }
      }
    }
    for (const double x : got) {
      if (std::isnan(x)) return x;
    }
    return test::relative_error(some, reference);
  }
  static double limit(DType dtype) { return dtype == DType::kF32 ? 2e-6 : 1.2 * bound(dtype); }

  Shape shape_{};
  int64_t max_tokens_ = 0;
  Tensor q_;
  Tensor keys_;
  Tensor values_;
  Tensor out_;
  Tensor sinks_;  // none unless a test adds them
  std::vector<double> wide_sinks_;
  std::vector<double> wide_q_;
  std::vector<double> wide_keys_;
  std::vector<double> wide_values_;
};

const Shape kShapes[] = {{4, 4, 64, 0},    {8, 1, 128, 0}, {6, 2, 10, 0},   {9, 1, 128, 0},
                         {32, 4, 128, 65}, {4, 2, 100, 7}, {2, 1, 16, 64},  {40, 2, 80, 0},
                         {20, 2, 2, 65},   {6, 3, 256, 0}, {4, 2, 192, 33}, {5, 5, 7, 0},
                         {3, 1, 96, 1}};

TEST_F(GpuAttention, HeadsUpTo256AreServed) {
  EXPECT_TRUE(ops_->serves(AttentionShape{8, 2, 256}));
  EXPECT_FALSE(ops_->serves(AttentionShape{8, 2, 264}));
}

TEST_F(GpuAttention, RaggedBatches) {
  const std::vector<SequenceSpan> cases[] = {
      {{2, 0, 1, 130}, {0, 1, 37, 0}, {1, 38, 70, 129}},
      {{1, 0, 1, 0}},
      {{0, 0, 1, 199}, {2, 1, 1, 3}, {1, 2, 1, 64}},
      {{1, 0, 0, 5}, {0, 0, 3, 17}, {2, 3, 0, 0}},
  };
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& shape : kShapes) {
      for (const auto& sequences : cases) {
        const SequenceSpan& last = sequences.back();
        fill(dtype, shape, last.first_row + last.num_tokens, 200);
        const GpuTokens tokens = gpu_tokens(sequences, stream_);
        attend(tokens);
        EXPECT_LE(error(sequences), limit(dtype))
            << name_of(dtype) << " heads " << shape.heads << " dim " << shape.dim << " window "
            << shape.window << " tokens " << last.first_row + last.num_tokens;
        const auto once = bits(out_.view());
        poison(out_);
        attend(tokens);
        EXPECT_EQ(bits(out_.view()), once);
      }
    }
  }
}

TEST_F(GpuAttention, ManyRows) {
  const std::vector<SequenceSpan> sequences = {{1, 0, 300, 0}, {2, 300, 1, 500}, {0, 301, 411, 77}};
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const Shape& shape : {Shape{32, 4, 128, 0}, Shape{32, 8, 64, 100}, Shape{16, 8, 256, 0},
                               Shape{24, 8, 80, 65}, Shape{16, 16, 128, 0}, Shape{30, 6, 72, 0}}) {
      fill(dtype, shape, 712, 520);
      attend(gpu_tokens(sequences, stream_));
      EXPECT_LE(error(sequences, 97), limit(dtype))
          << name_of(dtype) << " heads " << shape.heads << " dim " << shape.dim;
    }
  }
}

TEST_F(GpuAttention, LongContextsAreSplit) {
  const std::vector<SequenceSpan> sequences = {{1, 0, 1, 4999}, {0, 1, 1, 0}, {2, 2, 1, 3000}};
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& shape :
         {Shape{8, 1, 128, 0}, Shape{8, 2, 64, 1000}, Shape{4, 1, 20, 0}, Shape{2, 1, 256, 0}}) {
      fill(dtype, shape, 3, 5000);
      attend(gpu_tokens(sequences, stream_));
      EXPECT_LE(error(sequences), limit(dtype)) << name_of(dtype) << " dim " << shape.dim;
    }
  }
}

// One block, split keys and many rows: every kernel that ends a softmax.
TEST_F(GpuAttention, SinksTakeTheirPartOfTheSoftmax) {
  const std::vector<SequenceSpan> few = {{1, 0, 1, 4999}, {0, 1, 1, 0}, {2, 2, 1, 3000}};
  const std::vector<SequenceSpan> many = {{1, 0, 300, 0}, {2, 300, 1, 500}, {0, 301, 411, 77}};
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& shape : {Shape{8, 1, 128, 0}, Shape{8, 2, 64, 128}, Shape{6, 2, 10, 0},
                               Shape{64, 8, 64, 0}, Shape{32, 8, 64, 100}}) {
      for (const auto& sequences : {few, many}) {
        const SequenceSpan& last = sequences.back();
        fill(dtype, shape, last.first_row + last.num_tokens, 5000);
        add_sinks();
        attend(gpu_tokens(sequences, stream_));
        EXPECT_LE(error(sequences, 13), limit(dtype))
            << name_of(dtype) << " heads " << shape.heads << " dim " << shape.dim << " window "
            << shape.window << " sequences of " << last.num_tokens;
      }
    }
  }
}

TEST_F(GpuAttention, ARecordedStepFollowsItsTensors) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    fill(dtype, {16, 2, 128, 0}, 2, 2000);
    GpuTokens tokens = gpu_tokens({{0, 0, 1, 3}, {1, 1, 1, 0}}, stream_);
    const auto graph = runtime_->capture(stream_, [&] { attend(tokens, *workspace_); });
    for (const auto& [a, b] : {std::pair{3, 0}, {4, 1}, {127, 128}, {1999, 500}, {10, 1600}}) {
      const std::vector<SequenceSpan> sequences = {{2, 0, 1, a}, {1, 1, 1, b}};
      write_tokens(sequences, tokens, stream_);
      poison(out_);
      graph->launch(stream_);
      runtime_->synchronize(stream_);
      EXPECT_LE(error(sequences), limit(dtype)) << a << " " << b;
    }
  }
}

// In one launch where that is possible, the bits of two.
TEST_F(GpuAttention, FinishingFirstOrInOneLaunch) {
  struct Case {
    Shape shape;
    QkNorm norm;
    std::optional<float> clip;
    int64_t rotary_dim;
    std::vector<SequenceSpan> sequences;
  };
  const std::vector<SequenceSpan> three = {{1, 0, 1, 700}, {2, 1, 1, 0}, {0, 2, 1, 16}};
  for (const Case& c : {Case{{32, 4, 128, 0}, QkNorm::kPerHead, {}, 128, three},
                        Case{{16, 8, 64, 0}, QkNorm::kNone, {}, 64, three},
                        Case{{16, 1, 256, 0}, QkNorm::kPerHead, {}, 256, three},
                        Case{{8, 2, 128, 33}, QkNorm::kNone, 0.8f, 128, three},
                        Case{{6, 2, 128, 0}, QkNorm::kPerHead, {}, 64, three},
                        Case{{8, 2, 128, 0}, QkNorm::kWholeProjection, {}, 128, three},
                        Case{{6, 3, 80, 0}, QkNorm::kPerHead, {}, 80, three},
                        Case{{34, 2, 64, 0}, QkNorm::kPerHead, {}, 64, three},
                        Case{{8, 1, 128, 0}, QkNorm::kPerHead, {}, 128, {{1, 0, 1, 4990}}},
                        Case{{8, 2, 64, 0}, QkNorm::kPerHead, {}, 64, {{1, 0, 1, 127}}},
                        Case{{8, 2, 128, 0}, QkNorm::kPerHead, {}, 128, {{1, 0, 2, 127}}}}) {
    const SequenceSpan& last = c.sequences.back();
    const int64_t rows = last.first_row + last.num_tokens;
    for (const DType dtype : kComputeDtypes) {
      fill(dtype, c.shape, rows, 5000);
      const auto [heads, kv_heads, dim, window] = c.shape;
      const GpuTokens tokens = gpu_tokens(c.sequences, stream_);
      const bool whole = c.norm == QkNorm::kWholeProjection;
      const Tensor q = random(dtype, {rows, heads, dim});
      const Tensor k = random(dtype, {rows, kv_heads, dim});
      const Tensor v = random(dtype, {rows, kv_heads, dim});
      const Tensor q_norm = to_gpu(random(dtype, {dim * (whole ? heads : 1)}).view());
      const Tensor k_norm = to_gpu(random(dtype, {dim * (whole ? kv_heads : 1)}).view());
      const Tensor cos = to_gpu(random(DType::kF32, {rows, c.rotary_dim / 2}).view());
      const Tensor sin = to_gpu(random(DType::kF32, {rows, c.rotary_dim / 2}).view());
      std::vector<std::vector<std::byte>> results;
      for (const bool in_one : {false, true}) {
        const Tensor gpu_q = to_gpu(q.view());
        const Tensor gpu_k = to_gpu(k.view());
        const Tensor gpu_v = to_gpu(v.view());
        const Tensor keys = to_gpu(to_host(keys_.view()).view());
        const Tensor values = to_gpu(to_host(values_.view()).view());
        const QkvArgs qkv{gpu_q,         gpu_k, gpu_v,  c.norm,     q_norm.view(),
                          k_norm.view(), 1e-6f, c.clip, cos.view(), sin.view(),
                          tokens.get(),  keys,  values};
        const AttentionArgs attention{gpu_q.view(), keys.view(), values.view(), tokens.get(),
                                      scale(),      window,      out_};
        poison(out_);
        if (in_one) {
          ops_->finish_and_attend(qkv, attention, *workspace_, stream_);
        } else {
          ops_->finish_qkv(qkv, stream_);
          ops_->attention(attention, *workspace_, stream_);
        }
        for (const MutableTensorView& result : {out_.view(), keys.view(), values.view()}) {
          results.push_back(bits(result));
        }
      }
      for (size_t i = 0; i < 3; ++i) {
        EXPECT_EQ(results[i], results[i + 3])
            << name_of(dtype) << " heads " << heads << " dim " << dim << " result " << i;
      }
    }
  }
}

TEST_F(GpuAttention, ScoresOfAnyMagnitude) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const float magnitude : {1e-20f, 1e3f, 1e18f}) {
      fill(dtype, {1, 1, 8, 0}, 1, 200);
      const Tensor q(dtype, {1, 1, 8});
      const Tensor keys(dtype, {kSlots, 1, 200, 8});
      for (int64_t d = 0; d < 8; ++d) set(q, d, magnitude);
      for (int64_t i = 0; i < keys->numel(); ++i) set(keys, i, i / 8 % 200 == 40 ? 2.0f : -1.0f);
      q_ = to_gpu(q.view());
      keys_ = to_gpu(keys.view());
      attend(gpu_tokens({{0, 0, 1, 99}}, stream_));
      const auto got = values(out_.view());
      for (size_t d = 0; d < 8; ++d) {
        EXPECT_TRUE(std::isfinite(got[d]));
        if (magnitude > 1) {
          EXPECT_NEAR(got[d], wide_values_[40 * 8 + d], 1e-6) << magnitude;
        }
      }
    }
  }
}

}  // namespace
}  // namespace cadre::cuda

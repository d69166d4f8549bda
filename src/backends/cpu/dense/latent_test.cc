// Latent attention and what goes with it against float64, and that a row depends on nothing but its
// own context.
#include <cmath>
#include <cstring>

#include "backends/cpu/dense/ops_fixture.h"
#include "support/allocation_counter.h"

namespace cadre::cpu {
namespace {

using test::to_doubles;

/// Elements [first, first + count) of every head.
MutableTensorView part(const MutableTensorView& x, int64_t first, int64_t count) {
  auto* data =
      static_cast<std::byte*>(x.mutable_data()) + static_cast<size_t>(first) * size_of(x.dtype());
  return {data, x.dtype(), {x.dim(0), x.dim(1), count}, x.strides()};
}

class LatentOps : public OpsTest {
 protected:
  static constexpr int64_t kSlots = 3;
  static constexpr int64_t kMaxTokens = 200;

  void fill(DType dtype, const LatentShape& shape, int64_t num_tokens) {
    shape_ = shape;
    q_latent_ = random(dtype, {num_tokens, shape.num_heads, shape.rank});
    q_ = random(dtype, {num_tokens, shape.num_heads, kNope + shape.rope_dim});
    rows_ = random(dtype, {kSlots, 1, kMaxTokens, shape.rank + shape.rope_dim});
  }

  Tensor run(const std::vector<SequenceSpan>& sequences, Workspace& workspace) {
    Tensor out(rows_->dtype(), q_latent_->shape());
    std::memset(out->mutable_data(), 0xff, out->nbytes());  // NaN in every dtype
    ops_.latent_attention({q_latent_.view(),
                           part(q_, kNope, shape_.rope_dim),
                           rows_.view(),
                           {sequences},
                           kScale,
                           out},
                          workspace, stream_);
    return out;
  }
  Tensor run(const std::vector<SequenceSpan>& sequences) { return run(sequences, workspace_); }

  /// The weighted sum of latent parts for token t of sequence s and head h.
  std::vector<double> reference_row(const SequenceSpan& s, int64_t t, int64_t h) const {
    const std::vector<double> latent = to_doubles(q_latent_.view()[s.first_row + t][h]);
    const std::vector<double> q = to_doubles(q_.view()[s.first_row + t][h]);
    std::vector<double> query = latent;
    query.insert(query.end(), q.begin() + kNope, q.end());
    std::vector<double> result(latent.size(), 0);
    double sum = 0;
    for (int64_t j = 0; j <= s.past + t; ++j) {
      const std::vector<double> row = to_doubles(rows_.view()[s.slot][0][j]);
      double score = 0;
      for (size_t d = 0; d < row.size(); ++d) score += row[d] * query[d];
      const double weight = std::exp(score * static_cast<double>(kScale));
      sum += weight;
      for (size_t d = 0; d < result.size(); ++d) result[d] += weight * row[d];
    }
    for (double& value : result) value /= sum;
    return result;
  }

  static constexpr int64_t kNope = 6;  // in front of what rotates
  static constexpr float kScale = 0.2f;
  LatentShape shape_;
  Tensor q_latent_;
  Tensor q_;
  Tensor rows_;
};

TEST_F(LatentOps, AttentionEqualsTheReference) {
  const std::vector<SequenceSpan> sequences = {{2, 0, 1, 130}, {0, 1, 7, 0}, {1, 8, 5, 129}};
  for (const DType dtype : kComputeDtypes) {
    for (const LatentShape& shape : {LatentShape{4, 32, 16}, LatentShape{3, 24, 6},
                                     LatentShape{40, 64, 8}, LatentShape{1, 33, 2}}) {
      fill(dtype, shape, 13);
      const Tensor out = run(sequences);
      std::vector<double> reference;
      for (const SequenceSpan& s : sequences) {
        for (int64_t t = 0; t < s.num_tokens; ++t) {
          for (int64_t h = 0; h < shape.num_heads; ++h) {
            const auto row = reference_row(s, t, h);
            reference.insert(reference.end(), row.begin(), row.end());
          }
        }
      }
      expect_near(out.view(), reference, 2 * bound(dtype));
    }
  }
}

TEST_F(LatentOps, ARowHasTheSameBitsAloneInAPieceAndInABatch) {
  for (const int64_t heads : {4, 70}) {
    fill(DType::kBF16, {heads, 48, 16}, 100);
    const Tensor all = run({{0, 0, 60, 20}, {1, 60, 40, 150}});
    const Tensor pieces = run({{0, 0, 7, 20}, {0, 7, 53, 27}, {1, 60, 39, 150}, {1, 99, 1, 189}});
    EXPECT_EQ(std::memcmp(all->data(), pieces->data(), all->nbytes()), 0);
    const Tensor alone = run({{1, 99, 1, 189}});
    EXPECT_EQ(std::memcmp(all->slice(99, 100).data(), alone->slice(99, 100).data(),
                          all->slice(99, 100).nbytes()),
              0);
  }
}

TEST_F(LatentOps, AttentionTakesWhatItSaysAndAllocatesNothing) {
  fill(DType::kBF16, {40, 64, 16}, 20);
  Workspace exact({},
                  ops_.latent_attention_workspace_bytes(shape_, 20 * 40, threads_.num_threads()));
  const std::vector<SequenceSpan> sequences = {{0, 0, 20, 10}};
  run(sequences, exact);
  const Tensor out(DType::kBF16, q_latent_->shape());
  const test::AllocationCounter counter;
  ops_.latent_attention(
      {q_latent_.view(), part(q_, kNope, shape_.rope_dim), rows_.view(), {sequences}, kScale, out},
      exact, stream_);
  const int64_t allocations = counter.count();
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(exact.used(), 0u);
}

std::vector<double> rotated(const std::vector<double>& x, const std::vector<double>& cos,
                            const std::vector<double>& sin, bool interleaved) {
  std::vector<double> result(x.size());
  for (size_t i = 0; i < cos.size(); ++i) {
    const size_t a = interleaved ? 2 * i : i;
    const size_t b = interleaved ? 2 * i + 1 : i + cos.size();
    result[a] = x[a] * cos[i] - x[b] * sin[i];
    result[b] = x[b] * cos[i] + x[a] * sin[i];
  }
  return result;
}

TEST_F(LatentOps, FreshRowsAreNormalisedRotatedAndStored) {
  constexpr int64_t kRank = 40;
  constexpr int64_t kHalf = 6;
  const std::vector<SequenceSpan> sequences = {{1, 0, 4, 3}, {0, 4, 2, 0}};
  for (const DType dtype : kComputeDtypes) {
    for (const bool interleaved : {true, false}) {
      fill(dtype, {5, kRank, 2 * kHalf}, 6);
      const Tensor fresh = random(DType::kF32, {6, kRank + 2 * kHalf}, 3);
      const Tensor norm = random(DType::kBF16, {kRank});
      const Tensor cos = random(DType::kF32, {6, kHalf});
      const Tensor sin = random(DType::kF32, {6, kHalf});
      const std::vector<double> q_before = to_doubles(q_.view());
      const std::vector<double> rows_before = to_doubles(rows_.view());
      ops_.finish_latent({fresh.view(),
                          norm.view(),
                          1e-5f,
                          part(q_, kNope, 2 * kHalf),
                          interleaved,
                          cos.view(),
                          sin.view(),
                          {sequences},
                          rows_},
                         stream_);
      std::vector<double> q = q_before;
      std::vector<double> rows = rows_before;
      const auto wide = to_doubles(fresh.view());
      const auto norms = to_doubles(norm.view());
      for (const SequenceSpan& s : sequences) {
        for (int64_t t = s.first_row; t < s.first_row + s.num_tokens; ++t) {
          const auto c = to_doubles(cos.view()[t]);
          const auto sn = to_doubles(sin.view()[t]);
          const auto* from = wide.data() + t * (kRank + 2 * kHalf);
          double* to =
              rows.data() + (s.slot * kMaxTokens + s.past + t - s.first_row) * (kRank + 2 * kHalf);
          double squares = 0;
          for (int64_t i = 0; i < kRank; ++i) squares += from[i] * from[i];
          for (int64_t i = 0; i < kRank; ++i) {
            to[i] = from[i] / std::sqrt(squares / kRank + 1e-5) * norms[static_cast<size_t>(i)];
          }
          const auto key = rotated({from + kRank, from + kRank + 2 * kHalf}, c, sn, interleaved);
          std::copy(key.begin(), key.end(), to + kRank);
          for (int64_t h = 0; h < 5; ++h) {
            double* head = q.data() + (t * 5 + h) * (kNope + 2 * kHalf) + kNope;
            const auto query = rotated({head, head + 2 * kHalf}, c, sn, interleaved);
            std::copy(query.begin(), query.end(), head);
          }
        }
      }
      expect_near(rows_.view(), rows, bound(dtype));
      expect_near(q_.view(), q, bound(dtype));
    }
  }
}

// Keys' weights are read across, values' along their rows.
TEST_F(LatentOps, LinearHeadsEqualsTheReferenceAndDoesNotDependOnTheBatch) {
  struct Shape {
    int64_t tokens, heads, n, k;
    bool across;
  };
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& s :
         {Shape{1, 5, 64, 24, true}, Shape{7, 5, 64, 24, true}, Shape{1, 3, 32, 130, false},
          Shape{300, 2, 48, 40, false}, Shape{19, 3, 10, 7, false}}) {
      const Tensor x = random(dtype, {s.tokens, s.heads, s.k + 3});
      const Tensor w = random(DType::kBF16, {s.heads, s.across ? s.k : s.n, s.across ? s.n : s.k});
      const int64_t head_stride = s.n * s.k;
      const TensorView weight(w->data(), DType::kBF16, {s.heads, s.n, s.k},
                              s.across ? Dims{head_stride, 1, s.n} : Dims{head_stride, s.k, 1});
      const Tensor out(dtype, {s.tokens, s.heads, s.n});
      const size_t bytes =
          ops_.linear_heads_workspace_bytes(s.tokens, s.k, dtype, threads_.num_threads());
      Workspace exact({}, bytes);
      ops_.linear_heads(part(x, 0, s.k), weight, out, exact, stream_);
      EXPECT_EQ(exact.used(), 0u);
      std::vector<double> reference;
      for (int64_t t = 0; t < s.tokens; ++t) {
        for (int64_t h = 0; h < s.heads; ++h) {
          const auto row = to_doubles(x.view()[t][h]);
          const auto matrix = to_doubles(w.view()[h]);
          for (int64_t n = 0; n < s.n; ++n) {
            double sum = 0;
            for (int64_t k = 0; k < s.k; ++k) {
              sum += row[static_cast<size_t>(k)] *
                     matrix[static_cast<size_t>(s.across ? k * s.n + n : n * s.k + k)];
            }
            reference.push_back(sum);
          }
        }
      }
      expect_near(out.view(), reference, bound(dtype));
      const Tensor alone(dtype, {1, s.heads, s.n});
      const int64_t last = s.tokens - 1;
      ops_.linear_heads(part(x->slice(last, s.tokens), 0, s.k), weight, alone, exact, stream_);
      EXPECT_EQ(std::memcmp(alone->data(), out->slice(last, s.tokens).data(), alone->nbytes()), 0);
    }
  }
}

}  // namespace
}  // namespace cadre::cpu

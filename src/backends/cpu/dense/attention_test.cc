// Attention against float64, and its promise that a row depends on nothing but its own context.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "backends/cpu/dense/attend.h"
#include "backends/cpu/dense/ops_fixture.h"
#include "support/allocation_counter.h"

namespace cadre::cpu {
namespace {

using test::to_doubles;

struct Shape {
  int64_t heads;
  int64_t kv_heads;
  int64_t dim;
  int64_t window;
};

class AttentionOp : public OpsTest {
 protected:
  static constexpr int64_t kSlots = 3;
  static constexpr int64_t kMaxTokens = 200;

  void fill(DType dtype, const Shape& shape, int64_t rows) {
    shape_ = shape;
    q_ = random(dtype, {rows, shape.heads, shape.dim});
    keys_ = random(dtype, {kSlots, shape.kv_heads, kMaxTokens, shape.dim});
    values_ = random(dtype, {kSlots, shape.kv_heads, kMaxTokens, shape.dim});
    wide_q_ = to_doubles(q_.view());
    wide_keys_ = to_doubles(keys_.view());
    wide_values_ = to_doubles(values_.view());
  }

  Tensor run(const std::vector<SequenceSpan>& sequences) {
    Tensor out(q_->dtype(), q_->shape());
    std::memset(out->mutable_data(), 0xff, out->nbytes());  // NaN in every dtype
    ops_.attention({q_.view(),
                    keys_.view(),
                    values_.view(),
                    {sequences},
                    0.3f,
                    shape_.window,
                    out,
                    sinks_.view()},
                   workspace_, stream_);
    return out;
  }

  // Row t of sequence s, head h.
  std::vector<double> reference_row(const SequenceSpan& s, int64_t t, int64_t h) const {
    const int64_t position = s.past + t;
    const int64_t first =
        shape_.window > 0 ? std::max<int64_t>(0, position - shape_.window + 1) : 0;
    const int64_t kv_head = h / (shape_.heads / shape_.kv_heads);
    const auto dim = static_cast<size_t>(shape_.dim);
    const double* query =
        wide_q_.data() + static_cast<size_t>((s.first_row + t) * shape_.heads + h) * dim;
    const size_t head = static_cast<size_t>((s.slot * shape_.kv_heads + kv_head) * kMaxTokens);
    const double* keys = wide_keys_.data() + head * dim;
    const double* values = wide_values_.data() + head * dim;
    std::vector<double> result(dim, 0);
    double sum = sinks_ ? std::exp(static_cast<double>(sinks_->as<float>()[h])) : 0;
    for (int64_t j = first; j <= position; ++j) {
      double score = 0;
      for (size_t d = 0; d < dim; ++d) {
        score += query[d] * keys[static_cast<size_t>(j) * dim + d];
      }
      const double weight = std::exp(score * static_cast<double>(0.3f));
      sum += weight;
      for (size_t d = 0; d < dim; ++d) {
        result[d] += weight * values[static_cast<size_t>(j) * dim + d];
      }
    }
    for (double& value : result) value /= sum;
    return result;
  }

  // Three sequences of 108 new tokens.
  void expect_reference() {
    const std::vector<SequenceSpan> sequences = {{2, 0, 1, 130}, {0, 1, 37, 0}, {1, 38, 70, 129}};
    const Tensor out = run(sequences);
    std::vector<double> reference;
    for (const SequenceSpan& s : sequences) {
      for (int64_t t = 0; t < s.num_tokens; ++t) {
        for (int64_t h = 0; h < shape_.heads; ++h) {
          const auto row = reference_row(s, t, h);
          reference.insert(reference.end(), row.begin(), row.end());
        }
      }
    }
    expect_near(out.view(), reference, 2 * bound(q_->dtype()));
  }

  Shape shape_{};
  Tensor q_;
  Tensor keys_;
  Tensor values_;
  Tensor sinks_;  // none unless a test sets them
  std::vector<double> wide_q_;
  std::vector<double> wide_keys_;
  std::vector<double> wide_values_;
};

/// One query over kKeyBlock keys, in float64.
std::vector<double> softmax_of(const float* query, const float* keys, const float* values,
                               int64_t dim) {
  std::vector<double> result(static_cast<size_t>(dim), 0);
  double sum = 0;
  for (int64_t j = 0; j < kKeyBlock; ++j) {
    double score = 0;
    for (int64_t d = 0; d < dim; ++d) {
      score += static_cast<double>(query[d]) * static_cast<double>(keys[j * dim + d]);
    }
    sum += std::exp(score);
    for (int64_t d = 0; d < dim; ++d) {
      result[static_cast<size_t>(d)] += std::exp(score) * static_cast<double>(values[j * dim + d]);
    }
  }
  for (double& value : result) value /= sum;
  return result;
}

TEST_F(AttentionOp, EqualsTheReference) {
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& shape : {Shape{4, 4, 64, 0}, Shape{6, 2, 10, 0}, Shape{9, 1, 128, 0},
                               Shape{4, 2, 100, 7}, Shape{2, 1, 16, 64}, Shape{20, 2, 2, 65}}) {
      fill(dtype, shape, 108);
      expect_reference();
    }
  }
}

TEST_F(AttentionOp, SinksTakeTheirPartOfTheSoftmax) {
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& shape : {Shape{4, 4, 64, 0}, Shape{9, 1, 128, 0}, Shape{4, 2, 100, 7}}) {
      fill(dtype, shape, 108);
      sinks_ = random(DType::kF32, {shape.heads}, 3);
      expect_reference();
    }
  }
}

TEST_F(AttentionOp, ASinkOfMinusInfinityIsNone) {
  fill(DType::kF32, {2, 1, 16, 0}, 30);
  const Tensor without = run({{0, 0, 30, 0}});
  sinks_ = Tensor(DType::kF32, {2});
  for (int64_t h = 0; h < 2; ++h) set(sinks_, h, -std::numeric_limits<float>::infinity());
  const Tensor with = run({{0, 0, 30, 0}});
  EXPECT_EQ(std::memcmp(with->data(), without->data(), with->nbytes()), 0);
}

TEST_F(AttentionOp, ARowHasTheSameBitsAloneInAPieceAndInABatch) {
  for (const int64_t dim : {48, 128}) {
    fill(DType::kBF16, {8, 2, dim, 0}, 100);
    const Tensor all = run({{0, 0, 60, 20}, {1, 60, 40, 150}});
    const Tensor pieces = run({{0, 0, 7, 20}, {0, 7, 53, 27}, {1, 60, 39, 150}, {1, 99, 1, 189}});
    EXPECT_EQ(std::memcmp(all->data(), pieces->data(), all->nbytes()), 0);
    const Tensor alone = run({{1, 99, 1, 189}});  // so little work that each head is a piece
    EXPECT_EQ(std::memcmp(all->slice(99, 100).data(), alone->slice(99, 100).data(),
                          all->slice(99, 100).nbytes()),
              0);
  }
}

TEST_F(AttentionOp, NaNReachesOnlyRowsThatSeeIt) {
  fill(DType::kF32, {2, 1, 16, 5}, 30);
  const int64_t bad = 12;
  for (int64_t d = 0; d < 16; ++d) {
    set(keys_.view()[0][0][bad], d, std::numeric_limits<float>::quiet_NaN());
    set(values_.view()[0][0][bad], d, std::numeric_limits<float>::quiet_NaN());
  }
  const auto out = to_doubles(run({{0, 0, 30, 0}}).view());
  for (size_t t = 0; t < 30; ++t) {
    const bool sees = t >= 12 && t < 17;
    EXPECT_EQ(std::isnan(out[t * 32]), sees) << "row " << t;
  }
}

TEST_F(AttentionOp, ScoresOfAnyMagnitude) {
  fill(DType::kF32, {1, 1, 4, 0}, 1);
  for (const float scale : {1e-20f, 1e3f, 1e18f}) {
    for (int64_t d = 0; d < 4; ++d) {
      set(q_, d, scale);
      for (int64_t j = 0; j < 100; ++j) set(keys_.view()[0][0][j], d, j == 40 ? 2.0f : -1.0f);
    }
    const Tensor out = run({{0, 0, 1, 99}});
    for (const double value : to_doubles(out.view())) EXPECT_TRUE(std::isfinite(value)) << scale;
    if (scale > 1) expect_near(out.view(), to_doubles(values_.view()[0][0][40]), 1e-6);
  }
}

TEST_F(AttentionOp, StoresNewTokensWhereAttentionLooks) {
  const Tensor x = random(DType::kF16, {6, 2, 5});
  const Tensor cache(DType::kF16, {2, 2, 10, 5});
  std::memset(cache->mutable_data(), 0, cache->nbytes());
  const std::vector<SequenceSpan> sequences = {{1, 0, 4, 3}, {0, 4, 2, 0}};
  ops_.store_kv(x.view(), {sequences}, cache, stream_);
  for (int64_t head = 0; head < 2; ++head) {
    for (int64_t t = 0; t < 4; ++t) {
      EXPECT_EQ(to_doubles(cache.view()[1][head][3 + t]), to_doubles(x.view()[t][head]));
    }
    EXPECT_EQ(to_doubles(cache.view()[0][head][1]), to_doubles(x.view()[5][head]));
    EXPECT_EQ(to_doubles(cache.view()[1][head][7]), std::vector<double>(5, 0.0));
  }
}

TEST_F(AttentionOp, TakesWhatItSaysAndAllocatesNothing) {
  fill(DType::kBF16, {8, 2, 64, 0}, 40);
  const Tensor out(DType::kBF16, q_->shape());
  Workspace exact({}, ops_.attention_workspace_bytes({8, 2, 64}, 40, threads_.num_threads()));
  const std::vector<SequenceSpan> sequences = {{0, 0, 40, 10}};
  ops_.attention({q_.view(), keys_.view(), values_.view(), {sequences}, 1, 0, out}, exact, stream_);
  const test::AllocationCounter counter;
  ops_.attention({q_.view(), keys_.view(), values_.view(), {sequences}, 1, 0, out}, exact, stream_);
  const int64_t allocations = counter.count();
  EXPECT_EQ(allocations, 0);
  EXPECT_EQ(exact.used(), 0u);
}

TEST_F(AttentionOp, EveryInstructionSetWidensExactly) {
  std::vector<uint16_t> bits(65536);
  std::iota(bits.begin(), bits.end(), uint16_t{0});
  for (const AttendKernels& kernels : attend_kernels()) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      std::vector<float> out(bits.size());
      kernels.widen(bits.data(), dtype, 65536, out.data());
      for (size_t i = 0; i < bits.size(); ++i) {
        const double expected = test::element_to_double(&bits[i], dtype);
        if (std::isnan(expected)) {
          ASSERT_TRUE(std::isnan(out[i]));
        } else {
          ASSERT_EQ(static_cast<double>(out[i]), expected) << name_of(dtype) << " bits " << i;
        }
      }
    }
  }
}

// Some queries that share what is loaded and some left over.
TEST_F(AttentionOp, EveryInstructionSetGivesTheReference) {
  constexpr int64_t kQueries = 6;
  for (const int64_t dim : {83, 128}) {
    const Tensor queries = random(DType::kF32, {kQueries, dim}, 0.3f);
    const Tensor keys = random(DType::kF32, {kKeyBlock, dim});
    const Tensor values = random(DType::kF32, {kKeyBlock, dim});
    const float* k = keys->as<float>();
    const float* v = values->as<float>();
    const auto attend = [&](const AttendKernels& kernels, int64_t query, int64_t count) {
      std::vector<float> sums(static_cast<size_t>(count * dim), 0.0f);
      std::vector<SoftmaxState> states(static_cast<size_t>(count),
                                       {-std::numeric_limits<float>::infinity(), 0.0f});
      for (const auto& [first, num_keys] : {std::pair{0, 50}, std::pair{50, 14}}) {
        kernels.attend({queries->as<float>() + query * dim, k + first * dim, v + first * dim,
                        num_keys, dim, dim, dim, sums.data(), states.data(), count});
      }
      for (size_t i = 0; i < sums.size(); ++i) sums[i] /= states[i / static_cast<size_t>(dim)].sum;
      return sums;
    };
    std::vector<double> reference;
    for (int64_t query = 0; query < kQueries; ++query) {
      const auto result = softmax_of(queries->as<float>() + query * dim, k, v, dim);
      reference.insert(reference.end(), result.begin(), result.end());
    }
    for (const AttendKernels& kernels : attend_kernels()) {
      const std::vector<float> all = attend(kernels, 0, kQueries);
      EXPECT_LE(test::relative_error(all, reference), 1e-6);
      for (int64_t query = 0; query < kQueries; ++query) {
        const std::vector<float> alone = attend(kernels, query, 1);
        EXPECT_EQ(std::memcmp(alone.data(), all.data() + query * dim, alone.size() * sizeof(float)),
                  0);
      }
    }
  }
}

}  // namespace
}  // namespace cadre::cpu

// Compressed attention's operations against float64, over a sequence that comes at once, in pieces
// and beside others.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <numeric>

#include "backends/cpu/dense/ops_fixture.h"
#include "support/allocation_counter.h"

namespace cadre::cpu {
namespace {

using test::to_doubles;

constexpr int64_t kSlots = 3;
constexpr int64_t kLength = 150;  // of the sequence

// Everything a step needs to know of its tokens.
struct Step {
  explicit Step(std::vector<SequenceSpan> spans) : sequences(std::move(spans)) {
    for (const SequenceSpan& s : sequences) {
      for (int64_t t = 0; t < s.num_tokens; ++t) {
        slots.push_back(static_cast<int32_t>(s.slot));
        positions.push_back(static_cast<int32_t>(s.past + t));
      }
    }
  }
  StepTokens tokens() const {
    const Dims shape{static_cast<int64_t>(slots.size())};
    return {sequences, {slots.data(), DType::kI32, shape}, {positions.data(), DType::kI32, shape}};
  }

  std::vector<SequenceSpan> sequences;
  std::vector<int32_t> slots;
  std::vector<int32_t> positions;
};

class CompressedOps : public OpsTest {
 protected:
  // Calls step(tokens, begin, end) for [0, kLength) of a sequence in slot 1, in pieces.
  template <typename Fn>
  static void in_pieces(int64_t piece, const Fn& step) {
    for (int64_t begin = 0; begin < kLength; begin += piece) {
      const int64_t end = std::min(kLength, begin + piece);
      const Step one({{1, 0, end - begin, begin}});
      step(one.tokens(), begin, end);
    }
  }
  static void fill_with_nan(const Tensor& tensor) {
    std::memset(tensor->mutable_data(), 0xff, tensor->nbytes());
  }
  Tensor cache(DType dtype, int64_t rows, int64_t width) {
    Tensor result(dtype, {kSlots, 1, rows, width});
    fill_with_nan(result);
    return result;
  }
};

class Compress : public CompressedOps {
 protected:
  void fill(int64_t series, int64_t rate, int64_t width, int64_t half) {
    series_ = series;
    rate_ = rate;
    width_ = width;
    values_ = random(DType::kF32, {kLength, series * width});
    gates_ = random(DType::kF32, {kLength, series * width}, 2);
    bias_ = random(DType::kBF16, {rate, series * width});
    norm_ = random(DType::kBF16, {width});
    inverse_ = random(DType::kF32, {half}, 0.1f);
    note_values();
  }
  void note_values() {
    wide_values_ = to_doubles(values_.view());
    wide_gates_ = to_doubles(gates_.view());
    wide_bias_ = to_doubles(bias_.view());
  }

  Tensor run(DType dtype, int64_t piece) {
    const Tensor value_ring = cache(DType::kF32, series_ * rate_, series_ * width_);
    const Tensor gate_ring = cache(DType::kF32, series_ * rate_, series_ * width_);
    Tensor entries = cache(dtype, kLength / rate_ + 1, width_);
    Workspace exact({}, ops_.compress_workspace_bytes(width_, threads_.num_threads()));
    in_pieces(piece, [&](const StepTokens& tokens, int64_t begin, int64_t end) {
      const TensorView values = values_->slice(begin, end);
      const TensorView gates = gates_->slice(begin, end);
      ops_.compress({values, gates, value_ring.view(), gate_ring.view(), bias_.view(), norm_.view(),
                     1e-5f, inverse_.view(), 0.9f, tokens, entries},
                    exact, stream_);
      ops_.store_ring(values, tokens, value_ring, stream_);
      ops_.store_ring(gates, tokens, gate_ring, stream_);
    });
    return entries;
  }

  // Channel c of entry w before norm and rotation.
  double mixed(int64_t w, int64_t c) const {
    double sum = 0;
    double weighted = 0;
    for (int64_t j = series_ == 2 && w > 0 ? -rate_ : 0; j < rate_; ++j) {
      const int64_t column = j < 0 ? c : (series_ - 1) * width_ + c;
      const auto i = static_cast<size_t>((w * rate_ + j) * series_ * width_ + column);
      const auto b = static_cast<size_t>((j + rate_) % rate_ * series_ * width_ + column);
      const double weight = std::exp(wide_gates_[i] + wide_bias_[b]);
      sum += weight;
      weighted += weight * wide_values_[i];
    }
    return weighted / sum;
  }

  std::vector<double> reference(int64_t w) const {
    std::vector<double> row;
    double squares = 0;
    for (int64_t c = 0; c < width_; ++c) {
      row.push_back(mixed(w, c));
      squares += row.back() * row.back();
    }
    const double rms = std::sqrt(squares / static_cast<double>(width_) + 1e-5);
    const std::vector<double> norm = to_doubles(norm_.view());
    for (size_t c = 0; c < row.size(); ++c) row[c] *= norm[c] / rms;
    const std::vector<double> inverse = to_doubles(inverse_.view());
    const size_t first = row.size() - 2 * inverse.size();
    for (size_t i = 0; i < inverse.size(); ++i) {
      const double angle = static_cast<double>(w * rate_) * inverse[i];
      const double a = row[first + 2 * i];
      const double b = row[first + 2 * i + 1];
      row[first + 2 * i] = 0.9 * (a * std::cos(angle) - b * std::sin(angle));
      row[first + 2 * i + 1] = 0.9 * (b * std::cos(angle) + a * std::sin(angle));
    }
    return row;
  }

  int64_t series_ = 1;
  int64_t rate_ = 1;
  int64_t width_ = 1;
  Tensor values_;
  Tensor gates_;
  Tensor bias_;
  Tensor norm_;
  Tensor inverse_;
  std::vector<double> wide_values_;
  std::vector<double> wide_gates_;
  std::vector<double> wide_bias_;
};

TEST_F(Compress, EntriesEqualTheReference) {
  struct Case {
    int64_t series, rate, width, half;
  };
  for (const Case& c :
       {Case{1, 16, 20, 4}, Case{2, 4, 12, 6}, Case{2, 3, 140, 2}, Case{1, 1, 6, 0}}) {
    fill(c.series, c.rate, c.width, c.half);
    for (const DType dtype : kComputeDtypes) {
      const Tensor entries = run(dtype, kLength);
      for (int64_t w = 0; w < kLength / c.rate; w += 7) {
        expect_near(entries.view()[1][0][w], reference(w), 2 * bound(dtype));
      }
    }
  }
}

TEST_F(Compress, PiecesOfAnySizeGiveTheSameBitsAndTouchNothingElse) {
  for (const int64_t series : {1, 2}) {
    fill(series, 5, 16, 3);
    const Tensor whole = run(DType::kBF16, kLength);
    for (const int64_t piece : {1, 3, 5, 7, 64}) {
      const Tensor pieces = run(DType::kBF16, piece);
      EXPECT_EQ(std::memcmp(pieces->data(), whole->data(), whole->nbytes()), 0)
          << series << " series, pieces of " << piece;
    }
    EXPECT_TRUE(std::isnan(to_doubles(whole.view()[0]).front())) << "another slot was written";
    EXPECT_TRUE(std::isnan(to_doubles(whole.view()[1][0][kLength / 5]).front()))
        << "an entry that is not closed was written";
  }
}

TEST_F(Compress, GatesFarApartStayFinite) {
  fill(1, 4, 8, 2);
  for (int64_t i = 0; i < gates_->numel(); ++i) set(gates_, i, i % 3 == 0 ? 900.0f : -900.0f);
  for (const double value : to_doubles(run(DType::kF32, 7).view()[1][0].slice(0, 37))) {
    EXPECT_TRUE(std::isfinite(value));
  }
}

TEST_F(CompressedOps, ARingKeepsTheLatestRowsOfEachSequence) {
  const Tensor ring = cache(DType::kF32, 4, 2);
  const Tensor x = random(DType::kF32, {9, 2});
  // Six tokens from position 3 on, one at position 6 of another sequence, two in a third.
  const Step step({{2, 0, 6, 3}, {0, 6, 1, 6}, {1, 7, 2, 0}});
  ops_.store_ring(x.view(), step.tokens(), ring, stream_);
  const auto row = [&](int64_t slot, int64_t i) { return to_doubles(ring.view()[slot][0][i]); };
  const auto from = [&](int64_t i) { return to_doubles(x.view()[i]); };
  for (const int64_t position : {5, 6, 7, 8}) EXPECT_EQ(row(2, position % 4), from(position - 3));
  EXPECT_EQ(row(0, 2), from(6));
  EXPECT_TRUE(std::isnan(row(0, 1)[0]));
  EXPECT_EQ(row(1, 0), from(7));
  EXPECT_EQ(row(1, 1), from(8));
  EXPECT_TRUE(std::isnan(row(1, 2)[0]));
}

class PickEntries : public CompressedOps {
 protected:
  void fill(DType dtype, int64_t heads, int64_t width, int64_t entries) {
    queries_ = random(dtype, {kLength, heads, width});
    weights_ = random(DType::kF32, {kLength, heads});
    keys_ = random(dtype, {kSlots, 1, entries, width});
  }

  Tensor run(const Step& step, int64_t rate, int64_t k, int64_t first = 0) {
    const StepTokens tokens = step.tokens();
    const int64_t rows = tokens.num_tokens();
    Tensor picks(DType::kI32, {rows, k});
    Workspace exact({}, ops_.pick_entries_workspace_bytes(queries_->dim(1), queries_->dim(2), k,
                                                          threads_.num_threads()));
    ops_.pick_entries({queries_->slice(first, first + rows), weights_->slice(first, first + rows),
                       0.25f, keys_.view(), rate, tokens, picks},
                      exact, stream_);
    return picks;
  }

  std::vector<int32_t> reference(int64_t row, int64_t slot, int64_t closed, int64_t k) const {
    const std::vector<double> query = to_doubles(queries_.view()[row]);
    const std::vector<double> weights = to_doubles(weights_.view()[row]);
    const auto width = static_cast<size_t>(queries_->dim(2));
    std::vector<double> scores;
    for (int64_t w = 0; w < closed; ++w) {
      const std::vector<double> key = to_doubles(keys_.view()[slot][0][w]);
      double sum = 0;
      for (size_t h = 0; h < weights.size(); ++h) {
        double dot = 0;
        for (size_t d = 0; d < width; ++d) dot += query[h * width + d] * key[d];
        sum += std::max(0.0, dot) * weights[h] * 0.25;
      }
      scores.push_back(sum);
    }
    std::vector<int32_t> order(scores.size());
    std::iota(order.begin(), order.end(), 0);
    std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
      return scores[static_cast<size_t>(a)] > scores[static_cast<size_t>(b)];
    });
    order.resize(std::min(order.size(), static_cast<size_t>(k)));
    std::sort(order.begin(), order.end());
    order.resize(static_cast<size_t>(k), -1);
    return order;
  }

  static std::vector<int32_t> row_of(const Tensor& picks, int64_t row) {
    const auto* data = picks->as<int32_t>() + row * picks->dim(1);
    return {data, data + picks->dim(1)};
  }

  Tensor queries_;
  Tensor weights_;
  Tensor keys_;
};

TEST_F(PickEntries, EqualsASortInFloat64) {
  for (const DType dtype : kComputeDtypes) {
    fill(dtype, 5, 18, 60);
    const Step step({{2, 0, 30, 100}, {0, 30, 20, 0}, {1, 50, 3, 3}});
    const Tensor picks = run(step, 3, 7);
    for (int64_t row = 0; row < 53; ++row) {
      const auto i = static_cast<size_t>(row);
      const int64_t closed = (step.positions[i] + 1) / 3;
      EXPECT_EQ(row_of(picks, row), reference(row, step.slots[i], closed, 7)) << row;
    }
  }
}

// One or two tokens are shared out to threads by entries.
TEST_F(PickEntries, FewTokensOfLongContextsGetTheSame) {
  fill(DType::kBF16, 4, 32, 5000);
  for (const int64_t k : {1, 64, 700, 6000}) {
    const Tensor one = run(Step({{1, 0, 1, 9998}}), 2, k);
    EXPECT_EQ(row_of(one, 0), reference(0, 1, 4999, k)) << k;
    const Tensor two = run(Step({{1, 0, 1, 9998}, {0, 1, 1, 7000}}), 2, k);
    EXPECT_EQ(row_of(two, 0), row_of(one, 0)) << k;
    EXPECT_EQ(row_of(two, 1), reference(1, 0, 3500, k)) << k;
  }
}

TEST_F(PickEntries, TiesGoToTheLowerEntryAndNaNToNone) {
  fill(DType::kF32, 2, 4, 400);
  std::fill_n(keys_->as<float>(), keys_->numel(), 0.0f);  // all scores are zero
  std::vector<int32_t> first(5);
  std::iota(first.begin(), first.end(), 0);
  EXPECT_EQ(row_of(run(Step({{0, 0, 1, 399}}), 1, 5), 0), first);
  EXPECT_EQ(row_of(run(Step({{0, 0, 9, 391}}), 1, 5), 8), first);

  const auto nan = std::numeric_limits<float>::quiet_NaN();
  std::fill_n(keys_->as<float>(), 398 * 4, nan);
  const Tensor some = run(Step({{0, 0, 1, 399}}), 1, 4);
  EXPECT_EQ(row_of(some, 0), (std::vector<int32_t>{0, 1, 398, 399}));
}

class SharedKvAttention : public CompressedOps {
 protected:
  struct Shape {
    int64_t heads, dim, window, rate, k;  // rate 0: window only; k 0: all entries
  };

  void fill(DType dtype, const Shape& shape) {
    shape_ = shape;
    q_ = random(dtype, {kLength, shape.heads, shape.dim});
    kv_ = random(dtype, {kLength, shape.dim});
    sinks_ = random(DType::kBF16, {shape.heads});
    if (shape.rate == 0) return;
    entries_ = random(dtype, {kSlots, 1, kLength / shape.rate + 1, shape.dim});
    if (shape.k == 0) return;
    picks_ = Tensor(DType::kI32, {kLength, shape.k});
    for (int64_t row = 0; row < kLength; ++row) {  // every third closed one, from the end
      const auto closed = static_cast<int32_t>((row + 1) / shape.rate);
      std::vector<int32_t> some;
      for (int32_t w = closed - 1; w >= 0 && static_cast<int64_t>(some.size()) < shape.k; w -= 3) {
        some.push_back(w);
      }
      std::sort(some.begin(), some.end());
      some.resize(static_cast<size_t>(shape.k), -1);
      std::copy(some.begin(), some.end(), picks_->as<int32_t>() + row * shape.k);
    }
  }

  SharedKvAttentionArgs args(const StepTokens& tokens, int64_t begin, int64_t end,
                             const Tensor& ring, const MutableTensorView& out) const {
    SharedKvAttentionArgs args;
    args.q = q_->slice(begin, end);
    args.kv = kv_->slice(begin, end);
    args.kv_ring = ring.view();
    args.sliding_window = shape_.window;
    if (shape_.rate != 0) args.entries = entries_.view();
    args.rate = shape_.rate;
    if (shape_.k != 0) args.picks = picks_->slice(begin, end);
    args.sinks = sinks_.view();
    args.scale = 0.3f;
    args.tokens = tokens;
    args.out = out;
    return args;
  }

  Tensor run(int64_t piece) {
    const Tensor ring = cache(q_->dtype(), std::max<int64_t>(1, shape_.window - 1), shape_.dim);
    Tensor out(q_->dtype(), q_->shape());
    fill_with_nan(out);
    Workspace exact({}, ops_.shared_kv_attention_workspace_bytes(shape_.heads, shape_.dim,
                                                                 threads_.num_threads()));
    in_pieces(piece, [&](const StepTokens& tokens, int64_t begin, int64_t end) {
      ops_.shared_kv_attention(args(tokens, begin, end, ring, out->slice(begin, end)), exact,
                               stream_);
      ops_.store_ring(kv_->slice(begin, end), tokens, ring, stream_);
    });
    return out;
  }

  // The rows that a token sees.
  std::vector<std::vector<double>> rows_of(int64_t position) const {
    std::vector<std::vector<double>> rows;
    for (int64_t p = std::max<int64_t>(0, position - shape_.window + 1); p <= position; ++p) {
      rows.push_back(to_doubles(kv_.view()[p]));
    }
    if (shape_.rate == 0) return rows;
    for (int64_t w = 0; w < (position + 1) / shape_.rate; ++w) {
      const int32_t* picks = shape_.k != 0 ? picks_->as<int32_t>() + position * shape_.k : nullptr;
      if (picks != nullptr && std::find(picks, picks + shape_.k, w) == picks + shape_.k) continue;
      rows.push_back(to_doubles(entries_.view()[1][0][w]));
    }
    return rows;
  }

  std::vector<double> reference(int64_t position, int64_t head) const {
    const std::vector<double> query = to_doubles(q_.view()[position][head]);
    double sum = std::exp(to_doubles(sinks_.view())[static_cast<size_t>(head)]);
    std::vector<double> result(query.size(), 0);
    for (const std::vector<double>& row : rows_of(position)) {
      const double score = std::inner_product(row.begin(), row.end(), query.begin(), 0.0);
      const double weight = std::exp(score * static_cast<double>(0.3f));
      sum += weight;
      for (size_t d = 0; d < row.size(); ++d) result[d] += weight * row[d];
    }
    for (double& value : result) value /= sum;
    return result;
  }

  Shape shape_{};
  Tensor q_;
  Tensor kv_;
  Tensor sinks_;
  Tensor entries_;
  Tensor picks_;
};

TEST_F(SharedKvAttention, EqualsTheReference) {
  for (const DType dtype : kComputeDtypes) {
    for (const Shape& shape :
         {Shape{3, 20, 16, 0, 0}, Shape{9, 32, 70, 5, 0}, Shape{4, 18, 8, 1, 0},
          Shape{8, 64, 16, 4, 6}, Shape{1, 6, 1, 2, 3}}) {
      fill(dtype, shape);
      const Tensor out = run(kLength);
      for (int64_t position = 0; position < kLength; position += 13) {
        for (int64_t head = 0; head < shape.heads; ++head) {
          expect_near(out.view()[position][head], reference(position, head), 2 * bound(dtype));
        }
      }
    }
  }
}

TEST_F(SharedKvAttention, PiecesOfAnySizeGiveTheSameBits) {
  for (const Shape& shape :
       {Shape{5, 16, 33, 0, 0}, Shape{70, 16, 16, 3, 0}, Shape{6, 16, 9, 2, 20}}) {
    fill(DType::kBF16, shape);
    const Tensor whole = run(kLength);
    for (const int64_t piece : {1, 4, 37}) {
      const Tensor pieces = run(piece);
      EXPECT_EQ(std::memcmp(pieces->data(), whole->data(), whole->nbytes()), 0) << piece;
    }
  }
}

TEST_F(SharedKvAttention, ALargeSinkTakesAllWeight) {
  fill(DType::kF32, {2, 8, 16, 0, 0});
  set(sinks_, 0, 1e4f);
  const Tensor out = run(kLength);
  for (const double value : to_doubles(out.view()[40][0])) EXPECT_EQ(value, 0);
}

TEST_F(SharedKvAttention, AllocatesNothing) {
  fill(DType::kBF16, {8, 16, 16, 4, 6});
  const Tensor ring = cache(DType::kBF16, 16, 16);
  const Tensor out(DType::kBF16, q_->shape());
  const Step step({{1, 0, kLength, 0}});
  const StepTokens tokens = step.tokens();
  const SharedKvAttentionArgs call = args(tokens, 0, kLength, ring, out);
  ops_.shared_kv_attention(call, workspace_, stream_);
  const test::AllocationCounter counter;
  ops_.shared_kv_attention(call, workspace_, stream_);
  ops_.store_ring(kv_.view(), tokens, ring, stream_);
  EXPECT_EQ(counter.count(), 0);
}

}  // namespace
}  // namespace cadre::cpu

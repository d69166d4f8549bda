// The same tokens give the same bits, however they come: alone or in a batch, at once or in pieces,
// with a cache or without, on any number of threads.
#include <gtest/gtest.h>

#include <algorithm>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/model.h"
#include "golden/model_runs.h"

namespace cadre::test {
namespace {

using Case = std::tuple<std::string, std::string, DType>;  // fixture, backend, compute dtype

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::get<0>(info.param) + "_" + std::get<1>(info.param) + "_" +
         std::string(name_of(std::get<2>(info.param)));
}

class Consistency : public testing::TestWithParam<Case> {
 protected:
  Consistency()
      : expected_(read_expected(fixture(std::get<0>(GetParam())) / "expected.safetensors")),
        model_(load(2)),
        vocab_(static_cast<size_t>(model_->info().vocab_size)) {}

  static std::unique_ptr<Model> load(int threads) {
    const auto& [name, backend, dtype] = GetParam();
    return Model::from_pretrained(
        fixture(name).string(),
        {.experts_implementation = {{"", backend}}, .dtype = dtype, .num_threads = threads});
  }

  // Logits of all rows of sequence `b`, alone and in one piece.
  std::vector<float> alone(int64_t b) { return all_logits(*model_, expected_.row(b), 1); }

  MutableTensorView rows(std::vector<float>& logits) const {
    return {logits.data(),
            DType::kF32,
            {static_cast<int64_t>(logits.size() / vocab_), model_->info().vocab_size}};
  }

  Expected expected_;
  std::unique_ptr<Model> model_;
  size_t vocab_;
};

TEST_P(Consistency, RowsOfABatchEqualEachAlone) {
  const std::vector<float> both = all_logits(*model_, expected_.input_ids, expected_.batch);
  std::vector<float> each;
  for (int64_t b = 0; b < expected_.batch; ++b) {
    const std::vector<float> one = alone(b);
    each.insert(each.end(), one.begin(), one.end());
  }
  EXPECT_EQ(both, each);
}

TEST_P(Consistency, SequencesOfDifferentLengthsEqualEachAlone) {
  const std::vector<int64_t> counts = {expected_.length, 0, 3};
  std::vector<TokenId> ids(expected_.row(0).begin(), expected_.row(0).end());
  ids.insert(ids.end(), expected_.row(1).begin(), expected_.row(1).begin() + 3);
  const auto cache = model_->new_cache(3, expected_.length);
  std::vector<float> logits(3 * vocab_, -1.0f);
  model_->forward({ids, counts, LogitsRows::kLastOfEach}, *cache, rows(logits));

  const std::vector<float> first = alone(0);
  const std::vector<float> third = alone(1);
  EXPECT_TRUE(std::equal(logits.begin(), logits.begin() + static_cast<std::ptrdiff_t>(vocab_),
                         first.end() - static_cast<std::ptrdiff_t>(vocab_)));
  EXPECT_TRUE(std::all_of(logits.begin() + static_cast<std::ptrdiff_t>(vocab_),
                          logits.begin() + static_cast<std::ptrdiff_t>(2 * vocab_),
                          [](float x) { return x == -1.0f; }))
      << "the row of a skipped sequence was written";
  EXPECT_TRUE(std::equal(logits.begin() + static_cast<std::ptrdiff_t>(2 * vocab_), logits.end(),
                         third.begin() + static_cast<std::ptrdiff_t>(2 * vocab_)));
}

TEST_P(Consistency, TokenByTokenEqualsAtOnce) {
  const auto cache = model_->new_cache(1, expected_.length);
  std::vector<float> stepwise;
  const std::vector<int64_t> one = {1};
  for (int64_t t = 0; t < expected_.length; ++t) {
    std::vector<float> logits(vocab_);
    model_->forward({expected_.row(0).subspan(static_cast<size_t>(t), 1), one}, *cache,
                    rows(logits));
    stepwise.insert(stepwise.end(), logits.begin(), logits.end());
  }
  EXPECT_EQ(stepwise, alone(0));
}

TEST_P(Consistency, PiecesEqualAtOnce) {
  const std::vector<float> whole = all_logits(*model_, expected_.input_ids, expected_.batch);
  for (const int64_t piece : {1, 5, 19}) {
    const auto model = load(2);
    model->reserve(piece);
    EXPECT_EQ(all_logits(*model, expected_.input_ids, expected_.batch), whole)
        << "pieces of " << piece;
  }
}

TEST_P(Consistency, LastRowsOfPiecesEqualThoseAtOnce) {
  const std::vector<float> whole = all_logits(*model_, expected_.input_ids, expected_.batch);
  const std::vector<int64_t> counts(static_cast<size_t>(expected_.batch), expected_.length);
  for (const int64_t piece : {1, 5, 19}) {
    const auto model = load(2);
    model->reserve(piece);
    const auto cache = model->new_cache(expected_.batch, expected_.length);
    std::vector<float> last(static_cast<size_t>(expected_.batch) * vocab_);
    model->forward({expected_.input_ids, counts}, *cache, rows(last));
    for (size_t b = 0; b < static_cast<size_t>(expected_.batch); ++b) {
      const size_t row = (b + 1) * static_cast<size_t>(expected_.length) - 1;
      EXPECT_TRUE(std::equal(last.begin() + static_cast<std::ptrdiff_t>(b * vocab_),
                             last.begin() + static_cast<std::ptrdiff_t>((b + 1) * vocab_),
                             whole.begin() + static_cast<std::ptrdiff_t>(row * vocab_)))
          << "sequence " << b << " in pieces of " << piece;
    }
  }
}

TEST_P(Consistency, AnyNumberOfThreadsGivesTheSameBits) {
  const std::vector<float> two = all_logits(*model_, expected_.input_ids, expected_.batch);
  for (const int threads : {1, 3}) {
    EXPECT_EQ(all_logits(*load(threads), expected_.input_ids, expected_.batch), two) << threads;
  }
}

TEST_P(Consistency, TruncatedCacheForgets) {
  const auto cache = model_->new_cache(1, expected_.length);
  std::vector<float> logits(vocab_);
  const std::vector<int64_t> three = {3};
  const std::vector<int64_t> rest = {expected_.length - 1};
  model_->forward({expected_.row(1).subspan(0, 3), three}, *cache, rows(logits));
  cache->truncate(0, 0);
  model_->forward({expected_.row(0).subspan(0, 1), std::vector<int64_t>{1}}, *cache, rows(logits));
  model_->forward({expected_.row(0).subspan(1), rest}, *cache, rows(logits));
  const std::vector<float> whole = alone(0);
  EXPECT_TRUE(
      std::equal(logits.begin(), logits.end(), whole.end() - static_cast<std::ptrdiff_t>(vocab_)));
  EXPECT_EQ(cache->length(0), expected_.length);
}

INSTANTIATE_TEST_SUITE_P(Models, Consistency,
                         testing::Combine(testing::Values("qwen2_moe", "qwen2_moe_sliding_window",
                                                          "qwen3_moe_dense_layers", "mixtral",
                                                          "olmoe_older_config"),
                                          testing::Values("eager", "batched_mm", "grouped_mm"),
                                          testing::Values(DType::kF32, DType::kBF16)),
                         case_name);

}  // namespace
}  // namespace cadre::test

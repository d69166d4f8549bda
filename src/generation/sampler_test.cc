#include <gtest/gtest.h>

#include <cmath>
#include <fstream>
#include <limits>
#include <map>
#include <nlohmann/json.hpp>
#include <vector>

#include "cadre/error.h"
#include "cadre/generation.h"

namespace cadre {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TokenId pick(Sampler& sampler, std::vector<float> logits,
             const std::vector<TokenId>& history = {}) {
  return sampler.next(logits, history);
}

// tests/data/make/make_sampler_cases.py: what Transformers' processors leave.
TEST(Sampler, SurvivorsAndProbabilitiesEqualTransformers) {
  std::ifstream in(std::string(CADRE_TEST_DATA) + "/sampler_cases.json");
  const auto cases = nlohmann::json::parse(in);
  ASSERT_GE(cases.size(), 40u);
  for (const auto& entry : cases) {
    SamplingOptions options;
    options.temperature = entry["temperature"].get<float>();
    options.top_k = entry["top_k"].get<int32_t>();
    options.top_p = entry["top_p"].get<float>();
    options.min_p = entry["min_p"].get<float>();
    options.repetition_penalty = entry["repetition_penalty"].get<float>();
    auto logits = entry["logits"].get<std::vector<float>>();
    const auto history = entry["history"].get<std::vector<TokenId>>();
    const auto result = Sampler(options).probabilities(logits, history);
    const auto expected = entry["expected"].get<std::vector<std::pair<TokenId, double>>>();
    ASSERT_EQ(result.size(), expected.size()) << entry;
    for (size_t i = 0; i < result.size(); ++i) {
      EXPECT_EQ(result[i].first, expected[i].first) << entry;
      EXPECT_NEAR(result[i].second, expected[i].second, 1e-6) << entry;
    }
  }
}

// Chi-square of 50 000 draws against the stated probabilities: 30 is beyond 99.9 % for 9 degrees.
TEST(Sampler, DrawsFollowTheProbabilities) {
  const std::vector<float> logits = {0.1f, 2.0f, -1.0f, 1.5f, 0.0f, 0.7f, -0.5f, 1.0f, 2.2f, -2.0f};
  for (const uint64_t seed : {1u, 2u, 3u}) {
    SamplingOptions options;
    options.temperature = 1.3f;
    options.seed = seed;
    Sampler sampler(options);
    auto copy = logits;
    const auto expected = sampler.probabilities(copy, {});
    std::map<TokenId, int> counts;
    constexpr int kDraws = 50000;
    for (int i = 0; i < kDraws; ++i) ++counts[pick(sampler, logits)];
    double chi_square = 0;
    for (const auto& entry : expected) {
      const double want = entry.second * kDraws;
      chi_square += std::pow(counts[entry.first] - want, 2) / want;
    }
    EXPECT_LT(chi_square, 30) << "seed " << seed;
  }
}

TEST(Sampler, SameSeedAndStreamRepeatAndOthersDiffer) {
  const auto draw = [](uint64_t seed, uint64_t stream) {
    SamplingOptions options;
    options.temperature = 1.0f;
    options.seed = seed;
    Sampler sampler(options, stream);
    std::vector<TokenId> ids;
    for (int i = 0; i < 64; ++i) ids.push_back(pick(sampler, std::vector<float>(100, 0.0f)));
    return ids;
  };
  EXPECT_EQ(draw(5, 2), draw(5, 2));
  EXPECT_NE(draw(5, 2), draw(5, 3));
  EXPECT_NE(draw(5, 2), draw(6, 2));
}

TEST(Sampler, GreedyTakesTheLargestAndTheLowestIdOfTies) {
  Sampler sampler{SamplingOptions{}};
  EXPECT_EQ(pick(sampler, {1.0f, 3.0f, 3.0f, 2.0f}), 1);
  EXPECT_EQ(pick(sampler, {-kInfinity, -kInfinity}), 0);
  EXPECT_EQ(pick(sampler, {1.0f, kInfinity, 2.0f}), 1);
}

TEST(Sampler, GreedyHeedsTheRepetitionPenaltyOncePerId) {
  SamplingOptions options;
  options.repetition_penalty = 2.0f;
  Sampler sampler(options);
  EXPECT_EQ(pick(sampler, {3.0f, 2.0f}, {0, 0}), 1);
  EXPECT_EQ(pick(sampler, {3.0f, 1.0f}, {0, 0}), 0);  // twice would be 0.75
  EXPECT_EQ(pick(sampler, {-1.0f, -1.5f}, {0}), 1);
}

TEST(Sampler, NeverPicksNan) {
  SamplingOptions options;
  for (const float temperature : {0.0f, 1.0f}) {
    options.temperature = temperature;
    Sampler sampler(options);
    for (int i = 0; i < 50; ++i) EXPECT_EQ(pick(sampler, {kNan, -5.0f, kNan}), 1);
    std::vector<float> all(4, kNan);
    EXPECT_THROW(sampler.next(all, {}), Error);
  }
}

TEST(Sampler, TinyTemperaturesTakeTheLargest) {
  SamplingOptions options;
  for (const float temperature : {3e-38f, 1e-38f, 1e-45f}) {
    options.temperature = temperature;
    for (options.seed = 0; options.seed < 20; ++options.seed) {
      Sampler sampler(options);
      EXPECT_EQ(pick(sampler, {18.0f, 19.5f, 19.25f, -4.0f}), 1) << temperature;
      EXPECT_EQ(pick(sampler, {-18.0f, -19.5f, -17.0f}), 2) << temperature;
      EXPECT_EQ(pick(sampler, {-kInfinity, 1e38f, 0.0f}), 1) << temperature;
    }
    options.top_k = 2;
    options.top_p = 0.9f;
    std::vector<float> logits = {18.0f, 19.5f, 19.25f};
    const auto left = Sampler(options).probabilities(logits, {});
    ASSERT_EQ(left.size(), 1u) << temperature;
    EXPECT_EQ(left[0], (std::pair<TokenId, double>{1, 1.0})) << temperature;
  }
}

TEST(Sampler, ALogitBeyondFloat32OnceDividedKeepsItsProbability) {
  SamplingOptions options;
  options.temperature = 0.25f;
  std::vector<float> logits = {3e38f, 3e38f, 1e38f, -kInfinity};
  const auto all = Sampler(options).probabilities(logits, {});
  EXPECT_EQ(all[0].second, 0.5);
  EXPECT_EQ(all[1].second, 0.5);
  EXPECT_EQ(all[2].second, 0.0);
}

TEST(Sampler, InfiniteLogitsLeaveADefinedChoice) {
  SamplingOptions options;
  options.temperature = 1.0f;
  Sampler sampler(options);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(pick(sampler, {0.0f, kInfinity, 5.0f}), 1);
  for (int i = 0; i < 50; ++i) EXPECT_EQ(pick(sampler, {-kInfinity, -3.0f, -kInfinity}), 1);
}

TEST(Sampler, RefusesHistoryOutsideTheVocabulary) {
  SamplingOptions options;
  options.repetition_penalty = 1.1f;
  Sampler sampler(options);
  EXPECT_THROW(pick(sampler, {1.0f, 2.0f}, {2}), InvalidArgument);
  EXPECT_THROW(pick(sampler, {1.0f, 2.0f}, {-1}), InvalidArgument);
}

TEST(SamplingOptions, EachOptionOutOfRangeIsNamed) {
  const auto message = [](auto change) -> std::string {
    SamplingOptions options;
    change(options);
    try {
      validate(options);
    } catch (const InvalidArgument& error) {
      return error.what();
    }
    return "accepted";
  };
  using Options = SamplingOptions;
  const auto expect = [&](auto change, const char* option) {
    EXPECT_NE(message(change).find(option), std::string::npos) << message(change);
  };
  for (const float bad : {-1.0f, kNan, kInfinity}) {
    expect([=](Options& o) { o.temperature = bad; }, "temperature");
    expect([=](Options& o) { o.top_p = bad; }, "top_p");
    expect([=](Options& o) { o.min_p = bad; }, "min_p");
    expect([=](Options& o) { o.repetition_penalty = bad; }, "repetition_penalty");
  }
  expect([](Options& o) { o.top_k = -1; }, "top_k");
  expect([](Options& o) { o.top_p = 1.5f; }, "got 1.5");
  expect([](Options& o) { o.repetition_penalty = 0.0f; }, "repetition_penalty");
  EXPECT_EQ(message([](Options&) {}), "accepted");
}

}  // namespace
}  // namespace cadre

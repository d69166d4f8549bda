// What routing promises on every device: a plain float64 sort, and rules for NaN, infinities and
// ties. A device's test derives a fixture from its own with
//   Routed route(logits, k, options, bias = {}) and Tensor random(dtype, shape, scale)
// and instantiates the suite with it.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>
#include <utility>
#include <vector>

#include "cadre/tensor.h"
#include "dense/dense_ops.h"
#include "support/compare.h"

namespace cadre::test {

/// [tokens * k] each.
struct Routed {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};

inline std::vector<double> route_scores(const std::vector<double>& logits, RouterScore kind) {
  std::vector<double> scores;
  double sum = 0;
  for (const double x : logits) sum += std::exp(x);
  for (const double x : logits) {
    scores.push_back(kind == RouterScore::kSoftmaxThenTopK   ? std::exp(x) / sum
                     : kind == RouterScore::kTopKThenSoftmax ? x
                     : kind == RouterScore::kSigmoid         ? 1 / (1 + std::exp(-x))
                                                             : std::sqrt(std::log1p(std::exp(x))));
  }
  return scores;
}

// Experts by descending choice value.
inline std::vector<size_t> ranking(const std::vector<double>& choice) {
  std::vector<size_t> order(choice.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return choice[a] > choice[b]; });
  return order;
}

inline Routed route_reference(const std::vector<double>& logits, const std::vector<double>& bias,
                              size_t k, const RouterOptions& options) {
  const std::vector<double> scores = route_scores(logits, options.score);
  std::vector<double> choice = scores;
  for (size_t e = 0; e < bias.size(); ++e) choice[e] += bias[e];
  const auto groups = static_cast<size_t>(options.num_groups);
  const size_t size = choice.size() / groups;
  std::vector<double> group_values;
  for (size_t g = 0; g < groups; ++g) {
    std::vector<double> members(choice.begin() + static_cast<std::ptrdiff_t>(g * size),
                                choice.begin() + static_cast<std::ptrdiff_t>((g + 1) * size));
    std::sort(members.rbegin(), members.rend());
    const bool two = options.group_score == GroupScore::kSumOfTopTwo && size > 1;
    group_values.push_back(members[0] + (two ? members[1] : 0));
  }
  const auto group_order = ranking(group_values);
  for (size_t i = static_cast<size_t>(options.topk_groups); i < groups; ++i) {
    for (size_t e = 0; e < size; ++e) choice[group_order[i] * size + e] = -1e300;
  }
  Routed result;
  double sum = 0;
  for (size_t j = 0; j < k; ++j) {
    const size_t e = ranking(choice)[j];
    result.ids.push_back(static_cast<int32_t>(e));
    const bool late = options.score == RouterScore::kTopKThenSoftmax;
    result.weights.push_back(late ? std::exp(scores[e]) : scores[e]);
    sum += result.weights.back();
  }
  const bool divide = options.normalize || options.score == RouterScore::kTopKThenSoftmax;
  for (double& weight : result.weights) {
    weight = weight / (divide ? sum : 1) * static_cast<double>(options.scaling_factor);
  }
  return result;
}

template <typename Fixture>
class RouteSuite : public Fixture {
 protected:
  static constexpr float kInf = std::numeric_limits<float>::infinity();
  static constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

  Routed route_row(const std::vector<float>& logits, int64_t k, const RouterOptions& options = {}) {
    return this->route({logits.data(), DType::kF32, {1, static_cast<int64_t>(logits.size())}}, k,
                       options);
  }
};
TYPED_TEST_SUITE_P(RouteSuite);

TYPED_TEST_P(RouteSuite, EqualsTheReferenceForEveryScore) {
  for (const RouterScore score : {RouterScore::kSoftmaxThenTopK, RouterScore::kTopKThenSoftmax,
                                  RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const auto& [experts, k] : {std::pair{1, 1},
                                     {2, 2},
                                     {6, 2},
                                     {60, 4},
                                     {128, 8},
                                     {257, 22},
                                     {384, 6},
                                     {512, 10},
                                     {1025, 8},
                                     {1025, 40}}) {
      const bool biased = score == RouterScore::kSigmoid || score == RouterScore::kSqrtSoftplus;
      const Tensor logits = this->random(DType::kF32, {3, experts}, 2);
      const Tensor bias = this->random(DType::kF32, {experts}, 0.3f);
      RouterOptions options{.score = score, .normalize = experts % 2 == 0, .scaling_factor = 2.5f};
      const Routed got =
          this->route(logits.view(), k, options, biased ? TensorView(bias.view()) : TensorView());
      for (int64_t t = 0; t < 3; ++t) {
        const Routed expected =
            route_reference(test::to_doubles(logits.view()[t]),
                            biased ? test::to_doubles(bias.view()) : std::vector<double>{},
                            static_cast<size_t>(k), options);
        for (size_t j = 0; j < static_cast<size_t>(k); ++j) {
          const size_t slot = static_cast<size_t>(t * k) + j;
          ASSERT_EQ(got.ids[slot], expected.ids[j]) << experts << " experts, slot " << j;
          ASSERT_NEAR(got.weights[slot], expected.weights[j], 1e-5);
        }
      }
    }
  }
}

TYPED_TEST_P(RouteSuite, GroupsLimitTheChoice) {
  for (const GroupScore group_score : {GroupScore::kMax, GroupScore::kSumOfTopTwo}) {
    const Tensor logits = this->random(DType::kF32, {50, 32}, 2);
    const Tensor bias = this->random(DType::kF32, {32}, 0.3f);
    const RouterOptions options{.score = RouterScore::kSigmoid,
                                .normalize = true,
                                .num_groups = 8,
                                .topk_groups = 3,
                                .group_score = group_score};
    const Routed got = this->route(logits.view(), 6, options, bias.view());
    for (int64_t t = 0; t < 50; ++t) {
      const Routed expected = route_reference(test::to_doubles(logits.view()[t]),
                                              test::to_doubles(bias.view()), 6, options);
      const auto begin = got.ids.begin() + t * 6;
      EXPECT_EQ(std::vector<int32_t>(begin, begin + 6), expected.ids) << "row " << t;
    }
  }
}

TYPED_TEST_P(RouteSuite, TiesGoToTheLowerId) {
  EXPECT_EQ(this->route_row({1, 3, 3, 2, 3}, 4).ids, (std::vector<int32_t>{1, 2, 4, 3}));
}

TYPED_TEST_P(RouteSuite, ARowOfNaNGivesDistinctIdsInRangeAndFiniteWeights) {
  for (const RouterScore score : {RouterScore::kSoftmaxThenTopK, RouterScore::kTopKThenSoftmax,
                                  RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const float value : {TestFixture::kNaN, -TestFixture::kInf}) {
      const Routed got = this->route_row(std::vector<float>(9, value), 4, {.score = score});
      EXPECT_EQ(std::set<int32_t>(got.ids.begin(), got.ids.end()).size(), 4u);
      for (const int32_t id : got.ids) EXPECT_TRUE(id >= 0 && id < 9);
      for (const double weight : got.weights) EXPECT_TRUE(std::isfinite(weight));
    }
  }
}

TYPED_TEST_P(RouteSuite, ARowWithSomeNaNRoutesToItsFiniteExperts) {
  const Routed got = this->route_row({TestFixture::kNaN, 1, TestFixture::kNaN, 2, -1}, 3);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{3, 1, 4}));
  EXPECT_NEAR(got.weights[0] + got.weights[1] + got.weights[2], 1, 1e-6);
}

TYPED_TEST_P(RouteSuite, InfiniteLogitsTakeAllWeight) {
  const Routed got = this->route_row({0, TestFixture::kInf, 5, TestFixture::kInf}, 3);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{1, 3, 2}));
  EXPECT_EQ(got.weights, (std::vector<double>{0.5, 0.5, 0}));
}

REGISTER_TYPED_TEST_SUITE_P(RouteSuite, EqualsTheReferenceForEveryScore, GroupsLimitTheChoice,
                            TiesGoToTheLowerId, ARowOfNaNGivesDistinctIdsInRangeAndFiniteWeights,
                            ARowWithSomeNaNRoutesToItsFiniteExperts, InfiniteLogitsTakeAllWeight);

}  // namespace cadre::test

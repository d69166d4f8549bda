// Routing on the GPU against a plain float64 sort, and its promises for NaN, infinities and ties.
#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>
#include <set>

#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

struct Routed {
  std::vector<int32_t> ids;
  std::vector<double> weights;
};

class GpuRoute : public GpuOpsTest {
 protected:
  Routed route(const TensorView& logits, int64_t k, const RouterOptions& options,
               const TensorView& bias = {}) {
    const Tensor ids = poisoned(DType::kI32, {logits.dim(0), k});
    const Tensor weights = poisoned(DType::kF32, {logits.dim(0), k});
    Workspace exact(kGpu, ops_->route_workspace_bytes(logits.dim(1), 1));
    const Tensor gpu_logits = to_gpu(logits);
    const Tensor gpu_bias = bias ? to_gpu(bias) : Tensor();
    ops_->route(gpu_logits.view(), bias ? TensorView(gpu_bias.view()) : TensorView(), options, ids,
                weights, exact, stream_);
    const Tensor host = to_host(ids.view());
    const auto* data = host->as<int32_t>();
    return {std::vector<int32_t>(data, data + ids->numel()), values(weights.view())};
  }

  Routed route_row(const std::vector<float>& logits, int64_t k, const RouterOptions& options = {}) {
    return route({logits.data(), DType::kF32, {1, static_cast<int64_t>(logits.size())}}, k,
                 options);
  }
};

std::vector<double> scores_of(const std::vector<double>& logits, RouterScore kind) {
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
std::vector<size_t> ranking(const std::vector<double>& choice) {
  std::vector<size_t> order(choice.size());
  std::iota(order.begin(), order.end(), size_t{0});
  std::stable_sort(order.begin(), order.end(),
                   [&](size_t a, size_t b) { return choice[a] > choice[b]; });
  return order;
}

Routed reference(const std::vector<double>& logits, const std::vector<double>& bias, size_t k,
                 const RouterOptions& options) {
  const std::vector<double> scores = scores_of(logits, options.score);
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

TEST_F(GpuRoute, EqualsTheReferenceForEveryScore) {
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
                                     {1025, 40}}) {
      const bool biased = score == RouterScore::kSigmoid || score == RouterScore::kSqrtSoftplus;
      const Tensor logits = random(DType::kF32, {3, experts}, 2);
      const Tensor bias = random(DType::kF32, {experts}, 0.3f);
      RouterOptions options{.score = score, .normalize = experts % 2 == 0, .scaling_factor = 2.5f};
      const Routed got =
          route(logits.view(), k, options, biased ? TensorView(bias.view()) : TensorView());
      for (int64_t t = 0; t < 3; ++t) {
        const Routed expected =
            reference(test::to_doubles(logits.view()[t]),
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

TEST_F(GpuRoute, GroupsLimitTheChoice) {
  for (const GroupScore group_score : {GroupScore::kMax, GroupScore::kSumOfTopTwo}) {
    const Tensor logits = random(DType::kF32, {50, 32}, 2);
    const Tensor bias = random(DType::kF32, {32}, 0.3f);
    const RouterOptions options{.score = RouterScore::kSigmoid,
                                .normalize = true,
                                .num_groups = 8,
                                .topk_groups = 3,
                                .group_score = group_score};
    const Routed got = route(logits.view(), 6, options, bias.view());
    for (int64_t t = 0; t < 50; ++t) {
      const Routed expected =
          reference(test::to_doubles(logits.view()[t]), test::to_doubles(bias.view()), 6, options);
      const auto begin = got.ids.begin() + t * 6;
      EXPECT_EQ(std::vector<int32_t>(begin, begin + 6), expected.ids) << "row " << t;
    }
  }
}

TEST_F(GpuRoute, TiesGoToTheLowerId) {
  EXPECT_EQ(route_row({1, 3, 3, 2, 3}, 4).ids, (std::vector<int32_t>{1, 2, 4, 3}));
}

TEST_F(GpuRoute, ARowOfNaNGivesDistinctIdsInRangeAndFiniteWeights) {
  for (const RouterScore score : {RouterScore::kSoftmaxThenTopK, RouterScore::kTopKThenSoftmax,
                                  RouterScore::kSigmoid, RouterScore::kSqrtSoftplus}) {
    for (const float value : {kNaN, -kInf}) {
      const Routed got = route_row(std::vector<float>(9, value), 4, {.score = score});
      EXPECT_EQ(std::set<int32_t>(got.ids.begin(), got.ids.end()).size(), 4u);
      for (const int32_t id : got.ids) EXPECT_TRUE(id >= 0 && id < 9);
      for (const double weight : got.weights) EXPECT_TRUE(std::isfinite(weight));
    }
  }
}

TEST_F(GpuRoute, ARowWithSomeNaNRoutesToItsFiniteExperts) {
  const Routed got = route_row({kNaN, 1, kNaN, 2, -1}, 3);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{3, 1, 4}));
  EXPECT_NEAR(got.weights[0] + got.weights[1] + got.weights[2], 1, 1e-6);
}

TEST_F(GpuRoute, InfiniteLogitsTakeAllWeight) {
  const Routed got = route_row({0, kInf, 5, kInf}, 3);
  EXPECT_EQ(got.ids, (std::vector<int32_t>{1, 3, 2}));
  EXPECT_EQ(got.weights, (std::vector<double>{0.5, 0.5, 0}));
}

TEST_F(GpuRoute, ManyTokens) {
  const Tensor logits = random(DType::kF32, {5000, 128}, 2);
  const RouterOptions options{.normalize = true};
  const Routed got = route(logits.view(), 8, options);
  const Routed again = route(logits.view(), 8, options);
  EXPECT_EQ(got.ids, again.ids);
  EXPECT_EQ(got.weights, again.weights);
  for (int64_t t = 0; t < 5000; t += 7) {
    const Routed expected = reference(test::to_doubles(logits.view()[t]), {}, 8, options);
    for (size_t j = 0; j < 8; ++j) {
      ASSERT_EQ(got.ids[static_cast<size_t>(t) * 8 + j], expected.ids[j]);
      ASSERT_NEAR(got.weights[static_cast<size_t>(t) * 8 + j], expected.weights[j], 1e-6);
    }
  }
}

// Norm, router product and routing in one launch where that is possible; the base class does them
// one after the other.
TEST_F(GpuRoute, NormAndRouteInOne) {
  struct Case {
    int64_t tokens, experts, width, k;
    RouterOptions options;
    bool has_bias;
  };
  const RouterOptions softmax{.normalize = true};
  const RouterOptions groups{.score = RouterScore::kSigmoid,
                             .normalize = true,
                             .scaling_factor = 2.5f,
                             .num_groups = 8,
                             .topk_groups = 4,
                             .group_score = GroupScore::kSumOfTopTwo};
  for (const Case& c : {Case{1, 128, 2048, 8, softmax, false},
                        Case{8, 128, 2048, 8, softmax, false}, Case{3, 60, 1032, 4, {}, false},
                        Case{1, 8, 4096, 2, {.score = RouterScore::kTopKThenSoftmax}, false},
                        Case{2, 256, 1024, 8, groups, true},
                        Case{5, 512, 512, 10, {.score = RouterScore::kSigmoid}, true},
                        Case{1, 256, 7168, 8, groups, true}, Case{9, 128, 2048, 8, softmax, false},
                        Case{2, 33, 65, 3, softmax, false}}) {
    for (const DType dtype : kComputeDtypes) {
      const Tensor residual = to_gpu(random(DType::kF32, {c.tokens, c.width}, 3).view());
      const Tensor norm = to_gpu(random(dtype, {c.width}).view());
      const float scale = 2 / std::sqrt(static_cast<float>(c.width));
      const Tensor gate = to_gpu(random(dtype, {c.experts, c.width}, scale).view());
      const Tensor bias = to_gpu(random(DType::kF32, {c.experts}).view());
      std::vector<std::vector<std::byte>> xs;
      std::vector<std::vector<double>> ids;
      std::vector<std::vector<double>> weights;
      for (const bool in_one : {false, true, true}) {
        const Tensor x = poisoned(dtype, {c.tokens, c.width});
        const Tensor index = poisoned(DType::kI32, {c.tokens, c.k});
        const Tensor weight = poisoned(DType::kF32, {c.tokens, c.k});
        const NormRouteArgs args{residual.view(),
                                 norm.view(),
                                 1e-6f,
                                 x,
                                 {gate.view(), {}},
                                 c.has_bias ? TensorView(bias.view()) : TensorView(),
                                 c.options,
                                 index,
                                 weight};
        if (in_one) {
          ops_->norm_and_route(args, *workspace_, stream_);
        } else {
          ops_->DenseOps::norm_and_route(args, *workspace_, stream_);
        }
        xs.push_back(bits(x.view()));
        ids.push_back(values(index.view()));
        weights.push_back(values(weight.view()));
      }
      const std::string what = std::string(name_of(dtype)) + " E " + std::to_string(c.experts) +
                               " T " + std::to_string(c.tokens);
      EXPECT_EQ(xs[0], xs[1]) << what;
      EXPECT_EQ(ids[0], ids[1]) << what;
      EXPECT_LE(test::relative_error(weights[1], weights[0]), 1e-5) << what;
      EXPECT_EQ(ids[1], ids[2]) << what;
      EXPECT_EQ(weights[1], weights[2]) << what << ", again";
    }
  }
}

}  // namespace
}  // namespace cadre::cuda

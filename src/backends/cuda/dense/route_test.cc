// Routing on the GPU: the suite of every device, many tokens, and norm, router and routing in one.
#include <cmath>
#include <string>
#include <vector>

#include "backends/cuda/dense/ops_fixture.h"
#include "dense/route_suite.h"

namespace cadre::cuda {
namespace {

using test::Routed;

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
};

TEST_F(GpuRoute, ManyTokens) {
  const Tensor logits = random(DType::kF32, {5000, 128}, 2);
  const RouterOptions options{.normalize = true};
  const Routed got = route(logits.view(), 8, options);
  const Routed again = route(logits.view(), 8, options);
  EXPECT_EQ(got.ids, again.ids);
  EXPECT_EQ(got.weights, again.weights);
  for (int64_t t = 0; t < 5000; t += 7) {
    const Routed expected =
        test::route_reference(test::to_doubles(logits.view()[t]), {}, 8, options);
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

namespace cadre::test {
INSTANTIATE_TYPED_TEST_SUITE_P(Gpu, RouteSuite, cuda::GpuRoute);
}  // namespace cadre::test

// Routing on the CPU: the suite of every device, refusals, and no allocation.
#include "backends/cpu/dense/ops_fixture.h"
#include "cadre/error.h"
#include "dense/route_suite.h"
#include "support/allocation_counter.h"

namespace cadre::cpu {
namespace {

using test::Routed;

class CpuRoute : public OpsTest {
 protected:
  Routed route(const TensorView& logits, int64_t k, const RouterOptions& options,
               const TensorView& bias = {}) {
    const Tensor ids(DType::kI32, {logits.dim(0), k});
    const Tensor weights(DType::kF32, {logits.dim(0), k});
    Workspace exact({}, ops_.route_workspace_bytes(logits.dim(1), threads_.num_threads()));
    ops_.route(logits, bias, options, ids, weights, exact, stream_);
    const auto* data = ids->as<int32_t>();
    return {std::vector<int32_t>(data, data + ids->numel()), test::to_doubles(weights.view())};
  }
};

TEST_F(CpuRoute, ImpossibleOptionsAreRefused) {
  EXPECT_THROW(validate(RouterOptions{}, 4, 5), InvalidArgument);
  EXPECT_THROW(validate(RouterOptions{}, 4, 0), InvalidArgument);
  EXPECT_THROW(validate(RouterOptions{.num_groups = 3, .topk_groups = 1}, 8, 2), InvalidArgument);
  EXPECT_THROW(validate(RouterOptions{.num_groups = 4, .topk_groups = 5}, 8, 2), InvalidArgument);
  EXPECT_THROW(validate(RouterOptions{.num_groups = 4, .topk_groups = 1}, 8, 3), InvalidArgument);
  EXPECT_NO_THROW(validate(RouterOptions{.num_groups = 4, .topk_groups = 2}, 8, 4));
}

TEST_F(CpuRoute, AllocatesNothing) {
  const Tensor logits = random(DType::kF32, {200, 128});
  const Tensor ids(DType::kI32, {200, 8});
  const Tensor weights(DType::kF32, {200, 8});
  const test::AllocationCounter counter;
  ops_.route(logits.view(), {}, {}, ids, weights, workspace_, stream_);
  const int64_t allocations = counter.count();
  EXPECT_EQ(allocations, 0);
}

}  // namespace
}  // namespace cadre::cpu

namespace cadre::test {
INSTANTIATE_TYPED_TEST_SUITE_P(Cpu, RouteSuite, cpu::CpuRoute);
}  // namespace cadre::test

#include "experts/routing_plan.h"

#include <gtest/gtest.h>

#include <limits>
#include <vector>

namespace cadre {
namespace {

struct Plan {
  std::vector<int64_t> active, offsets, pairs;
};

template <typename Id>
Plan plan_of(const std::vector<Id>& ids, int64_t top_k, int64_t num_experts) {
  const int64_t tokens = top_k == 0 ? 0 : static_cast<int64_t>(ids.size()) / top_k;
  const TensorView view(ids.data(), sizeof(Id) == 4 ? DType::kI32 : DType::kI64, {tokens, top_k});
  Workspace workspace({}, routing_plan_bytes(num_experts, tokens, top_k));
  const RoutingPlan plan = make_routing_plan(view, num_experts, workspace);
  EXPECT_EQ(workspace.used(), workspace.capacity());  // the size is exact
  return {{plan.active, plan.active + plan.num_active},
          {plan.offsets, plan.offsets + plan.num_active + 1},
          {plan.pairs, plan.pairs + plan.num_pairs}};
}

TEST(RoutingPlan, SortsPairsByExpertAndKeepsTheirOrder) {
  const Plan plan = plan_of<int64_t>({2, 0, 0, 2, 2, 5}, 2, 6);
  EXPECT_EQ(plan.active, (std::vector<int64_t>{0, 2, 5}));
  EXPECT_EQ(plan.offsets, (std::vector<int64_t>{0, 2, 5, 6}));
  EXPECT_EQ(plan.pairs, (std::vector<int64_t>{1, 2, 0, 3, 4, 5}));
}

TEST(RoutingPlan, ReadsBothIdWidths) {
  const Plan wide = plan_of<int64_t>({3, 1, 1, 0}, 2, 4);
  const Plan narrow = plan_of<int32_t>({3, 1, 1, 0}, 2, 4);
  EXPECT_EQ(wide.pairs, narrow.pairs);
  EXPECT_EQ(wide.pairs, (std::vector<int64_t>{3, 1, 2, 0}));
}

TEST(RoutingPlan, CountsARepeatedExpertEachTime) {
  const Plan plan = plan_of<int64_t>({1, 1, 1}, 3, 2);
  EXPECT_EQ(plan.pairs, (std::vector<int64_t>{0, 1, 2}));
}

TEST(RoutingPlan, DropsEveryIdThatNamesNoExpert) {
  using Limits = std::numeric_limits<int64_t>;
  const Plan plan =
      plan_of<int64_t>({-1, 4, 5, Limits::max(), Limits::min(), int64_t{1} << 32, 3, -3}, 2, 4);
  EXPECT_EQ(plan.active, (std::vector<int64_t>{3}));
  EXPECT_EQ(plan.pairs, (std::vector<int64_t>{6}));
  const Plan none = plan_of<int32_t>({-1, 4}, 1, 4);
  EXPECT_TRUE(none.active.empty());
  EXPECT_EQ(none.offsets, (std::vector<int64_t>{0}));
}

TEST(RoutingPlan, TakesNoTokensAndManyExperts) {
  EXPECT_TRUE(plan_of<int64_t>({}, 2, 4).pairs.empty());
  std::vector<int32_t> ids;
  for (int32_t i = 0; i < 1025; ++i) ids.push_back(1024 - i);
  const Plan plan = plan_of<int32_t>(ids, 1, 1025);
  EXPECT_EQ(plan.active.size(), 1025u);
  EXPECT_EQ(plan.pairs.front(), 1024);
}

TEST(RoutingPlan, ReadsStridedRows) {
  const int64_t ids[] = {1, 9, 9, 0, 9, 9};
  Workspace workspace({}, routing_plan_bytes(2, 2, 1));
  const RoutingPlan plan =
      make_routing_plan(TensorView(ids, DType::kI64, {2, 1}, {3, 1}), 2, workspace);
  EXPECT_EQ(plan.num_pairs, 2);
  EXPECT_EQ(plan.pairs[0], 1);
}

TEST(RoutingPlan, SizesAreComputedIn64Bits) {
  const int64_t tokens = int64_t{1} << 31;
  EXPECT_GT(routing_plan_bytes(8, tokens, 8), static_cast<size_t>(tokens) * 64);
}

}  // namespace
}  // namespace cadre

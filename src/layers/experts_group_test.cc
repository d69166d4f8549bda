// The backend of a step: small steps of grouped_mm experts take batched_mm where that was prepared,
// nothing else ever switches.
#include "layers/experts_group.h"

#include <gtest/gtest.h>

#include <memory>

#include "experts/stage_policy.h"

namespace cadre {
namespace {

ExpertsQuery query() {
  ExpertsQuery query;
  query.config = {.num_experts = 4, .hidden_size = 8, .intermediate_size = 4, .top_k = 2};
  query.compute_dtype = DType::kF32;
  query.format = StorageFormat::kF32;
  return query;
}

class ChoiceForStep : public testing::Test {
 protected:
  ChoiceForStep()
      : gate_up_(DType::kF32, {4, 8, 8}), down_(DType::kF32, {4, 8, 4}), group_("", query()) {
    group_.add_layer(std::make_shared<ExpertsWeights>(
        make_experts_weights(query().config, {gate_up_, down_, {}, {}})));
  }

  Tensor gate_up_;
  Tensor down_;
  ExpertsGroup group_;
};

TEST_F(ChoiceForStep, SmallStepsOfGroupedMmTakeBatchedMm) {
  group_.activate(group_.prepare("grouped_mm"));
  group_.prepare_in_place();
  EXPECT_EQ(group_.choice_for(1).name, "grouped_mm") << "off as long as nobody set a number";
  group_.set_max_decode_tokens(8);
  EXPECT_EQ(group_.choice_for(1).name, "batched_mm");
  EXPECT_EQ(group_.choice_for(8).name, "batched_mm");
  EXPECT_EQ(group_.choice_for(9).name, "grouped_mm");
  EXPECT_EQ(group_.active().name, "grouped_mm") << "nothing to switch back";
  group_.set_max_decode_tokens(0);
  EXPECT_EQ(group_.choice_for(1).name, "grouped_mm");
}

TEST_F(ChoiceForStep, OtherBackendsStay) {
  for (const char* name : {"eager", "batched_mm"}) {
    group_.activate(group_.prepare(name));
    group_.prepare_in_place();
    group_.set_max_decode_tokens(8);
    EXPECT_EQ(group_.choice_for(1).name, name);
    EXPECT_EQ(group_.choice_for(100).name, name);
  }
}

TEST_F(ChoiceForStep, WithoutBatchedMmGroupedMmStays) {
  group_.activate(group_.prepare("grouped_mm"));
  group_.set_max_decode_tokens(8);
  EXPECT_EQ(group_.choice_for(1).name, "grouped_mm");
}

TEST(StagePolicy, OnlyGpusSwitch) {
  ExpertsQuery q = query();
  EXPECT_EQ(decode_threshold(q), 0);
  q.device = {DeviceType::kCuda, 0};
  EXPECT_GT(decode_threshold(q), 0);
  q.format = StorageFormat::kFp4;
  q.config.num_experts = 128;
  q.config.top_k = 8;
  q.compute_dtype = DType::kF32;  // batched_mm has no fast kernels for it
  EXPECT_EQ(decode_threshold(q), 0);
  q.compute_dtype = DType::kBF16;
  EXPECT_EQ(decode_threshold(q), 64);
  q.config = {.num_experts = 8, .top_k = 2};  // sixteen tokens an expert would read it twice
  EXPECT_EQ(decode_threshold(q), 32);
  q.format = StorageFormat::kFp8Block;
  q.activation_scheme = ActivationScheme::kDynamic;
  EXPECT_GT(decode_threshold(q), 0);
}

}  // namespace
}  // namespace cadre

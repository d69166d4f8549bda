#include "backends/cpu/kernels/experts_call.h"

#include <gtest/gtest.h>

#include "cadre/error.h"

namespace cadre::cpu {
namespace {

ExpertsQuery good() {
  ExpertsQuery query;
  query.config = {.num_experts = 8, .hidden_size = 64, .intermediate_size = 32, .top_k = 2};
  return query;
}

TEST(SupportsInPlace, TakesEveryPlainFormatAndComputeDtype) {
  for (const DType compute : {DType::kF32, DType::kF16, DType::kBF16}) {
    for (const StorageFormat format :
         {StorageFormat::kF32, StorageFormat::kF16, StorageFormat::kBF16}) {
      ExpertsQuery query = good();
      query.compute_dtype = compute;
      query.format = format;
      EXPECT_EQ(to_string(supports_in_place(query)), "ok");
    }
  }
}

TEST(SupportsInPlace, GivesEveryReasonAtOnce) {
  ExpertsQuery query = good();
  query.device = {DeviceType::kCuda, 1};
  query.compute_dtype = DType::kF8E4M3;
  query.format = StorageFormat::kFp8Tensor;
  query.scale_layout = {DType::kF32, 128, 128};
  query.ep_size = 4;
  query.config.top_k = 9;
  const Support support = supports_in_place(query);
  ASSERT_EQ(support.reasons.size(), 5u) << to_string(support);
  EXPECT_EQ(support.reasons[0], "it runs on the CPU, not on cuda:1");
  EXPECT_NE(support.reasons[1].find("not in float8_e4m3"), std::string::npos);
  EXPECT_NE(support.reasons[2].find("fp8-tensor weights have one"), std::string::npos);
  EXPECT_NE(support.reasons[3].find("group of 4"), std::string::npos);
  EXPECT_NE(support.reasons[4].find("top_k: expected at most num_experts"), std::string::npos);
}

TEST(SupportsInPlace, RefusesQuantisedActivationsOfPlainWeights) {
  ExpertsQuery query = good();
  query.activation_scheme = ActivationScheme::kDynamic;
  EXPECT_NE(to_string(supports_in_place(query)).find("activations are quantised"),
            std::string::npos);
}

ExpertsQuery query_of(const ExpertsConfig& config) {
  ExpertsQuery query = good();
  query.config = config;
  return query;
}

TEST(SupportsInPlace, TakesQuantisedWeightsWithTheActivationsThatTheyAreMadeFor) {
  struct Row {
    StorageFormat format;
    ScaleLayout layout;
    ActivationScheme activations;
    const char* refused_by_all;     // null = served
    const char* without_abilities;  // null = served by every backend
  };
  const ScaleLayout blocks{DType::kF32, 128, 128}, powers{DType::kF8E8M0, 1, 32};
  const auto none = ActivationScheme::kNone, dynamic = ActivationScheme::kDynamic,
             fixed = ActivationScheme::kStatic;
  const char* by_eager = "served by eager alone";
  const char* by_deepgemm = "deepgemm alone";
  const char* as_they_are = "activations in the compute dtype, not with";
  for (const Row& row :
       {Row{StorageFormat::kFp8Block, blocks, none, nullptr, nullptr},
        {StorageFormat::kFp8Block, blocks, dynamic, nullptr, nullptr},
        {StorageFormat::kFp8Block, blocks, fixed, nullptr, by_eager},
        {StorageFormat::kFp8Block, {DType::kF16, 1, 1}, dynamic, "float16", "float16"},
        {StorageFormat::kFp8Tensor, {}, fixed, nullptr, by_eager},
        {StorageFormat::kMxFp8, powers, none, nullptr, nullptr},
        {StorageFormat::kMxFp8, powers, dynamic, as_they_are, as_they_are},
        {StorageFormat::kFp4, powers, none, nullptr, nullptr},
        {StorageFormat::kFp4, powers, dynamic, nullptr, by_deepgemm},
        {StorageFormat::kFp4, powers, fixed, as_they_are, as_they_are},
        {StorageFormat::kFp4, blocks, none, "1 x 32", "1 x 32"}}) {
    ExpertsQuery query = good();
    query.format = row.format;
    query.scale_layout = row.layout;
    query.activation_scheme = row.activations;
    const auto expect = [&](const Support& support, const char* reason) {
      EXPECT_EQ(support.ok(), reason == nullptr) << to_string(support);
      if (reason == nullptr) return;
      EXPECT_NE(to_string(support).find(reason), std::string::npos) << to_string(support);
    };
    expect(supports_in_place(query), row.without_abilities);
    expect(supports_in_place(query, {true, true}), row.refused_by_all);
  }
}

TEST(MemoryPlan, GrowsWithTokensAndThreadsAndStaysBounded) {
  ExpertsConfig config = good().config;
  config.hidden_size = 7168;
  config.intermediate_size = 2048;
  config.num_experts = 256;
  config.top_k = 8;
  size_t last = 0;
  for (int64_t tokens = 0; tokens < 6000; tokens += 7) {
    const size_t bytes = plan_memory(query_of(config), tokens, 2).total();
    EXPECT_GE(bytes, last) << tokens;  // a smaller forward always fits
    last = bytes;
  }
  EXPECT_GT(plan_memory(query_of(config), 8, 3).total(),
            plan_memory(query_of(config), 8, 2).total());
  // 2^40 tokens are processed in chunks, in memory for one of them.
  EXPECT_LT(plan_memory(query_of(config), int64_t{1} << 40, 2).total(), size_t{640} << 20);
  EXPECT_THROW(plan_memory(query_of(config), -1, 2), InvalidArgument);
}

TEST(MemoryPlan, CountsNoGateMemory) {
  // h is [pairs, I] with and without a gate: [gate; up] never goes to memory.
  ExpertsConfig config = good().config;
  const size_t with_gate = plan_memory(query_of(config), 100, 1).total();
  config.has_gate = false;
  EXPECT_EQ(plan_memory(query_of(config), 100, 1).total(), with_gate);
}

}  // namespace
}  // namespace cadre::cpu

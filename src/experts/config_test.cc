#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "experts/limits.h"

namespace cadre {
namespace {

ExpertsConfig good() {
  return {.num_experts = 8, .hidden_size = 16, .intermediate_size = 32, .top_k = 2};
}

std::string refusal(const ExpertsConfig& config) {
  try {
    validate(config);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "accepted";
}

TEST(Activation, NamesGoBothWays) {
  for (const char* name : {"silu", "gelu", "gelu_pytorch_tanh", "relu", "relu2"}) {
    EXPECT_EQ(name_of(parse_activation(name)), name);
  }
  EXPECT_EQ(parse_activation("swish"), Activation::kSilu);
  EXPECT_EQ(parse_activation("gelu_new"), Activation::kGeluTanh);
}

TEST(Activation, RefusesAnUnknownNameAndListsTheKnownOnes) {
  try {
    parse_activation("situ_and_mul");
    FAIL();
  } catch (const Unsupported& e) {
    EXPECT_NE(std::string(e.what()).find("silu, swish, gelu"), std::string::npos) << e.what();
    EXPECT_NE(std::string(e.what()).find("\"situ_and_mul\""), std::string::npos) << e.what();
  }
}

TEST(ExpertsConfig, AcceptsWhatModelsHave) {
  EXPECT_EQ(refusal(good()), "accepted");
  ExpertsConfig all = good();
  all.top_k = all.num_experts;
  all.swiglu_limit = 7.0f;
  all.swiglu_alpha = 1.702f;
  EXPECT_EQ(refusal(all), "accepted");
}

TEST(ExpertsConfig, NamesTheFieldThatIsWrong) {
  const auto expect = [](auto change, const std::string& text) {
    ExpertsConfig config = good();
    change(config);
    EXPECT_NE(refusal(config).find(text), std::string::npos) << refusal(config);
  };
  expect([](auto& c) { c.num_experts = 0; }, "num_experts: expected 1 to 1048576, got 0");
  expect([](auto& c) { c.num_experts = kMaxExperts + 1; }, "num_experts");
  expect([](auto& c) { c.hidden_size = -1; }, "hidden_size: expected 1 to 268435456, got -1");
  expect([](auto& c) { c.intermediate_size = 0; }, "intermediate_size");
  expect([](auto& c) { c.top_k = 0; }, "top_k");
  expect([](auto& c) { c.top_k = 9; }, "top_k: expected at most num_experts = 8, got 9");
  expect([](auto& c) { c.swiglu_limit = 0.0f; }, "swiglu_limit: expected a positive");
  expect([](auto& c) { c.swiglu_limit = std::nanf(""); }, "swiglu_limit");
  expect([](auto& c) { c.swiglu_alpha = -1.0f; }, "swiglu_alpha");
  expect([](auto& c) { c.swiglu_alpha = std::numeric_limits<float>::infinity(); }, "swiglu_alpha");
  expect(
      [](auto& c) {
        c.has_gate = false;
        c.swiglu_limit = 1.0f;
      },
      "swiglu_limit: expected unset without a gate");
  expect(
      [](auto& c) {
        c.has_gate = false;
        c.swiglu_alpha = 1.0f;
      },
      "swiglu_alpha: expected unset without a gate");
}

TEST(Support, SaysOkOrAllReasons) {
  EXPECT_EQ(to_string(Support{}), "ok");
  EXPECT_TRUE(Support{});
  const Support no{{"first", "second"}};
  EXPECT_EQ(to_string(no), "first; second");
  EXPECT_FALSE(no);
}

TEST(StatedBound, IsTheOneOfTheDtypeOrOfQuantisedActivations) {
  EXPECT_EQ(stated_bound(DType::kF32, StorageFormat::kBF16), 1e-5);
  EXPECT_EQ(stated_bound(DType::kBF16, StorageFormat::kF32), 4e-3);
  EXPECT_EQ(stated_bound(DType::kF16, StorageFormat::kF16), 1e-3);
  EXPECT_EQ(stated_bound(DType::kBF16, StorageFormat::kFp8Block), 6e-2);
  EXPECT_EQ(stated_bound(DType::kBF16, StorageFormat::kFp4), 4e-3);
  EXPECT_THROW(stated_bound(DType::kI32, StorageFormat::kF32), InvalidArgument);
}

TEST(EmulationBound, DependsOnWhatIsLeftToRound) {
  ExpertsQuery query;
  query.format = StorageFormat::kFp8Block;
  query.activation_scheme = ActivationScheme::kDynamic;
  EXPECT_EQ(emulation_bound(query, DType::kF32), 1e-3);
  EXPECT_EQ(emulation_bound(query, DType::kBF16), 3e-3);
  query.activation_scheme = ActivationScheme::kNone;
  EXPECT_EQ(emulation_bound(query, DType::kF32), 4e-3);  // h is a bfloat16
  query.compute_dtype = DType::kF32;
  EXPECT_EQ(emulation_bound(query, DType::kF32), 1e-5);
}

}  // namespace
}  // namespace cadre

// Every model folder under tests/data/models on every backend of the device against the values that
// Transformers gave (tests/data/make/make_models.py says how).
#include <gtest/gtest.h>

#include <map>
#include <string>
#include <tuple>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "golden/model_runs.h"
#include "support/compare.h"
#include "support/test_device.h"

namespace cadre::test {
namespace {

using Case = std::tuple<std::string, std::string>;  // fixture, backend

std::string case_name(const testing::TestParamInfo<Case>& info) {
  return std::get<0>(info.param) + "_" + std::get<1>(info.param);
}

class Golden : public testing::TestWithParam<Case> {
 protected:
  void SetUp() override {
    CADRE_SKIP_WITHOUT_DEVICE();
    expected_ = read_expected(fixture(name()) / "expected.safetensors");
    if (lacks_compressed_ops(name())) {
      EXPECT_THROW(load(DType::kF32), Unsupported);
      GTEST_SKIP() << "DeepSeek-V4 has no operations here yet; loading is refused";
    }
  }

  static std::string name() { return std::get<0>(GetParam()); }
  static std::unique_ptr<Model> load(DType dtype) {
    return Model::from_pretrained(fixture(name()).string(),
                                  {.experts_implementation = {{"", std::get<1>(GetParam())}},
                                   .device = test_device(),
                                   .dtype = dtype,
                                   .decode_experts = {DecodeExperts::kOff}});
  }
  double logits_error(const std::vector<float>& logits) const {
    return relative_error(std::span<const float>(logits),
                          std::span<const double>(expected_.logits));
  }

  Expected expected_;
};

TEST_P(Golden, LogitsInFloat32) {
  const auto model = load(DType::kF32);
  EXPECT_LE(logits_error(all_logits(*model, expected_.input_ids, expected_.batch, nullptr,
                                    expected_.images)),
            1e-4);
}

TEST_P(Golden, GreedyTokensInFloat32) {
  const auto model = load(DType::kF32);
  EXPECT_EQ(
      greedy(*model, expected_.input_ids, expected_.batch, expected_.num_greedy, expected_.images),
      expected_.greedy_ids);
}

// The weight of each expert of each row: slots may stand in any order.
std::map<std::pair<int64_t, int64_t>, double> weight_by_expert(const MoeCapture& moe,
                                                               int64_t top_k) {
  std::map<std::pair<int64_t, int64_t>, double> result;
  for (size_t i = 0; i < moe.top_k_index.size(); ++i) {
    result[{static_cast<int64_t>(i) / top_k, moe.top_k_index[i]}] = moe.top_k_weights[i];
  }
  return result;
}

TEST_P(Golden, CapturedExpertsInFloat32) {
  const auto model = load(DType::kF32);
  std::map<int64_t, MoeCapture> captures;
  const MoeHooks hooks = capture_into(captures);
  all_logits(*model, expected_.input_ids, expected_.batch, &hooks, expected_.images);
  const int64_t top_k = top_k_of(*model);
  ASSERT_EQ(captures.size(), expected_.moe.size());
  ASSERT_EQ(static_cast<int64_t>(captures.size()), model->info().num_moe_layers);
  for (const auto& [layer, stored] : expected_.moe) {
    const MoeCapture& moe = captures.at(layer);
    EXPECT_LE(relative_error(moe.hidden_states, stored.hidden_states), 1e-5) << "layer " << layer;
    EXPECT_LE(relative_error(moe.output, stored.output), 1e-5) << "layer " << layer;
    EXPECT_EQ(differing_rows(moe, stored, top_k), 0) << "layer " << layer;
    const auto weights = weight_by_expert(moe, top_k);
    for (const auto& [slot, weight] : weight_by_expert(stored, top_k)) {
      ASSERT_TRUE(weights.count(slot)) << "row " << slot.first << ", expert " << slot.second;
      EXPECT_NEAR(weights.at(slot), weight, 1e-5);
    }
  }
}

void check_16_bit(Model& model, const Expected& expected, double replayed_bound) {
  const MoeHooks replay = replay_of(expected.moe);
  const auto error = [&](const std::vector<float>& logits) {
    return relative_error(std::span<const float>(logits), std::span<const double>(expected.logits));
  };
  const auto logits = [&](const MoeHooks& hooks) {
    return all_logits(model, expected.input_ids, expected.batch, &hooks, expected.images);
  };
  EXPECT_LE(error(logits(replay)), replayed_bound);

  std::map<int64_t, MoeCapture> captures;
  const MoeHooks capture = capture_into(captures);
  const double free_error = error(logits(capture));
  int64_t differing = 0;
  for (const auto& [layer, stored] : expected.moe) {
    differing += differing_rows(captures.at(layer), stored, top_k_of(model));
  }
  testing::Test::RecordProperty("differently_routed_rows", std::to_string(differing));
  EXPECT_LE(free_error, 2e-1) << differing << " rows were routed differently";
}

// An indexer that leaves most entries out is a router that cannot be replayed: its near-ties flip.
// What 16 bit are worth without it: DeepseekV4.SixteenBitsWithNothingLeftOut.
double bound_of(const std::string& name, double bound) {
  return name == "deepseek_v4_hub" ? 2e-1 : bound;
}

TEST_P(Golden, LogitsInBfloat16) {
  const auto model = load(DType::kBF16);
  // The smaller fixture's indexer leaves out more than half of the entries too. Its picks happen to
  // hold on the CPU; on an H200 eager and batched_mm were at 1.56e-2.
  const bool flips = name() == "deepseek_v4" && on_gpu();
  check_16_bit(*model, expected_, bound_of(name(), flips ? 2e-2 : 1.5e-2));
}

TEST_P(Golden, LogitsInFloat16) {
  const auto model = load(DType::kF16);
  check_16_bit(*model, expected_, bound_of(name(), 2e-3));
}

INSTANTIATE_TEST_SUITE_P(Models, Golden,
                         testing::Combine(testing::ValuesIn(fixture_names()),
                                          testing::Values("eager", "batched_mm", "grouped_mm")),
                         case_name);

}  // namespace
}  // namespace cadre::test

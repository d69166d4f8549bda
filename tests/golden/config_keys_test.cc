// Each config key that changes numbers does change them, so that the golden values prove something
// about it; spellings and defaults that mean the same give the same bits.
#include <gtest/gtest.h>

#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include "cadre/model.h"
#include "golden/model_runs.h"
#include "models/damaged_checkpoint.h"
#include "models/text_config.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

struct Change {
  const char* fixture;
  const char* key;
  Json value;  // discarded: the key is removed
};

const Json kAbsent = Json(Json::value_t::discarded);

std::vector<float> logits_with(const DamagedCheckpoint& checkpoint, const Expected& expected) {
  const auto model = Model::from_pretrained(checkpoint.write(), {.dtype = DType::kF32});
  return all_logits(*model, expected.input_ids, expected.batch);
}

// Relative difference that the change makes.
double effect(const Change& change) {
  const Expected expected = read_expected(fixture(change.fixture) / "expected.safetensors");
  DamagedCheckpoint checkpoint(change.fixture);
  const std::vector<float> before = logits_with(checkpoint, expected);
  checkpoint.config.erase(change.key);
  if (!change.value.is_discarded()) checkpoint.config[change.key] = change.value;
  return relative_error(logits_with(checkpoint, expected), before);
}

TEST(ConfigKeys, ThatMatterChangeTheLogits) {
  const std::vector<Change> changes = {
      {"qwen2_moe_sliding_window", "sliding_window", 6},
      {"qwen2_moe_sliding_window", "use_sliding_window", false},
      {"qwen2_moe_sliding_window",
       "layer_types",
       {"full_attention", "full_attention", "sliding_attention", "full_attention"}},
      {"qwen2_moe_dense_layers", "norm_topk_prob", false},
      {"qwen2_moe_older_config", "rope_theta", 10000},
      {"qwen2_moe_packed", "norm_topk_prob", true},
      {"qwen2_moe_packed", "num_experts_per_tok", 3},
      {"qwen3_moe_sliding_window", "sliding_window", 5},
      {"qwen3_moe_sliding_window", "use_sliding_window", false},
      {"qwen3_moe_older_config", "rope_scaling", nullptr},
      {"qwen3_moe_older_config", "norm_topk_prob", false},
      {"qwen3_moe_yarn", "hidden_act", "silu"},
      {"qwen3_moe_yarn", "rope_parameters", {{"rope_theta", 10000}}},
      {"mixtral_sliding_window", "sliding_window", nullptr},
      {"mixtral_older_config", "rope_theta", kAbsent},
      {"mixtral", "rms_norm_eps", 0.1},
      {"olmoe_clip_qkv", "clip_qkv", nullptr},
      {"olmoe_clip_qkv", "norm_topk_prob", false},
      {"olmoe_older_config", "rope_scaling", nullptr},
      {"deepseek_v2_groups_yarn", "topk_method", "greedy"},
      {"deepseek_v2_groups_yarn", "topk_group", 4},
      {"deepseek_v2_groups_yarn", "routed_scaling_factor", 1},
      {"deepseek_v2_groups_yarn", "rope_parameters", {{"rope_theta", 10000}}},
      {"deepseek_v3_older_config", "rope_scaling", nullptr},
      {"deepseek_v3_older_config", "rope_interleave", false},
      {"deepseek_v3_older_config", "norm_topk_prob", false},
      {"deepseek_v3_older_config", "n_group", 2},
      {"deepseek_v3_plain_q", "rope_interleave", true},
      {"deepseek_v3_plain_q", "norm_topk_prob", true},
      {"deepseek_v4_own_names", "hc_eps", 0.3},
      {"deepseek_v4_own_names", "hc_sinkhorn_iters", 20},
      {"deepseek_v4_own_names", "sliding_window", 5},
      {"deepseek_v4_own_names", "swiglu_limit", 0.5},
      {"deepseek_v4_own_names", "routed_scaling_factor", 1},
      {"deepseek_v4_own_names", "scoring_func", "sqrtsoftplus"},
      {"deepseek_v4_own_names",
       "rope_parameters",
       {{"main", {{"rope_theta", 10}}}, {"compress", {{"rope_theta", 160000}}}}},
      {"deepseek_v4_own_names",
       "rope_parameters",
       {{"main", {{"rope_theta", 10000}}}, {"compress", {{"rope_theta", 10}}}}},
      {"deepseek_v4_hub", "index_topk", 64},
      {"deepseek_v4_hub", "compress_rope_theta", 500},
      {"deepseek_v4_hub", "rope_scaling", nullptr},
      {"deepseek_v4_hub", "qk_rope_head_dim", 8},
      {"deepseek_v4_hub", "swiglu_limit", nullptr},
      {"glm4_moe_groups", "n_group", 2},
      {"glm4_moe_groups", "topk_group", 3},
      {"glm4_moe_groups", "norm_topk_prob", true},
      {"glm4_moe_groups", "routed_scaling_factor", 1.0},
      {"glm4_moe_older_config", "partial_rotary_factor", 0.25},
      {"granitemoe_older_config", "embedding_multiplier", kAbsent},
      {"granitemoe_older_config", "residual_multiplier", kAbsent},
      {"granitemoe_older_config", "attention_multiplier", kAbsent},
      {"granitemoe_older_config", "logits_scaling", kAbsent},
      {"minimax_m2_packed", "rope_parameters", nullptr},
      {"minimax_m2_older_config", "rotary_dim", 8},
      {"gpt_oss_long", "sliding_window", 19},
      {"gpt_oss_long", "layer_types", nullptr},  // the first layer's is the short one then
      {"gpt_oss_long", "rope_scaling", {{"type", "default"}}},
      {"qwen3_moe_dynamic",
       "rope_parameters",
       {{"rope_type", "dynamic"}, {"rope_theta", 100.0}, {"factor", 3.0}}},
      {"qwen3_moe_proportional", "rope_parameters", {{"rope_theta", 100.0}}},
  };
  for (const Change& change : changes) {
    EXPECT_GT(effect(change), 1e-3) << change.fixture << ": " << change.key;
  }
}

TEST(ConfigKeys, OfEqualMeaningGiveEqualBits) {
  const std::vector<Change> changes = {
      {"qwen2_moe_sliding_window", "layer_types", kAbsent},  // the rule gives the same layers
      {"qwen2_moe_packed", "mlp_only_layers", nullptr},
      {"qwen2_moe_packed", "sliding_window", kAbsent},
      {"qwen2_moe_packed", "rms_norm_eps", kAbsent},
      {"qwen2_moe_packed", "qkv_bias", kAbsent},
      {"qwen2_moe_packed", "num_key_value_heads", 2},
      {"qwen3_moe", "sliding_window", 3},  // use_sliding_window is false
      {"qwen3_moe", "attention_bias", kAbsent},
      {"qwen3_moe", "decoder_sparse_step", kAbsent},
      {"mixtral", "sliding_window", 0},
      {"mixtral", "head_dim", 16},
      {"mixtral", "rope_parameters", kAbsent},  // Mixtral's own default theta
      {"olmoe", "clip_qkv", kAbsent},
      {"olmoe", "num_key_value_heads", nullptr},
      {"olmoe", "hidden_act", "swish"},
      {"olmoe_older_config", "norm_topk_prob", kAbsent},
      {"deepseek_v2_groups_yarn", "norm_topk_prob", false},  // no effect in this family
      {"deepseek_v2_groups_yarn", "head_dim", 8},            // qk_rope_head_dim counts
      {"deepseek_v2_older_config", "n_group", 4},            // greedy
      {"deepseek_v2_older_config", "first_k_dense_replace", 1},
      {"deepseek_v3_older_config", "num_key_value_heads", nullptr},
      {"deepseek_v3_older_config", "norm_topk_prob", kAbsent},
      {"deepseek_v3_older_config", "routed_scaling_factor", kAbsent},
      {"deepseek_v4", "norm_topk_prob", false},  // always normalised
      {"deepseek_v4", "num_key_value_heads", kAbsent},
      {"deepseek_v4", "partial_rotary_factor", kAbsent},  // qk_rope_head_dim says the same
      {"deepseek_v4", "hc_eps", kAbsent},
      {"deepseek_v4_own_names", "rope_parameters", nullptr},
      {"deepseek_v4_hub", "hc_mult", kAbsent},
      {"deepseek_v4_hub", "hc_sinkhorn_iters", kAbsent},
      {"deepseek_v4_hub", "compress_rope_theta", kAbsent},
      {"deepseek_v4_hub", "compress_ratios", {4, 128, 4}},
      {"deepseek_v4_hub", "scoring_func", kAbsent},
      {"glm4_moe_older_config", "partial_rotary_factor", kAbsent},
      {"glm4_moe_older_config", "n_group", kAbsent},
      {"glm4_moe_older_config", "topk_group", nullptr},
      {"glm4_moe_older_config", "norm_topk_prob", kAbsent},
      {"glm4_moe_older_config", "routed_scaling_factor", kAbsent},
      {"glm4_moe_older_config", "n_shared_experts", kAbsent},
      {"glm4_moe_older_config", "first_k_dense_replace", kAbsent},
      {"glm4_moe_older_config", "rms_norm_eps", kAbsent},
      {"granitemoe_older_config", "attention_bias", kAbsent},
      {"granitemoe_older_config", "rms_norm_eps", kAbsent},
      {"minimax_m2_older_config", "rope_theta", kAbsent},
      {"minimax_m2_older_config", "rms_norm_eps", kAbsent},
      {"minimax_m2_packed", "rotary_dim", 4},  // partial_rotary_factor goes before it
      {"gpt_oss_defaults", "sliding_window", 128},
      {"gpt_oss_defaults", "swiglu_limit", 7.0},
      {"gpt_oss_defaults", "rms_norm_eps", kAbsent},
      {"gpt_oss_defaults",
       "layer_types",
       {"sliding_attention", "full_attention", "sliding_attention"}},
      {"gpt_oss_defaults", "rope_scaling", nullptr},
      {"gpt_oss_long", "attention_bias", kAbsent},
      {"gpt_oss_long", "rope_scaling", nullptr},  // the family's own parameters are the same
      {"qwen3_moe_dynamic", "original_max_position_embeddings", 8},  // not this type's key
  };
  for (const Change& change : changes) {
    EXPECT_EQ(effect(change), 0) << change.fixture << ": " << change.key;
  }
}

// The fixture's own rope_parameters are yarn, theta 10000, factor 4, 32 positions out of 128; its
// logits are Transformers'. Checked with Transformers 5.17:
// tests/data/make/check_rope_spellings.py.
TEST(ConfigKeys, AllSpellingsOfRopeParametersAreRead) {
  const Expected expected = read_expected(fixture("qwen3_moe_yarn") / "expected.safetensors");
  const DamagedCheckpoint original("qwen3_moe_yarn");
  const std::vector<float> before = logits_with(original, expected);
  const Json spellings = read_json_file(std::filesystem::path(CADRE_TEST_DATA) / "models" /
                                        "rope_spellings.json")["equal"];
  ASSERT_GE(spellings.size(), 10u);
  for (const auto& [what, patch] : spellings.items()) {
    DamagedCheckpoint checkpoint("qwen3_moe_yarn");
    checkpoint.config.erase("rope_parameters");
    checkpoint.config.update(patch);
    EXPECT_EQ(logits_with(checkpoint, expected), before) << what;
  }
}

// A missing key and null differ here, only by their window of 4096: longer than the fixtures'
// texts.
TEST(ConfigKeys, ANullSlidingWindowIsNoneAndAMissingOneIsTransformersDefault) {
  const auto window = [](Json config) {
    return read_qwen_sliding_window(ConfigReader(std::move(config), "config.json"));
  };
  EXPECT_EQ(window({{"use_sliding_window", true}, {"sliding_window", nullptr}}), 0);
  EXPECT_EQ(window({{"use_sliding_window", true}}), 4096);
  EXPECT_EQ(window({{"use_sliding_window", true}, {"sliding_window", 7}}), 7);
  EXPECT_EQ(window({{"use_sliding_window", false}, {"sliding_window", 7}}), 0);
  EXPECT_EQ(window(Json{{"sliding_window", 7}}), 0);
}

TEST(ConfigKeys, ANullSlidingWindowGivesTheLogitsOfNoWindow) {
  for (const char* name : {"qwen2_moe_sliding_window", "qwen3_moe_sliding_window"}) {
    const Expected expected = read_expected(fixture(name) / "expected.safetensors");
    DamagedCheckpoint checkpoint(name);
    checkpoint.config["sliding_window"] = nullptr;
    const std::vector<float> null = logits_with(checkpoint, expected);
    checkpoint.config["use_sliding_window"] = false;
    EXPECT_EQ(logits_with(checkpoint, expected), null) << name;
  }
}

TEST(ConfigKeys, RotaryDimOfMiniMaxIsThePartThatIsRotated) {
  const Expected expected = read_expected(fixture("minimax_m2_packed") / "expected.safetensors");
  DamagedCheckpoint checkpoint("minimax_m2_packed");
  const std::vector<float> half = logits_with(checkpoint, expected);
  checkpoint.config["rope_parameters"].erase("partial_rotary_factor");
  checkpoint.config["rotary_dim"] = 8;  // of 16
  EXPECT_EQ(logits_with(checkpoint, expected), half);
}

TEST(ConfigKeys, AllNamesOfTheNumberOfExpertsAreRead) {
  const Expected expected = read_expected(fixture("qwen3_moe") / "expected.safetensors");
  DamagedCheckpoint checkpoint("qwen3_moe");
  const std::vector<float> before = logits_with(checkpoint, expected);
  checkpoint.config.erase("num_local_experts");
  for (const char* name : {"num_experts", "n_routed_experts"}) {
    checkpoint.config[name] = 8;
    EXPECT_EQ(logits_with(checkpoint, expected), before) << name;
    checkpoint.config.erase(name);
  }
}

}  // namespace
}  // namespace cadre::test

// Every fault that loading can meet: the right error family, and a message that names the parts.
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "core/device_runtime.h"
#include "models/damaged_checkpoint.h"

namespace cadre::test {
namespace {

using testing::Test;

constexpr const char* kDown = "model.layers.1.mlp.experts.3.down_proj.weight";

template <typename E>
std::string load_error(const std::string& folder, const LoadOptions& options = {}) {
  return message_of<E>([&] { Model::from_pretrained(folder, options); });
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in:\n"
                                                     << message;
  }
}

TEST(LoadFaults, MissingTensorIsNamedWithItsShape) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.tensors.erase(kDown);
  const std::string folder = checkpoint.write();
  expect_parts(load_error<CheckpointError>(folder), {"1 missing", kDown, "[64, 40]", folder});
}

TEST(LoadFaults, LeftOverTensorIsNamed) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.put("model.layers.2.eh_proj.weight", DType::kBF16, {3, 5});
  expect_parts(
      load_error<CheckpointError>(checkpoint.write()),
      {"1 left over", "model.layers.2.eh_proj.weight", "[3, 5]", "bfloat16", "model.safetensors"});
}

TEST(LoadFaults, WrongShapeIsNamedWithBothShapes) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.put(kDown, DType::kBF16, {40, 64});
  expect_parts(
      load_error<CheckpointError>(checkpoint.write()),
      {"1 unfit", kDown, "expected shape [64, 40]", "found [40, 64]", "model.safetensors"});
}

TEST(LoadFaults, WrongDtypeIsNamedWithBoth) {
  for (const DType dtype : {DType::kI8, DType::kF64, DType::kF8E4M3}) {
    DamagedCheckpoint checkpoint("qwen3_moe");
    checkpoint.put(kDown, dtype, {64, 40});
    expect_parts(load_error<CheckpointError>(checkpoint.write()),
                 {kDown, "expected float32, bfloat16 or float16", std::string(name_of(dtype))});
  }
}

TEST(LoadFaults, ExpertsOfOneLayerMustShareADtype) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.put(kDown, DType::kF32, {64, 40});
  expect_parts(load_error<CheckpointError>(checkpoint.write()),
               {kDown, "expected bfloat16", "found float32"});
}

TEST(LoadFaults, PackedExpertsMustShareADtype) {
  DamagedCheckpoint checkpoint("qwen3_moe_packed");
  checkpoint.put("model.layers.0.mlp.experts.down_proj", DType::kF32, {6, 32, 24});
  expect_parts(load_error<CheckpointError>(checkpoint.write()),
               {"model.layers.0.mlp.experts.down_proj", "expected bfloat16", "found float32"});
}

TEST(LoadFaults, LayersMustShareAFormat) {
  DamagedCheckpoint checkpoint("qwen3_moe_packed");
  checkpoint.put("model.layers.1.mlp.experts.gate_up_proj", DType::kF32, {6, 48, 32});
  checkpoint.put("model.layers.1.mlp.experts.down_proj", DType::kF32, {6, 32, 24});
  expect_parts(load_error<CheckpointError>(checkpoint.write()),
               {"model.layers.1.mlp.experts", "float32", "bfloat16"});
}

TEST(LoadFaults, BiasesOfExpertsMustShareADtype) {
  DamagedCheckpoint checkpoint("gpt_oss");
  checkpoint.put("model.layers.1.mlp.experts.down_proj_bias", DType::kF32, {8, 64});
  expect_parts(load_error<CheckpointError>(checkpoint.write()),
               {"model.layers.1.mlp.experts.down_proj_bias", "expected bfloat16", "found float32"});
}

TEST(LoadFaults, PackedWithoutDownProjIsMissing) {
  DamagedCheckpoint checkpoint("qwen3_moe_packed");
  checkpoint.tensors.erase("model.layers.0.mlp.experts.down_proj");
  expect_parts(load_error<CheckpointError>(checkpoint.write()),
               {"model.layers.0.mlp.experts.down_proj", "[6, 32, 24]"});
}

TEST(LoadFaults, TensorInTwoShardsIsNamed) {
  const std::string norm = "model.norm.weight";
  DamagedCheckpoint checkpoint("qwen3_moe");
  const std::vector<NamedTensor> second = {{norm, checkpoint.tensors.at(norm)},
                                           {kDown, checkpoint.tensors.at(kDown)}};
  checkpoint.tensors.erase(norm);
  checkpoint.write();
  const TempDir& folder = checkpoint.folder();
  std::filesystem::rename(folder / "model.safetensors",
                          folder / "model-00001-of-00002.safetensors");
  write_safetensors(folder / "model-00002-of-00002.safetensors", second);
  Json index;
  for (const auto& entry : checkpoint.tensors) {
    index["weight_map"][entry.first] = "model-00001-of-00002.safetensors";
  }
  index["weight_map"][norm] = "model-00002-of-00002.safetensors";
  folder.write("model.safetensors.index.json", index.dump());
  expect_parts(load_error<CheckpointError>(folder.path().string()), {kDown});
}

TEST(LoadFaults, ManyFaultsAreCountedAndCutShort) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  for (auto it = checkpoint.tensors.begin(); it != checkpoint.tensors.end();) {
    it = it->first.find("layers.1") != std::string::npos ? checkpoint.tensors.erase(it) : ++it;
  }
  expect_parts(load_error<CheckpointError>(checkpoint.write()), {"33 missing", "and 23 more"});
}

TEST(LoadFaults, UnknownArchitectureListsTheKnownOnes) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.config["architectures"] = {"BertModel"};
  expect_parts(load_error<Unsupported>(checkpoint.write()),
               {"\"BertModel\"", "config.json", "Qwen2MoeForCausalLM", "Qwen3MoeForCausalLM",
                "MixtralForCausalLM", "OlmoeForCausalLM"});
}

TEST(LoadFaults, WithoutArchitecturesTheModelTypeDecides) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.config.erase("architectures");
  EXPECT_EQ(Model::from_pretrained(checkpoint.write())->info().architecture, "Qwen3MoeForCausalLM");
  checkpoint.config["model_type"] = "bert";
  expect_parts(load_error<Unsupported>(checkpoint.write()), {"\"bert\"", "qwen3_moe"});
  checkpoint.config.erase("model_type");
  expect_parts(load_error<CheckpointError>(checkpoint.write()), {"architectures", "model_type"});
}

// cuda:1000 is on no machine: in a build without CUDA nothing serves it, else there is none.
TEST(LoadFaults, DevicesOfThisBuildAndMachineOnly) {
  const std::string folder = DamagedCheckpoint("qwen3_moe").write();
  const LoadOptions options = {.device = {DeviceType::kCuda, 1000}};
  if (find_device_runtime(DeviceType::kCuda) == nullptr) {
    expect_parts(load_error<Unsupported>(folder, options), {"cuda", "available: cpu"});
  } else {
    expect_parts(load_error<DeviceError>(folder, options), {"cuda:1000"});
  }
}

TEST(LoadFaults, OptionsAreChecked) {
  const DamagedCheckpoint checkpoint("qwen3_moe");
  const std::string folder = checkpoint.write();
  expect_parts(load_error<InvalidArgument>(folder, {.dtype = DType::kI8}),
               {"dtype", "float32, bfloat16 or float16", "int8"});
  expect_parts(load_error<InvalidArgument>(folder, {.num_threads = -1}), {"threads", "-1"});
}

struct ConfigFault {
  const char* fixture;
  const char* key;
  Json value;  // discarded: the key is removed
  std::vector<std::string> parts;
};

const Json kAbsent = Json(Json::value_t::discarded);

Json linear(double factor) { return {{"rope_type", "linear"}, {"factor", factor}}; }

// Sound but for one key.
Json yarn(const char* key, const Json& value) {
  Json result = {{"rope_type", "yarn"}, {"factor", 4.0}, {"rope_theta", 10000.0}};
  result.erase(key);
  if (!value.is_discarded()) result[key] = value;
  return result;
}

Json llama3(double low, double high) {
  return {{"type", "llama3"}, {"factor", 8}, {"low_freq_factor", low}, {"high_freq_factor", high}};
}

TEST(LoadFaults, ConfigValuesThatCannotBe) {
  const std::vector<ConfigFault> faults = {
      {"qwen3_moe", "num_experts_per_tok", 9, {"num_experts_per_tok (9)", "experts (8)"}},
      {"qwen3_moe", "num_experts_per_tok", 0, {"num_experts_per_tok"}},
      {"qwen3_moe", "num_local_experts", 0, {"num_local_experts"}},
      {"qwen3_moe", "num_local_experts", Json(Json::value_t::discarded), {"num_experts"}},
      {"qwen3_moe", "hidden_size", "64", {"hidden_size"}},
      {"qwen3_moe", "hidden_size", -64, {"hidden_size"}},
      {"qwen3_moe", "hidden_size", Json(Json::value_t::discarded), {"hidden_size"}},
      {"qwen3_moe", "hidden_size", 1e300, {"hidden_size"}},
      {"qwen3_moe", "moe_intermediate_size", int64_t{1} << 62, {"moe_intermediate_size"}},
      {"qwen3_moe", "vocab_size", 0, {"vocab_size"}},
      {"qwen3_moe", "num_hidden_layers", 0, {"num_hidden_layers"}},
      {"qwen3_moe", "num_key_value_heads", 3, {"num_key_value_heads (3)"}},
      {"qwen3_moe", "head_dim", 31, {"head_dim", "31"}},
      {"qwen3_moe", "rms_norm_eps", 0, {"rms_norm_eps"}},
      {"qwen3_moe", "decoder_sparse_step", 0, {"decoder_sparse_step"}},
      {"qwen3_moe", "mlp_only_layers", {2}, {"mlp_only_layers", "2"}},
      {"qwen3_moe", "norm_topk_prob", "yes", {"norm_topk_prob"}},
      {"qwen3_moe", "dtype", "float8_e4m3fn", {"dtype", "float8_e4m3fn"}},
      {"qwen3_moe", "eos_token_id", -1, {"eos_token_id"}},
      {"qwen3_moe", "rope_parameters", {{"rope_type", "linear"}}, {"factor"}},
      {"qwen3_moe", "rope_parameters", {{"rope_theta", 0}}, {"rope_theta"}},
      {"qwen3_moe", "rope_parameters", {{"rope_type", "linear"}, {"factor", -1}}, {"factor"}},
      {"qwen2_moe_older_config", "rope_theta", -1, {"rope_theta", "1e-06 to 1e+30", "-1"}},
      {"qwen2_moe_older_config", "rope_theta", 1e300, {"rope_theta", "1e-06 to 1e+30"}},
      {"qwen3_moe", "rope_parameters", {{"rope_theta", -5}}, {"rope_parameters.rope_theta", "-5"}},
      {"qwen3_moe", "rope_scaling", linear(1e-45), {"rope_scaling.factor", "1e-06 to 1e+06"}},
      {"qwen3_moe", "rope_scaling", linear(1e300), {"rope_scaling.factor", "1e+300"}},
      {"qwen3_moe", "rope_scaling", yarn("factor", 0), {"rope_scaling.factor"}},
      {"qwen3_moe", "rope_scaling", yarn("factor", kAbsent), {"rope_scaling.factor", "missing"}},
      {"qwen3_moe", "rope_scaling", yarn("rope_theta", 1), {"rope_theta", "above 1"}},
      {"qwen3_moe", "rope_scaling", yarn("rope_theta", 0.5), {"rope_theta", "above 1"}},
      {"qwen3_moe", "rope_scaling", yarn("attention_factor", 0), {"rope_scaling.attention_factor"}},
      {"qwen3_moe", "rope_scaling", yarn("attention_factor", -1), {"attention_factor", "1e-06 to"}},
      {"qwen3_moe", "rope_scaling", yarn("attention_factor", 1e39), {"attention_factor"}},
      {"qwen3_moe", "rope_scaling", yarn("beta_fast", 0), {"beta_fast"}},
      {"qwen3_moe", "rope_scaling", yarn("beta_slow", -1), {"beta_slow"}},
      {"qwen3_moe", "rope_scaling", yarn("mscale", -1), {"mscale", "0 to 1e+06"}},
      {"qwen3_moe", "rope_scaling", yarn("mscale_all_dim", 1e40), {"mscale_all_dim"}},
      {"qwen3_moe",
       "rope_scaling",
       yarn("original_max_position_embeddings", 0),
       {"rope_scaling.original_max_position_embeddings", "1 to"}},
      {"qwen3_moe", "rope_scaling", llama3(8, 4), {"rope_scaling.low_freq_factor", "(4)", "8"}},
      {"qwen3_moe", "rope_scaling", llama3(4, 4), {"low_freq_factor", "below high_freq_factor"}},
      {"qwen3_moe", "rope_scaling", llama3(0, 4), {"rope_scaling.low_freq_factor"}},
      {"qwen3_moe", "rope_scaling", llama3(1, 1e300), {"rope_scaling.high_freq_factor"}},
      {"qwen2_moe_sliding_window", "layer_types", {"full_attention"}, {"layer_types", "4"}},
      {"olmoe_clip_qkv", "clip_qkv", -1, {"clip_qkv"}},
      {"glm4_moe",
       "rope_parameters",
       {{"partial_rotary_factor", 0.6}},
       {"partial_rotary_factor", "got 19"}},
      {"glm4_moe", "rope_parameters", {{"partial_rotary_factor", 1.5}}, {"1e-06 to 1", "1.5"}},
      {"glm4_moe", "n_shared_experts", -1, {"n_shared_experts"}},
      {"deepseek_v3", "kv_lora_rank", kAbsent, {"kv_lora_rank"}},
      {"deepseek_v3", "q_lora_rank", 0, {"q_lora_rank"}},
      {"deepseek_v3", "v_head_dim", -1, {"v_head_dim"}},
      {"deepseek_v3", "qk_nope_head_dim", "24", {"qk_nope_head_dim"}},
      {"deepseek_v3", "qk_rope_head_dim", 15, {"qk_rope_head_dim", "even", "15"}},
      {"deepseek_v2", "num_key_value_heads", 2, {"num_key_value_heads", "(4)", "2"}},
      {"granitemoe", "residual_multiplier", 0, {"residual_multiplier", "1e-06 to 1e+06"}},
      {"granitemoe", "logits_scaling", -1, {"logits_scaling", "-1"}},
      {"qwen3_moe_dynamic",
       "rope_parameters",
       {{"rope_type", "dynamic"}},
       {"rope_parameters.factor"}},
      {"qwen3_moe_dynamic", "head_dim", 2, {"at least 4", "got 2"}},
      {"minimax_m2", "rotary_dim", 64, {"partial_rotary_factor", "1e-06 to 1", "got 2"}},
      {"mixtral", "num_attention_heads", 5, {"num_attention_heads"}},
  };
  for (const ConfigFault& fault : faults) {
    SCOPED_TRACE(std::string(fault.fixture) + ": " + fault.key + " = " +
                 (fault.value.is_discarded() ? "absent" : fault.value.dump()));
    DamagedCheckpoint checkpoint(fault.fixture);
    checkpoint.config.erase(fault.key);
    if (!fault.value.is_discarded()) checkpoint.config[fault.key] = fault.value;
    if (std::string(fault.key) == "num_attention_heads")
      checkpoint.config["num_key_value_heads"] = 1;
    const std::string message = load_error<CheckpointError>(checkpoint.write());
    expect_parts(message, fault.parts);
    expect_parts(message, {"config.json"});
  }
}

TEST(LoadFaults, ConfigValuesThatAreNotServed) {
  DamagedCheckpoint rope("qwen3_moe");
  rope.config["rope_parameters"] = {{"rope_type", "longrope"}, {"factor", 2}};
  expect_parts(load_error<Unsupported>(rope.write()), {"\"longrope\"", "default, dynamic"});
  rope.config["rope_parameters"] = {{"rope_type", "default"}, {"partial_rotary_factor", 0.5}};
  expect_parts(load_error<Unsupported>(rope.write()), {"partial_rotary_factor", "0.5"});
  rope.config["rope_parameters"] = {{"full_attention", {{"rope_type", "default"}}}};
  expect_parts(load_error<Unsupported>(rope.write()),
               {"config.json", "rope_parameters.full_attention", "one set for all layers"});
  rope.config["rope_parameters"] = nullptr;
  rope.config["partial_rotary_factor"] = 0.25;
  expect_parts(load_error<Unsupported>(rope.write()), {"partial_rotary_factor", "0.25"});
  DamagedCheckpoint gpt_oss("gpt_oss");
  gpt_oss.config["swiglu_limit"] = 6.5;
  expect_parts(load_error<Unsupported>(gpt_oss.write()), {"config.json", "swiglu_limit 6.5"});
  gpt_oss.config.erase("swiglu_limit");
  gpt_oss.config["layer_types"] = {"full_attention", "chunked_attention"};
  expect_parts(load_error<Unsupported>(gpt_oss.write()), {"layer_types", "chunked_attention"});
  DamagedCheckpoint activation("qwen3_moe");
  activation.config["hidden_act"] = "xielu";
  expect_parts(load_error<Unsupported>(activation.write()), {"xielu"});
  DamagedCheckpoint router("deepseek_v2");
  router.config["topk_method"] = "noaux_tc";
  expect_parts(load_error<Unsupported>(router.write()),
               {"topk_method", "\"noaux_tc\"", "greedy, group_limited_greedy"});
  DamagedCheckpoint layers("deepseek_v3");
  layers.config["moe_layer_freq"] = 2;
  expect_parts(load_error<Unsupported>(layers.write()), {"moe_layer_freq 2", "supported: 1"});
  DamagedCheckpoint mlp("deepseek_v2");
  mlp.config["mlp_bias"] = true;
  expect_parts(load_error<Unsupported>(mlp.write()), {"mlp_bias"});
}

TEST(LoadFaults, AConfigOfAbsurdSizeFailsSoon) {
  for (const char* key : {"num_hidden_layers", "num_local_experts"}) {
    DamagedCheckpoint checkpoint("qwen3_moe");
    checkpoint.config[key] = std::string(key) == "num_hidden_layers" ? 100000 : 200000000;
    expect_parts(load_error<CheckpointError>(checkpoint.write()), {"missing"});
  }
}

TEST(LoadFaults, DerivedAndTiedTensorsAreNoFaults) {
  DamagedCheckpoint checkpoint("qwen3_moe_packed");  // tied
  checkpoint.put("model.layers.0.self_attn.rotary_emb.inv_freq", DType::kF32, {5});
  checkpoint.put("lm_head.weight", DType::kBF16, {160, 32});
  EXPECT_NO_THROW(Model::from_pretrained(checkpoint.write()));
}

TEST(LoadFaults, LayersForMultiTokenPredictionAreNotNeeded) {
  DamagedCheckpoint checkpoint("glm4_moe");  // 2 layers, num_nextn_predict_layers 1
  checkpoint.put("model.layers.2.eh_proj.weight", DType::kBF16, {64, 128});
  const std::string folder = checkpoint.write();
  EXPECT_NO_THROW(Model::from_pretrained(folder));
  const ModelReport report = inspect_model(folder);
  EXPECT_TRUE(report.left_over.empty());
  ASSERT_EQ(report.ignored.size(), 1u);
  EXPECT_EQ(report.ignored[0].name, "model.layers.2.eh_proj.weight");
  EXPECT_EQ(report.bytes_per_part.at("unused"), size_t{64} * 128 * 2);
}

TEST(LoadFaults, LayersBeyondThoseForMultiTokenPredictionAreLeftOver) {
  DamagedCheckpoint checkpoint("glm4_moe");
  checkpoint.put("model.layers.3.eh_proj.weight", DType::kBF16, {64, 128});
  expect_parts(load_error<CheckpointError>(checkpoint.write()),
               {"1 left over", "model.layers.3.eh_proj.weight"});
  checkpoint.config["num_nextn_predict_layers"] = 2;
  EXPECT_NO_THROW(Model::from_pretrained(checkpoint.write()));
  checkpoint.config.erase("num_nextn_predict_layers");
  checkpoint.config["num_mtp_layers"] = 2;
  EXPECT_NO_THROW(Model::from_pretrained(checkpoint.write()));
}

TEST(LoadFaults, ARenamedTensorOfLatentAttentionIsNamed) {
  for (const char* part : {"kv_a_proj_with_mqa", "kv_a_layernorm", "kv_b_proj", "q_a_layernorm"}) {
    DamagedCheckpoint checkpoint("deepseek_v3");
    const std::string name = std::string("model.layers.1.self_attn.") + part + ".weight";
    auto node = checkpoint.tensors.extract(name);
    ASSERT_FALSE(node.empty()) << name;
    node.key() = name + "2";
    checkpoint.tensors.insert(std::move(node));
    expect_parts(load_error<CheckpointError>(checkpoint.write()), {name, name + "2"});
  }
}

TEST(LoadFaults, RouterGroupsMustFitTheExperts) {
  DamagedCheckpoint checkpoint("glm4_moe");  // 16 experts, 4 a token
  checkpoint.config["n_group"] = 3;
  expect_parts(load_error<CheckpointError>(checkpoint.write()), {"config.json", "n_group", "3"});
  checkpoint.config["n_group"] = 8;
  expect_parts(load_error<CheckpointError>(checkpoint.write()), {"topk_group", "top_k = 4"});
}

TEST(LoadFaults, WithoutDtypeTheWeightsDecide) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.config.erase("dtype");
  EXPECT_EQ(Model::from_pretrained(checkpoint.write())->info().compute_dtype, DType::kBF16);
  checkpoint.config["torch_dtype"] = "float16";
  EXPECT_EQ(Model::from_pretrained(checkpoint.write())->info().compute_dtype, DType::kF16);
}

TEST(Inspect, ListsFaultsInsteadOfThrowing) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.tensors.erase(kDown);
  checkpoint.put("model.norm.weight", DType::kBF16, {63});
  checkpoint.put("mtp.head", DType::kF32, {2, 2});
  const ModelReport report = inspect_model(checkpoint.write());
  ASSERT_EQ(report.missing.size(), 2u);
  expect_parts(report.missing[0], {kDown, "[64, 40]"});
  expect_parts(report.missing[1], {"model.norm.weight", "[64]", "[63]"});
  ASSERT_EQ(report.left_over.size(), 1u);
  EXPECT_EQ(report.left_over[0].name, "mtp.head");
  EXPECT_EQ(report.left_over[0].part, "unused");
  EXPECT_EQ(report.left_over[0].bytes, 16u);
}

TEST(Inspect, AccountsForEveryByte) {
  const std::string folder = std::string(CADRE_TEST_DATA) + "/models/qwen2_moe";
  const ModelReport report = inspect_model(folder);
  EXPECT_TRUE(report.missing.empty());
  EXPECT_TRUE(report.left_over.empty());
  size_t bytes = 0;
  for (const TensorReport& tensor : report.used) bytes += tensor.bytes;
  size_t by_part = 0;
  for (const auto& part : report.bytes_per_part) by_part += part.second;
  EXPECT_EQ(by_part, bytes);
  // 3 layers x 8 experts x 3 projections of 24 x 64 bfloat16
  EXPECT_EQ(report.bytes_per_part.at("experts"), size_t{3} * 8 * 3 * 24 * 64 * 2);
  EXPECT_EQ(report.bytes_per_part.at("embedding"), size_t{256} * 64 * 2);
  EXPECT_EQ(report.bytes_per_part.at("router"), size_t{3} * 8 * 64 * 2);
  EXPECT_EQ(report.bytes_per_part.at("shared expert"), size_t{3} * (3 * 40 * 64 + 64) * 2);
  ASSERT_EQ(report.experts.size(), 1u);
  EXPECT_EQ(report.experts[0].first, "");
  EXPECT_EQ(report.experts[0].second.config.num_experts, 8);
  EXPECT_EQ(report.experts[0].second.format, StorageFormat::kBF16);
  EXPECT_EQ(report.info.num_moe_layers, 3);
}

TEST(Inspect, AsksForTheDeviceGiven) {
  // Also in a build without CUDA, whatever the family asks of a device.
  for (const char* name : {"mixtral", "deepseek_v3", "deepseek_v4", "qwen3_vl_moe", "gpt_oss"}) {
    const ModelReport report = inspect_model(std::string(CADRE_TEST_DATA) + "/models/" + name,
                                             {.device = {DeviceType::kCuda, 1}});
    EXPECT_EQ(report.experts.at(0).second.device, (Device{DeviceType::kCuda, 1})) << name;
  }
}

TEST(Inspect, UnknownArchitectureStillThrows) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.config["architectures"] = {"BertModel"};
  const std::string folder = checkpoint.write();
  EXPECT_THROW(inspect_model(folder), Unsupported);
}

}  // namespace
}  // namespace cadre::test

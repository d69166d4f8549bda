// What loading says of quantised checkpoints: configs that are not served, scales that are missing,
// too many, of another shape or dtype, or no numbers.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <filesystem>
#include <limits>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "models/damaged_checkpoint.h"
#include "models/quantization_config.h"

namespace cadre::test {
namespace {

constexpr const char* kFp8 = "qwen3_moe_fp8";
constexpr const char* kUe8m0 = "qwen3_moe_fp8_ue8m0";
constexpr const char* kMxfp4 = "gpt_oss_mxfp4";
constexpr const char* kDown = "model.layers.0.mlp.experts.3.down_proj.weight";
constexpr const char* kQuery = "model.layers.0.self_attn.q_proj.weight";
constexpr const char* kBlocks = "model.layers.1.mlp.experts.down_proj_blocks";
constexpr const char* kScales = "model.layers.1.mlp.experts.down_proj_scales";

const std::string kInverse = "_scale_inv";

LoadOptions dequantizing() {
  LoadOptions options;
  options.quantization_config = FineGrainedFP8Config{.dequantize = true};
  return options;
}

template <typename E = CheckpointError>
std::string load_error(const DamagedCheckpoint& checkpoint, const LoadOptions& options) {
  const std::string folder = checkpoint.write();
  return message_of<E>([&] { Model::from_pretrained(folder, options); });
}

// Faults that do not depend on how the model is to run.
std::string fault(const DamagedCheckpoint& checkpoint) {
  return load_error(checkpoint, dequantizing());
}

void expect_parts(const std::string& message, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) {
    EXPECT_NE(message.find(part), std::string::npos) << "\"" << part << "\" is not in:\n"
                                                     << message;
  }
}

TEST(QuantizedFaults, AMissingScaleIsNamedWithItsShape) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.tensors.erase(kDown + kInverse);
  expect_parts(fault(checkpoint), {"1 missing", kDown + kInverse + " [2, 1]"});
  DamagedCheckpoint blocks(kMxfp4);
  blocks.tensors.erase(kScales);
  expect_parts(fault(blocks), {"1 missing", std::string(kScales) + " [8, 64, 2]"});
}

TEST(QuantizedFaults, AScaleOfAPlainWeightIsNamed) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.put(kQuery, DType::kBF16, {256, 256});
  expect_parts(fault(checkpoint),
               {"1 unfit", kQuery + kInverse, "a scale of \"" + std::string(kQuery),
                "stored as bfloat16 and takes none"});
  DamagedCheckpoint plain("qwen3_moe");
  const std::string name = "model.layers.1.mlp.experts.3.down_proj.weight";
  plain.put(name + kInverse, DType::kF32, {1, 1});
  expect_parts(fault(plain), {"1 unfit", name + kInverse, "takes none"});
}

TEST(QuantizedFaults, AScaleOfNothingIsLeftOver) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.put("model.layers.0.self_attn.g_proj.weight_scale_inv", DType::kF32, {1, 1});
  expect_parts(fault(checkpoint),
               {"1 left over", "model.layers.0.self_attn.g_proj.weight_scale_inv"});
}

TEST(QuantizedFaults, AMissingWeightIsOneFault) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.tensors.erase(kDown);
  const std::string message = fault(checkpoint);
  expect_parts(message, {"1 missing", std::string(kDown) + " [256, 128]"});
  EXPECT_EQ(message.find("left over"), std::string::npos) << message;
}

TEST(QuantizedFaults, AScaleOfAnotherShapeIsNamedWithBoth) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.put(kDown + kInverse, DType::kF32, {1, 2});
  expect_parts(fault(checkpoint), {kDown + kInverse, "expected shape [2, 1]", "found [1, 2]",
                                   "[256, 128] in blocks of 128 x 128"});
  DamagedCheckpoint transposed(kMxfp4);
  transposed.put(kScales, DType::kU8, {8, 2, 64});
  expect_parts(fault(transposed), {kScales, "expected shape [8, 64, 2]", "found [8, 2, 64]"});
}

TEST(QuantizedFaults, ABlockSizeThatTheScalesDoNotHave) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.config["quantization_config"]["weight_block_size"] = {64, 64};
  expect_parts(fault(checkpoint), {"expected shape [4, 4]", "found [2, 2]", "64 x 64"});
  checkpoint.config["quantization_config"]["weight_block_size"] = nullptr;
  expect_parts(fault(checkpoint), {"expected shape [1, 1]", "a whole matrix"});
}

TEST(QuantizedFaults, DtypesThatAreNone) {
  DamagedCheckpoint scale(kFp8);
  scale.put(kDown + kInverse, DType::kI32, {2, 1});
  expect_parts(fault(scale), {kDown + kInverse, "expected scales as float32", "found int32"});
  DamagedCheckpoint weight(kFp8);
  weight.put(kDown, DType::kF8E5M2, {256, 128});
  expect_parts(fault(weight), {kDown, "found float8_e5m2"});
  DamagedCheckpoint norm(kFp8);
  norm.put("model.norm.weight", DType::kF8E4M3, {256});
  expect_parts(fault(norm), {"model.norm.weight", "expected float32", "found float8_e4m3"});
}

TEST(QuantizedFaults, TwoScalesOfOneWeight) {
  DamagedCheckpoint checkpoint(kFp8);
  const std::string other = "model.layers.0.mlp.experts.3.down_proj.scale";
  checkpoint.put(other, DType::kF32, {2, 1});
  expect_parts(fault(checkpoint), {other, "a second scale of", kDown + kInverse});
}

TEST(QuantizedFaults, PackedValuesOfAnotherShape) {
  DamagedCheckpoint checkpoint(kMxfp4);
  checkpoint.put(kBlocks, DType::kU8, {8, 64, 16, 2});
  expect_parts(fault(checkpoint), {kBlocks, "expected shape [8, 64, 2, 16]", "[8, 64, 16, 2]"});
}

TEST(QuantizedFaults, ExpertsOfOneLayerShareAForm) {
  DamagedCheckpoint plain(kFp8);
  plain.put(kDown, DType::kBF16, {256, 128});
  plain.tensors.erase(kDown + kInverse);
  expect_parts(load_error(plain, {}),
               {kDown, "expected fp8 (float32 scales of 128 x 128)", "found bfloat16"});
  DamagedCheckpoint scales(kFp8);
  scales.put(kDown + kInverse, DType::kU8, {2, 1});
  expect_parts(load_error(scales, {}), {kDown, "found fp8 (float8_e8m0 scales of 128 x 128)"});
}

TEST(QuantizedFaults, QuantisedWeightsThatTheConfigDoesNotKnow) {
  DamagedCheckpoint fp8(kFp8);
  fp8.config.erase("quantization_config");
  expect_parts(fault(fp8), {kQuery, "expected float32, bfloat16 or float16, found float8_e4m3",
                            "config.json says nothing of FP8", "quantization_config"});
  DamagedCheckpoint fp4(kMxfp4);
  fp4.config["quantization_config"] = {{"quant_method", "fp8"}};
  expect_parts(fault(fp4), {kBlocks, "config.json says nothing of FP4", "expert_dtype"});
  DamagedCheckpoint mixed(kFp8);
  mixed.config["quantization_config"] = {{"quant_method", "mxfp4"}};
  expect_parts(fault(mixed), {kQuery, "says nothing of FP8"});
}

// The stored dtype decides: a config that speaks of formats that do not occur changes nothing.
TEST(QuantizedFaults, PlainWeightsUnderAQuantizationConfigLoad) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  checkpoint.config["quantization_config"] = {{"quant_method", "fp8"}};
  EXPECT_EQ(Model::from_pretrained(checkpoint.write())->experts_query().format,
            StorageFormat::kBF16);
}

// ---- values of scales ---------------------------------------------------------------------------

// The fixture with one byte or float of a scale replaced.
template <typename T>
std::string message_with(const char* fixture, const std::string& name, int64_t at, T value) {
  DamagedCheckpoint checkpoint(fixture);
  const TensorView from = checkpoint.tensors.at(name);
  const Tensor copy(from.dtype(), from.shape());
  std::memcpy(copy->mutable_data(), from.data(), from.nbytes());
  copy->as<T>()[at] = value;
  checkpoint.tensors[name] = copy.view();
  return fault(checkpoint);
}

TEST(QuantizedFaults, ScalesThatAreNoNumbers) {
  expect_parts(message_with<uint8_t>(kUe8m0, kQuery + kInverse, 3, 255),
               {kQuery + kInverse, "the byte 255 (NaN)", "element 3 of [2, 2]"});
  expect_parts(message_with<uint8_t>(kMxfp4, kScales, 1000, 255),
               {kScales, "the byte 255 (NaN)", "element 1000"});
  expect_parts(message_with<float>(kFp8, kQuery + kInverse, 1, std::nanf("")),
               {kQuery + kInverse, "nan", "element 1"});
  expect_parts(
      message_with<float>(kFp8, kQuery + kInverse, 2, std::numeric_limits<float>::infinity()),
      {kQuery + kInverse, "inf", "element 2"});
}

TEST(QuantizedFaults, GroupScalesArePowersOfTwo) {
  DamagedCheckpoint checkpoint("deepseek_v4_fp4");
  const std::string name = "model.layers.1.ffn.experts.2.w1.scale";
  const Tensor scales(DType::kF32, {32, 2});
  std::fill_n(scales->as<float>(), 64, 0.5f);
  scales->as<float>()[7] = 1.5f;
  checkpoint.tensors[name] = scales.view();
  expect_parts(fault(checkpoint), {"w1", "powers of two", "1.5", "[3, 1]"});
}

TEST(QuantizedFaults, ATruncatedFile) {
  const DamagedCheckpoint checkpoint(kMxfp4);
  const std::filesystem::path file =
      std::filesystem::path(checkpoint.write()) / "model.safetensors";
  std::filesystem::resize_file(file, std::filesystem::file_size(file) - 100);
  const std::string folder = checkpoint.folder().path().string();
  const std::string message =
      message_of<CheckpointError>([&] { Model::from_pretrained(folder, dequantizing()); });
  expect_parts(message, {"model.safetensors"});
}

// ---- static input scales ------------------------------------------------------------------------

// The fixture with an input scale for every quantised matrix.
struct WithInputScales : DamagedCheckpoint {
  WithInputScales(DType dtype, const std::string& end);
};

WithInputScales::WithInputScales(DType dtype, const std::string& end) : DamagedCheckpoint(kFp8) {
  config["quantization_config"]["activation_scheme"] = "static";
  std::vector<std::string> weights;
  for (const auto& [name, tensor] : tensors) {
    if (tensor.dtype() == DType::kF8E4M3) weights.push_back(name);
  }
  static const float kOne = 1;
  static const uint16_t kOneBf16 = 0x3f80;
  for (const std::string& name : weights) {
    const std::string scale = name.substr(0, name.size() - std::string("weight").size()) + end;
    const void* one = dtype == DType::kF32 ? static_cast<const void*>(&kOne) : &kOneBf16;
    tensors[scale] = TensorView(one, dtype, {1});
  }
}

TEST(QuantizedFaults, StaticInputScales) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const char* end : {"input_scale", "activation_scale"}) {
      const ModelReport report = inspect_model(WithInputScales(dtype, end).write());
      EXPECT_TRUE(report.missing.empty() && report.left_over.empty());
      EXPECT_EQ(report.experts.at(0).second.activation_scheme, ActivationScheme::kStatic);
    }
  }
  const std::string scale = "model.layers.0.mlp.experts.3.down_proj.input_scale";
  WithInputScales missing(DType::kF32, "input_scale");
  missing.tensors.erase(scale);
  expect_parts(load_error(missing, {}), {"1 missing", scale});
  WithInputScales zero(DType::kF32, "input_scale");
  zero.put(scale, DType::kF32, {1});
  expect_parts(load_error(zero, {}), {scale, "expected positive numbers", "found 0"});
  WithInputScales many(DType::kF32, "input_scale");
  many.put(scale, DType::kF32, {2});
  expect_parts(load_error(many, {}), {scale, "one input scale for each matrix", "[2]"});
  WithInputScales dynamic(DType::kF32, "input_scale");
  dynamic.config["quantization_config"]["activation_scheme"] = "dynamic";
  expect_parts(load_error(dynamic, {}), {"left over", scale});
}

// ---- configs ------------------------------------------------------------------------------------

TEST(QuantizedConfig, EveryKeyAndItsAliases) {
  DamagedCheckpoint checkpoint(kFp8);
  const auto read = [&](const Json& config) {
    checkpoint.config["quantization_config"] = config;
    return read_quantization({checkpoint.config, "config.json"}, {});
  };
  const CheckpointQuantization plain = read({{"quant_method", "fp8"}});
  EXPECT_TRUE(plain.has_fp8);
  EXPECT_FALSE(plain.has_fp4);
  EXPECT_EQ(plain.fp8.activation_scheme, ActivationScheme::kDynamic);
  EXPECT_EQ(plain.fp8.weight_block_size, (std::array<int64_t, 2>{128, 128}));
  EXPECT_EQ(plain.fp8.scale_fmt, ScaleFormat::kFloat);
  EXPECT_FALSE(plain.dequantize());
  const CheckpointQuantization all = read({{"quant_method", "fp8"},
                                           {"fmt", "e4m3"},
                                           {"activation_scheme", "static"},
                                           {"weight_block_size", {32, 96}},
                                           {"scale_fmt", "ue8m0"},
                                           {"ignored_layers", {"lm_head"}},
                                           {"dequantize", true},
                                           {"a key of the future", 1}});
  EXPECT_EQ(all.fp8.activation_scheme, ActivationScheme::kStatic);
  EXPECT_EQ(all.fp8.weight_block_size, (std::array<int64_t, 2>{32, 96}));
  EXPECT_EQ(all.fp8.scale_fmt, ScaleFormat::kUe8m0);
  EXPECT_EQ(all.fp8.modules_to_not_convert, std::vector<std::string>{"lm_head"});
  EXPECT_TRUE(all.dequantize());
  EXPECT_FALSE(
      read({{"quant_method", "fp8"}, {"weight_block_size", nullptr}}).fp8.weight_block_size);
  EXPECT_EQ(read({{"quant_method", "mxfp8"}}).fp8.weight_block_size,
            (std::array<int64_t, 2>{1, 32}));
  EXPECT_TRUE(read({{"quant_method", "mxfp4"}, {"modules_to_not_convert", nullptr}}).has_fp4);
  checkpoint.config["expert_dtype"] = "fp4";
  EXPECT_TRUE(read({{"quant_method", "fp8"}}).has_fp4);
}

TEST(QuantizedConfig, ValuesThatAreNotServed) {
  const auto message = [](const char* key, const Json& value) {
    DamagedCheckpoint checkpoint(kFp8);
    checkpoint.config["quantization_config"][key] = value;
    return load_error<Unsupported>(checkpoint, {});
  };
  expect_parts(message("quant_method", "awq"),
               {"config.json", "quantization_config.quant_method", "\"awq\"", "fp8, mxfp8, mxfp4"});
  expect_parts(message("fmt", "e5m2"), {"quantization_config.fmt", "\"e5m2\"", "e4m3"});
  expect_parts(message("activation_scheme", "token"), {"activation_scheme", "dynamic, static"});
  expect_parts(message("scale_fmt", "bf16"), {"scale_fmt", "float, ue8m0"});
  DamagedCheckpoint experts(kFp8);
  experts.config["expert_dtype"] = "int4";
  expect_parts(load_error<Unsupported>(experts, {}), {"expert_dtype", "\"int4\"", "fp4, fp8"});
}

TEST(QuantizedConfig, ValuesThatAreMalformed) {
  const auto message = [](const char* key, const Json& value) {
    DamagedCheckpoint checkpoint(kFp8);
    checkpoint.config["quantization_config"][key] = value;
    return load_error(checkpoint, {});
  };
  for (const Json& block : {Json({0, 128}), Json({128}), Json({128, -1}), Json({1, 2, 3}),
                            Json("128"), Json({1LL << 40, 1})}) {
    expect_parts(message("weight_block_size", block),
                 {"config.json", "quantization_config.weight_block_size"});
  }
  expect_parts(message("quant_method", 8), {"quant_method"});
  expect_parts(message("dequantize", "yes"), {"dequantize"});
  expect_parts(message("modules_to_not_convert", {1}), {"modules_to_not_convert"});
  DamagedCheckpoint text(kFp8);
  text.config["quantization_config"] = "fp8";
  expect_parts(load_error(text, {}), {"quantization_config"});
}

TEST(QuantizedConfig, WhatIsAskedForWhileLoading) {
  const DamagedCheckpoint plain("qwen3_moe");
  EXPECT_EQ(Model::from_pretrained(plain.write(), dequantizing())->experts_query().format,
            StorageFormat::kBF16)
      << "nothing to dequantise";
  LoadOptions quantize;
  quantize.quantization_config = FineGrainedFP8Config{};
  expect_parts(load_error<Unsupported>(plain, quantize), {"not quantised", "cadre quantize"});
  LoadOptions other = dequantizing();  // the checkpoint's own settings prevail
  other.quantization_config->weight_block_size = {{32, 32}};
  other.quantization_config->activation_scheme = ActivationScheme::kStatic;
  EXPECT_NO_THROW(Model::from_pretrained(DamagedCheckpoint(kFp8).write(), other));
  other.quantization_config->weight_block_size = {{0, 32}};
  expect_parts(load_error<InvalidArgument>(DamagedCheckpoint(kFp8), other), {"weight_block_size"});
}

TEST(QuantizedConfig, ExcludedModules) {
  FineGrainedFP8Config config;
  config.modules_to_not_convert = {"lm_head", "model.layers.*.self_attn", "model.layers.1",
                                   "*.gate"};
  EXPECT_TRUE(is_excluded(config, "lm_head"));
  EXPECT_TRUE(is_excluded(config, "model.lm_head"));
  EXPECT_TRUE(is_excluded(config, "model.layers.17.self_attn.q_proj"));
  EXPECT_TRUE(is_excluded(config, "model.layers.1.mlp.up_proj"));
  EXPECT_TRUE(is_excluded(config, "model.layers.3.mlp.gate"));
  EXPECT_FALSE(is_excluded(config, "model.layers.10.mlp.up_proj"));
  EXPECT_FALSE(is_excluded(config, "model.layers.3.mlp.gate_proj"));
  EXPECT_FALSE(is_excluded(config, "model.embed_tokens"));
  config.modules_to_not_convert = {std::string(200, '*') + "x"};
  EXPECT_FALSE(is_excluded(config, std::string(5000, 'a'))) << "and soon";
}

TEST(QuantizedConfig, WithoutDtypeTheWeightsDecideNotTheScales) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.config.erase("dtype");
  EXPECT_EQ(inspect_model(checkpoint.write()).info.compute_dtype, DType::kBF16);
}

// ---- books --------------------------------------------------------------------------------------

TEST(QuantizedBooks, EveryByteHasAPartAndAFormat) {
  for (const char* name : {kFp8, kUe8m0, "deepseek_v3_fp8", kMxfp4, "deepseek_v4_fp4"}) {
    SCOPED_TRACE(name);
    const DamagedCheckpoint checkpoint(name);
    const ModelReport report = inspect_model(std::string(CADRE_TEST_DATA) + "/models/" + name);
    EXPECT_TRUE(report.missing.empty());
    EXPECT_TRUE(report.left_over.empty());
    size_t stored = 0;
    for (const auto& [tensor, view] : checkpoint.tensors) stored += view.nbytes();
    size_t booked = 0;
    for (const auto& [part, bytes] : report.bytes_per_part) booked += bytes;
    EXPECT_EQ(booked, stored);
    EXPECT_TRUE(is_quantized(report.experts.at(0).second.format));
  }
}

TEST(QuantizedBooks, LayersForMultiTokenPredictionAndTheirScalesAreNotNeeded) {
  DamagedCheckpoint checkpoint("deepseek_v3_fp8");  // 2 layers, one more is named
  checkpoint.put("model.layers.2.mlp.experts.0.up_proj.weight", DType::kF8E4M3, {128, 256});
  checkpoint.put("model.layers.2.mlp.experts.0.up_proj.weight_scale_inv", DType::kF32, {1, 2});
  const ModelReport report = inspect_model(checkpoint.write());
  EXPECT_TRUE(report.left_over.empty());
  EXPECT_EQ(report.ignored.size(), 2u);
  EXPECT_NO_THROW(Model::from_pretrained(checkpoint.write(), dequantizing()));
}

TEST(QuantizedBooks, AConfigThatExcludesWhatIsQuantisedIsNoted) {
  DamagedCheckpoint checkpoint(kFp8);
  checkpoint.config["quantization_config"]["modules_to_not_convert"] = {"lm_head"};
  EXPECT_TRUE(inspect_model(checkpoint.write()).notes.empty());
  checkpoint.config["quantization_config"]["modules_to_not_convert"] = {"model.layers.*.self_attn"};
  const ModelReport report = inspect_model(checkpoint.write());
  ASSERT_EQ(report.notes.size(), 1u);
  expect_parts(report.notes[0], {"modules_to_not_convert", "4 weights", kQuery});
  EXPECT_NO_THROW(Model::from_pretrained(checkpoint.write(), dequantizing()));
}

TEST(QuantizedBooks, WhatTheModelAsksOfBackends) {
  const auto query = [](const char* name) {
    return inspect_model(std::string(CADRE_TEST_DATA) + "/models/" + name).experts.at(0).second;
  };
  EXPECT_EQ(query(kFp8).format, StorageFormat::kFp8Block);
  EXPECT_EQ(query(kFp8).scale_layout, (ScaleLayout{DType::kF32, 128, 128}));
  EXPECT_EQ(query(kFp8).activation_scheme, ActivationScheme::kDynamic);
  EXPECT_EQ(query(kUe8m0).scale_layout, (ScaleLayout{DType::kF8E8M0, 128, 128}));
  EXPECT_EQ(query(kMxfp4).format, StorageFormat::kFp4);
  EXPECT_EQ(query(kMxfp4).scale_layout, (ScaleLayout{DType::kF8E8M0, 1, 32}));
  EXPECT_EQ(query(kMxfp4).activation_scheme, ActivationScheme::kNone);
  EXPECT_FALSE(query(kMxfp4).config.is_transposed) << "packed values have their rows first";
  EXPECT_EQ(query("deepseek_v4_fp4").activation_scheme, ActivationScheme::kNone)
      << "though its config says dynamic";
}

TEST(QuantizedBooks, DequantisedWeightsAreMemoryOfTheirOwn) {
  const std::string folder = std::string(CADRE_TEST_DATA) + "/models/" + kMxfp4;
  const auto model = Model::from_pretrained(folder, dequantizing());
  // 2 layers x 8 experts x 3 projections of 64 x 64 bfloat16
  EXPECT_EQ(model->memory().weights_bytes, size_t{2} * 8 * 3 * 64 * 64 * 2);
  EXPECT_GT(model->memory().mapped_bytes, 0u);
}

TEST(QuantizedBooks, DequantisedWeightsCanBePacked) {
  LoadOptions options = dequantizing();
  options.prepack = Prepack::kOn;
  const std::string folder = std::string(CADRE_TEST_DATA) + "/models/" + kFp8;
  EXPECT_GT(Model::from_pretrained(folder, options)->memory().added_bytes, 0u);
}

}  // namespace
}  // namespace cadre::test

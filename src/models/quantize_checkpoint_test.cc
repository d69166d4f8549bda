// quantize_checkpoint: every fixture's weights against its own values, what config.json then says,
// and that a failure leaves nothing behind.
#include "cadre/quantize_checkpoint.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <filesystem>
#include <set>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "cadre/quantization.h"
#include "io/checkpoint.h"
#include "models/damaged_checkpoint.h"
#include "quant/float8.h"
#include "support/expect_error.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

std::string source_of(const std::string& name) {
  return std::string(CADRE_TEST_DATA) + "/models/" + name;
}

const std::vector<std::string> kFamilies = {
    "qwen2_moe",   "qwen2_moe_packed", "qwen3_moe",   "mixtral",           "olmoe",
    "granitemoe",  "glm4_moe",         "minimax_m2",  "minimax_m2_packed", "deepseek_v2",
    "deepseek_v3", "deepseek_v4",      "qwen3_vl_moe"};

float plain_value(const TensorView& tensor, int64_t at) {
  const auto* bytes =
      static_cast<const char*>(tensor.data()) + static_cast<size_t>(at) * size_of(tensor.dtype());
  if (tensor.dtype() == DType::kF32) {
    float value;
    std::memcpy(&value, bytes, sizeof value);
    return value;
  }
  BFloat16 value;
  std::memcpy(&value, bytes, sizeof value);
  return static_cast<float>(value);
}

uint8_t byte_of(const TensorView& tensor, int64_t at) {
  return static_cast<const uint8_t*>(tensor.data())[at];
}

float scale_value(const TensorView& scales, int64_t at) {
  if (scales.dtype() != DType::kF32) return e8m0_to_float(byte_of(scales, at));
  float value;
  std::memcpy(&value, static_cast<const char*>(scales.data()) + at * 4, sizeof value);
  return value;
}

/// One weight, its matrices one after the other.
struct Written {
  TensorView values;
  TensorView scales;
  int64_t rows;
  int64_t cols;
  int64_t block_rows;
  int64_t block_cols;

  bool is_fp4() const { return values.dtype() != DType::kF8E4M3; }
  float scale(int64_t matrix, int64_t n, int64_t k) const {
    const int64_t across = cols / block_cols;
    return scale_value(scales,
                       (matrix * (rows / block_rows) + n / block_rows) * across + k / block_cols);
  }
  float code(int64_t matrix, int64_t n, int64_t k) const {
    const int64_t at = (matrix * rows + n) * cols + k;
    if (!is_fp4()) return e4m3_to_float(byte_of(values, at));
    const uint8_t two = byte_of(values, at / 2);
    return e2m1_to_float(static_cast<uint8_t>(at % 2 == 0 ? two : two >> 4));
  }
};

/// Every value lies within half a step of the code that stands for it.
void expect_near(const Written& written, const TensorView& plain, const std::string& name) {
  const int64_t matrices = plain.numel() / (written.rows * written.cols);
  // Steps are widest at the top: 32 below 448; 2 between 4 and 6, and FP4 may clip at half of amax.
  const float allowed = written.is_fp4() ? 6.0f : 16.0f;
  for (int64_t e = 0; e < matrices; ++e) {
    for (int64_t n = 0; n < written.rows; ++n) {
      for (int64_t k = 0; k < written.cols; ++k) {
        const float scale = written.scale(e, n, k);
        const float value = plain_value(plain, (e * written.rows + n) * written.cols + k);
        const float error = std::fabs(written.code(e, n, k) * scale - value);
        ASSERT_LE(error, allowed * scale * 1.001f) << name << " " << e << " " << n << " " << k;
      }
    }
  }
}

/// The bytes that quantize() gives for the same weight.
void expect_bytes(const Written& written, const TensorView& plain, const std::string& name) {
  const StorageFormat format = written.is_fp4() ? StorageFormat::kFp4 : StorageFormat::kFp8Block;
  const DType scale_dtype = written.is_fp4() ? DType::kF8E8M0 : written.scales.dtype();
  const QuantizedWeight expected =
      quantize(plain, format, {scale_dtype, written.block_rows, written.block_cols});
  ASSERT_EQ(written.values.nbytes(), expected.values->nbytes()) << name;
  ASSERT_EQ(written.scales.nbytes(), expected.scales->nbytes()) << name;
  EXPECT_EQ(std::memcmp(written.values.data(), expected.values->data(), written.values.nbytes()), 0)
      << name;
  EXPECT_EQ(std::memcmp(written.scales.data(), expected.scales->data(), written.scales.nbytes()), 0)
      << name;
}

struct Result {
  explicit Result(const std::string& source, const QuantizeOptions& options)
      : plain(Checkpoint::open(source)),
        report(quantize_checkpoint(source, folder / "out", options)),
        quantized(Checkpoint::open(folder / "out")) {}

  TensorView tensor(const std::string& name) const {
    const CheckpointTensor* found = quantized.find(name);
    return found == nullptr ? TensorView() : found->view;
  }
  Json config() const { return quantized.config().json()["quantization_config"]; }

  TempDir folder;
  Checkpoint plain;
  QuantizeReport report;
  Checkpoint quantized;
};

/// Compares all tensors with the source's; returns the quantised ones' names.
std::set<std::string> compare(const Result& result, bool may_be_transposed = false) {
  std::set<std::string> names;
  size_t accounted = 0;
  for (const CheckpointTensor& source : result.plain.tensors()) {
    const TensorView values = result.tensor(source.name);
    if (!values) {
      ADD_FAILURE() << source.name << " is not there";
      continue;
    }
    accounted += 1;
    if (values.dtype() == source.view.dtype()) {
      EXPECT_EQ(values.shape(), source.view.shape()) << source.name;
      EXPECT_EQ(std::memcmp(values.data(), source.view.data(), values.nbytes()), 0) << source.name;
      continue;
    }
    const TensorView scales = result.tensor(source.name + "_scale_inv");
    if (!scales) {
      ADD_FAILURE() << source.name << " has no scales";
      continue;
    }
    accounted += 1;
    names.insert(source.name);
    if (may_be_transposed) continue;
    const int rank = source.view.rank();
    Written written{values, scales, source.view.dim(rank - 2), source.view.dim(rank - 1), 0, 0};
    written.block_rows = written.rows / scales.dim(rank - 2);
    written.block_cols = written.cols / scales.dim(rank - 1);
    expect_near(written, source.view, source.name);
    expect_bytes(written, source.view, source.name);
  }
  EXPECT_EQ(accounted, result.quantized.tensors().size());
  return names;
}

bool contains_part(const std::set<std::string>& names, const std::string& part) {
  return std::any_of(names.begin(), names.end(),
                     [&](const std::string& name) { return name.find(part) != name.npos; });
}

TEST(QuantizeCheckpoint, EveryFamilyInFp8KeepsItsValuesAndItsOtherTensors) {
  for (const std::string& family : kFamilies) {
    for (const CheckpointFormat format : {CheckpointFormat::kFp8, CheckpointFormat::kFp8Ue8m0}) {
      SCOPED_TRACE(family);
      QuantizeOptions options;
      options.format = format;
      options.num_threads = 2;
      const Result result(source_of(family), options);
      const std::set<std::string> names = compare(result);
      EXPECT_EQ(result.report.num_quantized, static_cast<int64_t>(names.size()));
      EXPECT_TRUE(contains_part(names, "experts.") || contains_part(names, "input_linear"));
      EXPECT_TRUE(contains_part(names, "attn."));
      for (const char* part : {"embed", "lm_head", "head.weight", "norm", "gate.weight", "router",
                               "visual", "shared_expert_gate"}) {
        EXPECT_FALSE(contains_part(names, part)) << part;
      }
      const Json config = result.config();
      EXPECT_EQ(config["quant_method"], "fp8");
      EXPECT_EQ(config["fmt"], "e4m3");
      EXPECT_EQ(config["activation_scheme"], "dynamic");
      EXPECT_EQ(config["weight_block_size"],
                Json({result.report.block_size, result.report.block_size}));
      EXPECT_EQ(config.contains("scale_fmt"), format == CheckpointFormat::kFp8Ue8m0);
    }
  }
}

TEST(QuantizeCheckpoint, Fp4IsForExpertsOnly) {
  QuantizeOptions options;
  options.format = CheckpointFormat::kFp4;
  const Result result(source_of("deepseek_v4"), options);
  const std::set<std::string> names = compare(result);
  EXPECT_TRUE(std::all_of(names.begin(), names.end(), [](const std::string& name) {
    return name.find(".experts.") != name.npos;
  }));
  EXPECT_EQ(names.size(), 4u * 8 * 3);
  EXPECT_EQ(result.tensor(*names.begin()).dtype(), DType::kI8);
  EXPECT_EQ(result.config()["scale_fmt"], "ue8m0");
  EXPECT_EQ(result.quantized.config().json()["expert_dtype"], "fp4");
}

TEST(QuantizeCheckpoint, GptOssBecomesMxfp4) {
  QuantizeOptions options;
  options.format = CheckpointFormat::kFp4;
  const Result result(source_of("gpt_oss"), options);
  const std::string name = "model.layers.1.mlp.experts.gate_up_proj";
  const TensorView source = result.plain.find(name)->view;  // [E, K, N]
  const TensorView blocks = result.tensor(name + "_blocks");
  const TensorView scales = result.tensor(name + "_scales");
  EXPECT_EQ(blocks.shape(), (Dims{8, 128, 2, 16}));
  EXPECT_EQ(scales.shape(), (Dims{8, 128, 2}));
  EXPECT_EQ(blocks.dtype(), DType::kU8);
  EXPECT_EQ(scales.dtype(), DType::kU8);
  const Written written{blocks, scales, 128, 64, 1, 32};
  for (int64_t e = 0; e < 8; ++e) {
    for (int64_t n = 0; n < 128; ++n) {
      for (int64_t k = 0; k < 64; ++k) {
        const float value = plain_value(source, (e * 64 + k) * 128 + n);
        const float scale = written.scale(e, n, k);
        ASSERT_LE(std::fabs(written.code(e, n, k) * scale - value), 6 * scale);
      }
    }
  }
  EXPECT_EQ(result.config()["quant_method"], "mxfp4");
  EXPECT_FALSE(result.tensor(name));
  EXPECT_TRUE(result.tensor(name + "_bias"));
}

TEST(QuantizeCheckpoint, TransposedPackedExpertsAreTurnedRound) {
  // The hub's Qwen3-VL layout: [E, H, 2I] and [E, I, H].
  DamagedCheckpoint hub("qwen3_vl_moe");
  std::vector<std::unique_ptr<std::vector<char>>> owned;
  for (auto& [name, tensor] : hub.tensors) {
    if (name.find("mlp.experts.") == name.npos) continue;
    const int64_t rows = tensor.dim(1), cols = tensor.dim(2);
    auto& bytes = *owned.emplace_back(std::make_unique<std::vector<char>>(tensor.nbytes()));
    for (int64_t e = 0; e < tensor.dim(0); ++e) {
      for (int64_t n = 0; n < rows; ++n) {
        for (int64_t k = 0; k < cols; ++k) {
          std::memcpy(bytes.data() + 2 * ((e * cols + k) * rows + n),
                      static_cast<const char*>(tensor.data()) + 2 * ((e * rows + n) * cols + k), 2);
        }
      }
    }
    tensor = TensorView(bytes.data(), DType::kBF16, {tensor.dim(0), cols, rows});
  }
  const Result turned(hub.write(), {});
  const Result saved_again(source_of("qwen3_vl_moe"), {});
  for (const CheckpointTensor& tensor : saved_again.quantized.tensors()) {
    const TensorView other = turned.tensor(tensor.name);
    ASSERT_TRUE(other) << tensor.name;
    EXPECT_EQ(other.shape(), tensor.view.shape()) << tensor.name;
    EXPECT_EQ(std::memcmp(other.data(), tensor.view.data(), other.nbytes()), 0) << tensor.name;
  }
}

TEST(QuantizeCheckpoint, LinearsThatTheBlockDoesNotDivideStayAndAreListed) {
  // DeepSeek's kv_a_proj_with_mqa has kv_lora_rank + qk_rope_head_dim rows.
  DamagedCheckpoint checkpoint("deepseek_v3");
  checkpoint.config["qk_rope_head_dim"] = 12;
  for (auto& [name, tensor] : std::map<std::string, TensorView>(checkpoint.tensors)) {
    const Json& c = checkpoint.config;
    const int64_t heads = c["num_attention_heads"], nope = c["qk_nope_head_dim"];
    const int64_t rank = c["kv_lora_rank"], hidden = c["hidden_size"];
    if (name.ends_with("kv_a_proj_with_mqa.weight")) {
      checkpoint.put(name, DType::kBF16, {rank + 12, hidden});
    } else if (name.ends_with("q_b_proj.weight") && name.find("kv_") == name.npos) {
      checkpoint.put(name, DType::kBF16, {heads * (nope + 12), tensor.dim(1)});
    }
  }
  const Result result(checkpoint.write(), {});
  EXPECT_EQ(result.report.block_size, 8);
  const std::string name = "model.layers.0.self_attn.kv_a_proj_with_mqa";
  EXPECT_EQ(result.tensor(name + ".weight").dtype(), DType::kBF16);
  const std::vector<std::string> listed = result.config()["modules_to_not_convert"];
  EXPECT_NE(std::find(listed.begin(), listed.end(), name), listed.end());
}

TEST(QuantizeCheckpoint, NamedModulesStay) {
  QuantizeOptions options;
  options.modules_to_not_convert = {"o_proj", "model.layers.0.self_attn"};
  const Result result(source_of("qwen3_moe"), options);
  EXPECT_EQ(result.tensor("model.layers.0.self_attn.q_proj.weight").dtype(), DType::kBF16);
  EXPECT_EQ(result.tensor("model.layers.1.self_attn.q_proj.weight").dtype(), DType::kF8E4M3);
  EXPECT_EQ(result.tensor("model.layers.1.self_attn.o_proj.weight").dtype(), DType::kBF16);
  const std::vector<std::string> listed = result.config()["modules_to_not_convert"];
  EXPECT_EQ(std::set<std::string>(listed.begin(), listed.end()),
            (std::set<std::string>{
                "lm_head", "model.layers.0.self_attn.k_proj", "model.layers.0.self_attn.o_proj",
                "model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.v_proj",
                "model.layers.1.self_attn.o_proj"}));

  options.modules_to_not_convert = {"experts"};
  const Result dense(source_of("qwen3_moe"), options);
  EXPECT_EQ(dense.tensor("model.layers.1.mlp.experts.2.up_proj.weight").dtype(), DType::kBF16);
}

TEST(QuantizeCheckpoint, NamesThatFitNothingOrTooLittleAreRefused) {
  const TempDir folder;
  const auto attempt = [&](const std::vector<std::string>& names) {
    QuantizeOptions options;
    options.modules_to_not_convert = names;
    quantize_checkpoint(source_of("qwen3_moe"), folder / "out", options);
  };
  expect_error<InvalidArgument>([&] { attempt({"o_porj"}); }, {"\"o_porj\"", "cadre inspect"});
  expect_error<InvalidArgument>([&] { attempt({"proj"}); }, {"\"proj\""});  // not cut at a dot
  expect_error<InvalidArgument>([&] { attempt({"model.layers.1.mlp"}); }, {"some layers"});
  expect_error<InvalidArgument>([&] { attempt({"model"}); }, {"nothing to quantise"});
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(QuantizeCheckpoint, ShardsHaveAnIndexAndHoldWhatTheyMay) {
  QuantizeOptions options;
  options.shard_bytes = 60000;
  const Result result(source_of("qwen3_moe"), options);
  const Json index = read_json_file(result.folder / "out" / "model.safetensors.index.json");
  EXPECT_EQ(index["metadata"]["total_size"], result.report.bytes_after);
  std::set<std::string> files;
  for (const auto& [name, file] : index["weight_map"].items()) files.insert(file);
  EXPECT_GT(files.size(), 3u);
  for (const std::string& file : files) {
    EXPECT_LT(fs::file_size(result.folder / "out" / file), 60000u + 20000) << file;
  }
  const Result whole(source_of("qwen3_moe"), {});
  ASSERT_EQ(result.quantized.tensors().size(), whole.quantized.tensors().size());
  for (const CheckpointTensor& tensor : whole.quantized.tensors()) {
    const TensorView other = result.tensor(tensor.name);
    EXPECT_EQ(std::memcmp(other.data(), tensor.view.data(), other.nbytes()), 0) << tensor.name;
  }
}

TEST(QuantizeCheckpoint, OtherFilesComeAlongButNoOtherWeights) {
  DamagedCheckpoint source("qwen3_moe");
  source.write();
  for (const char* name : {"tokenizer.json", "LICENSE", "pytorch_model.bin", ".hidden",
                           "pytorch_model.bin.index.json"}) {
    source.folder().write(name, "text");
  }
  const Result result(source.folder().path().string(), {});
  std::set<std::string> files;
  for (const auto& entry : fs::directory_iterator(result.folder / "out")) {
    files.insert(entry.path().filename().string());
  }
  EXPECT_EQ(files, (std::set<std::string>{"LICENSE", "config.json", "model.safetensors",
                                          "tokenizer.json"}));
  EXPECT_EQ(std::set<std::string>(result.report.files.begin(), result.report.files.end()), files);
}

TEST(QuantizeCheckpoint, WhatCannotBeQuantisedIsSaid) {
  const TempDir folder;
  const auto attempt = [&](const std::string& source, CheckpointFormat format) {
    QuantizeOptions options;
    options.format = format;
    quantize_checkpoint(source, folder / "out", options);
  };
  expect_error<Unsupported>([&] { attempt(source_of("gpt_oss"), CheckpointFormat::kFp8); },
                            {"biases", "--format fp4"});
  expect_error<Unsupported>([&] { attempt(source_of("qwen3_moe"), CheckpointFormat::kFp4); },
                            {"multiples of 32", "64 and 40", "--format fp8"});
  DamagedCheckpoint done("qwen3_moe");
  done.config["quantization_config"] = {{"quant_method", "fp8"}};
  expect_error<Unsupported>([&] { attempt(done.write(), CheckpointFormat::kFp8); },
                            {"quantised already", "\"fp8\"", "made from"});
  DamagedCheckpoint half("qwen3_moe");
  half.put("model.layers.0.self_attn.q_proj.weight", DType::kF8E4M3, {128, 64});
  expect_error<Unsupported>([&] { attempt(half.write(), CheckpointFormat::kFp8); },
                            {"q_proj", "float8_e4m3"});
  DamagedCheckpoint missing("qwen3_moe");
  missing.tensors.erase("model.layers.1.mlp.experts.3.down_proj.weight");
  expect_error<CheckpointError>([&] { attempt(missing.write(), CheckpointFormat::kFp8); },
                                {"experts.3.down_proj", "cadre inspect"});
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(QuantizeCheckpoint, ANanIsNamedAndNothingStays) {
  DamagedCheckpoint checkpoint("qwen3_moe");
  const std::string name = "model.layers.1.mlp.experts.3.down_proj.weight";
  const TensorView plain = checkpoint.tensors[name];
  std::vector<uint16_t> bits(static_cast<size_t>(plain.numel()));
  std::memcpy(bits.data(), plain.data(), plain.nbytes());
  bits[41] = 0x7fc0;
  checkpoint.tensors[name] = TensorView(bits.data(), DType::kBF16, plain.shape());
  const std::string source = checkpoint.write();
  const TempDir folder;
  expect_error<CheckpointError>([&] { quantize_checkpoint(source, folder / "out"); },
                                {name, "model.safetensors"});
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(QuantizeCheckpoint, AnInterruptedRunLeavesNothing) {
  const TempDir folder;
  QuantizeOptions options;
  options.progress = [](std::string_view, int64_t done, int64_t) {
    if (done == 20) throw std::runtime_error("stop");
  };
  EXPECT_THROW(quantize_checkpoint(source_of("qwen3_moe"), folder / "out", options),
               std::runtime_error);
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(QuantizeCheckpoint, NothingThatExistsIsOverwritten) {
  const TempDir folder;
  fs::create_directory(folder / "empty");
  folder.write("file", "text");
  for (const char* name : {"empty", "file"}) {
    expect_error<InvalidArgument>(
        [&] { quantize_checkpoint(source_of("qwen3_moe"), folder / name); }, {name, "taken"});
  }
  expect_error<Error>([&] { quantize_checkpoint(source_of("qwen3_moe"), folder / "no" / "out"); },
                      {"No such file"});
  quantize_checkpoint(source_of("qwen3_moe"), (folder / "out").string() + "/");
  EXPECT_TRUE(fs::exists(folder / "out" / "config.json"));
}

}  // namespace
}  // namespace cadre::test

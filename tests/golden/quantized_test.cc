// Quantised checkpoints on every backend of the device that runs them. Dequantised while loading
// they give the stored logits, which Transformers computed on the dequantised weights; in their own
// precision they stay near them. The same weights in other spellings give the same logits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "golden/model_runs.h"
#include "models/damaged_checkpoint.h"
#include "quant/float8.h"
#include "support/compare.h"
#include "support/test_device.h"

namespace cadre::test {
namespace {

LoadOptions options(DType dtype, const std::string& backend = "") {
  LoadOptions options{.device = test_device(), .dtype = dtype};
  options.decode_experts = {DecodeExperts::kOff};
  if (!backend.empty()) options.experts_implementation = {{"", backend}};
  return options;
}

LoadOptions dequantized(DType dtype, const std::string& backend = "") {
  LoadOptions result = options(dtype, backend);
  result.quantization_config = FineGrainedFP8Config{.dequantize = true};
  return result;
}

double logits_error(Model& model, const Expected& expected) {
  const std::vector<float> logits = all_logits(model, expected.input_ids, expected.batch);
  return relative_error(std::span<const float>(logits), std::span<const double>(expected.logits));
}

std::vector<std::string> backends_for(const ExpertsQuery& query) {
  std::vector<std::string> names;
  for (const std::string& name : backend_names()) {
    if (supports(name, query).ok()) names.push_back(name);
  }
  return names;
}

class Quantized : public testing::TestWithParam<std::string> {
 protected:
  void SetUp() override {
    CADRE_SKIP_WITHOUT_DEVICE();
    if (lacks_compressed_ops(GetParam())) GTEST_SKIP() << "no operations of DeepSeek-V4 here";
    expected_ = read_expected(fixture(GetParam()) / "expected.safetensors");
  }

  static std::string path() { return fixture(GetParam()).string(); }
  static ExpertsQuery query(const LoadOptions& options) {
    return inspect_model(path(), options).experts.at(0).second;
  }
  /// Experts alone are quantised, or dense layers too.
  static double bound() {
    return GetParam().starts_with("gpt_oss") || GetParam().starts_with("deepseek_v4") ? 4e-2
                                                                                      : 1.5e-1;
  }

  Expected expected_;
};

TEST_P(Quantized, DequantizedLogitsAndGreedyTokensInFloat32) {
  const std::vector<std::string> names = backends_for(query(dequantized(DType::kF32)));
  EXPECT_GE(names.size(), 3u);
  for (const std::string& name : names) {
    SCOPED_TRACE(name);
    const auto model = Model::from_pretrained(path(), dequantized(DType::kF32, name));
    EXPECT_EQ(model->experts_query().format, StorageFormat::kF32);
    EXPECT_LE(logits_error(*model, expected_), 1e-4);
    EXPECT_EQ(greedy(*model, expected_.input_ids, expected_.batch, expected_.num_greedy),
              expected_.greedy_ids);
  }
}

TEST_P(Quantized, DequantizedIn16Bits) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    const auto model = Model::from_pretrained(path(), dequantized(dtype));
    EXPECT_EQ(model->experts_query().format, *plain_format(dtype));
    EXPECT_LE(logits_error(*model, expected_), 2e-1);
  }
}

TEST_P(Quantized, InTheirOwnPrecision) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    const ExpertsQuery asked = query(options(dtype));
    EXPECT_TRUE(is_quantized(asked.format));
    for (const std::string& name : backend_names()) {
      SCOPED_TRACE(name + " in " + std::string(name_of(dtype)));
      if (!supports(name, asked).ok()) {
        EXPECT_THROW(Model::from_pretrained(path(), options(dtype, name)), Unsupported);
        continue;
      }
      const auto model = Model::from_pretrained(path(), options(dtype, name));
      EXPECT_EQ(model->experts_query().format, asked.format);
      // In 16 bits near-ties of routers flip: what a free run shows.
      const double error = logits_error(*model, expected_);
      EXPECT_LE(error, dtype == DType::kF32 ? bound() : 2e-1);
      RecordProperty(name + "_" + std::string(name_of(dtype)), std::to_string(error));
    }
  }
}

TEST_P(Quantized, PackedGivesTheSameBits) {
  if (on_gpu()) GTEST_SKIP() << "about the CPU";
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    LoadOptions packed = options(dtype);
    packed.prepack = Prepack::kOn;
    const auto model = Model::from_pretrained(path(), packed);
    EXPECT_GT(model->memory().added_bytes, 0u);
    EXPECT_EQ(all_logits(*model, expected_.input_ids, expected_.batch),
              all_logits(*Model::from_pretrained(path(), options(dtype)), expected_.input_ids,
                         expected_.batch));
  }
}

INSTANTIATE_TEST_SUITE_P(Models, Quantized, testing::ValuesIn(quantized_fixture_names()),
                         [](const auto& parameter) { return parameter.param; });

// ---- the same weights, spelt otherwise ----------------------------------------------------------

// A quantised fixture whose tensors are replaced by others of the same values.
class Respelt {
 public:
  explicit Respelt(const std::string& name) : checkpoint(name) {}

  Tensor& keep(DType dtype, const Dims& shape) { return owned_.emplace_back(dtype, shape); }

  std::vector<std::string> names_ending(const std::string& end) const {
    std::vector<std::string> names;
    for (const auto& [name, tensor] : checkpoint.tensors) {
      if (name.ends_with(end)) names.push_back(name);
    }
    return names;
  }

  void rename_ends(const std::string& from, const std::string& to) {
    for (const std::string& name : names_ending(from)) {
      auto node = checkpoint.tensors.extract(name);
      node.key() = name.substr(0, name.size() - from.size()) + to;
      checkpoint.tensors.insert(std::move(node));
    }
  }

  // E8M0 scales in another container of the same values.
  void recontain(const std::string& end, DType dtype) {
    for (const std::string& name : names_ending(end)) {
      const TensorView from = checkpoint.tensors.at(name);
      Tensor& to = keep(dtype, from.shape());
      for (int64_t i = 0; i < from.numel(); ++i) {
        const uint8_t code = from.as<uint8_t>()[i];
        const float value = std::ldexp(1.0f, code - 127);
        if (dtype == DType::kF32) to->as<float>()[i] = value;
        if (dtype == DType::kBF16) to->as<BFloat16>()[i] = BFloat16(value);
        if (dtype == DType::kF16) to->as<Float16>()[i] = Float16(value);
        if (dtype == DType::kU8) to->as<uint8_t>()[i] = code;
      }
      checkpoint.tensors[name] = to.view();
    }
  }

  // Scales of blocks of 128 x 128 as scales of smaller ones: each is said again for all of its
  // parts. Sizes divide 128.
  void split_blocks(int64_t rows, int64_t cols) {
    for (const std::string& name : names_ending(".weight_scale_inv")) {
      const TensorView from = checkpoint.tensors.at(name);
      const std::string weight = name.substr(0, name.size() - std::string("_scale_inv").size());
      const TensorView values = checkpoint.tensors.at(weight);
      const Dims shape{(values.dim(0) + rows - 1) / rows, (values.dim(1) + cols - 1) / cols};
      Tensor& to = keep(from.dtype(), shape);
      const auto bytes = static_cast<int64_t>(size_of(from.dtype()));
      for (int64_t r = 0; r < shape[0]; ++r) {
        for (int64_t c = 0; c < shape[1]; ++c) {
          const int64_t source = r * rows / 128 * from.dim(1) + c * cols / 128;
          std::memcpy(static_cast<char*>(to->mutable_data()) + (r * shape[1] + c) * bytes,
                      static_cast<const char*>(from.data()) + source * bytes,
                      static_cast<size_t>(bytes));
        }
      }
      checkpoint.tensors[name] = to.view();
    }
    checkpoint.config["quantization_config"]["weight_block_size"] = {rows, cols};
  }

  // Tensors of all experts of a layer below each other.
  TensorView stacked(const std::string& mlp, const std::vector<std::string>& parts,
                     const std::string& end, int64_t num_experts) {
    std::vector<std::byte> bytes;
    TensorView first;
    for (int64_t e = 0; e < num_experts; ++e) {
      for (const std::string& part : parts) {
        const std::string name =
            mlp + "experts." + std::to_string(e) + "." + part + ".weight" + end;
        const TensorView one = checkpoint.tensors.at(name);
        checkpoint.tensors.erase(name);
        if (!first) first = one;
        const auto* data = static_cast<const std::byte*>(one.data());
        bytes.insert(bytes.end(), data, data + one.nbytes());
      }
    }
    Tensor& to =
        keep(first.dtype(),
             {num_experts, first.dim(0) * static_cast<int64_t>(parts.size()), first.dim(1)});
    std::memcpy(to->mutable_data(), bytes.data(), bytes.size());
    return to.view();
  }

  void pack_experts(const std::string& mlp, int64_t num_experts) {
    for (const std::string end : {"", "_scale_inv"}) {
      const TensorView gate_up = stacked(mlp, {"gate_proj", "up_proj"}, end, num_experts);
      const TensorView down = stacked(mlp, {"down_proj"}, end, num_experts);
      checkpoint.tensors[mlp + "experts.gate_up_proj" + end] = gate_up;
      checkpoint.tensors[mlp + "experts.down_proj" + end] = down;
    }
  }

  DamagedCheckpoint checkpoint;

 private:
  std::deque<Tensor> owned_;  // whose elements stay where they are
};

class Spellings : public testing::Test {
 protected:
  void SetUp() override { CADRE_SKIP_WITHOUT_DEVICE(); }

  // Dequantised it gives the fixture's logits, and where it runs, in its own precision about those.
  static void expect_logits_of(const std::string& name, const std::string& path,
                               StorageFormat format) {
    const Expected expected = read_expected(fixture(name) / "expected.safetensors");
    const auto model = Model::from_pretrained(path, dequantized(DType::kF32));
    EXPECT_LE(logits_error(*model, expected), 1e-4);
    const ModelReport report = inspect_model(path, options(DType::kF32));
    EXPECT_TRUE(report.missing.empty() && report.left_over.empty());
    const ExpertsQuery& query = report.experts.at(0).second;
    EXPECT_EQ(query.format, format);
    for (const std::string& backend : backends_for(query)) {
      const auto quantized = Model::from_pretrained(path, options(DType::kF32, backend));
      EXPECT_LE(logits_error(*quantized, expected), 1.5e-1) << backend;
    }
  }
};

constexpr const char* kFloatScales = "qwen3_moe_fp8";
constexpr const char* kUe8m0Scales = "qwen3_moe_fp8_ue8m0";

TEST_F(Spellings, NamesOfScales) {
  for (const char* end : {".scale", ".weight_scale"}) {
    SCOPED_TRACE(end);
    Respelt respelt(kFloatScales);
    respelt.rename_ends(".weight_scale_inv", end);
    expect_logits_of(kFloatScales, respelt.checkpoint.write(), StorageFormat::kFp8Block);
  }
}

TEST_F(Spellings, ContainersOfScales) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16, DType::kU8}) {
    SCOPED_TRACE(name_of(dtype));
    Respelt respelt(kUe8m0Scales);
    if (dtype == DType::kF16) {  // holds these down to 2^-14 only: others lie below
      bool fits = true;
      for (const std::string& name : respelt.names_ending("_scale_inv")) {
        const TensorView scales = respelt.checkpoint.tensors.at(name);
        for (int64_t i = 0; i < scales.numel(); ++i) fits = fits && scales.as<uint8_t>()[i] > 103;
      }
      if (!fits) continue;
    }
    respelt.recontain("_scale_inv", dtype);
    const std::string path = respelt.checkpoint.write();
    expect_logits_of(kUe8m0Scales, path, StorageFormat::kFp8Block);
    const ExpertsQuery query = inspect_model(path, options(DType::kF32)).experts.at(0).second;
    EXPECT_EQ(query.scale_layout.dtype, dtype == DType::kU8 ? DType::kF8E8M0 : DType::kF32);
  }
}

TEST_F(Spellings, BlocksOfOtherSizes) {
  const std::pair<int64_t, int64_t> sizes[] = {{64, 64}, {32, 128}, {128, 16}, {1, 128}};
  for (const auto& [rows, cols] : sizes) {
    SCOPED_TRACE(std::to_string(rows) + " x " + std::to_string(cols));
    Respelt respelt(kFloatScales);
    respelt.split_blocks(rows, cols);
    expect_logits_of(kFloatScales, respelt.checkpoint.write(), StorageFormat::kFp8Block);
  }
  Respelt partial("deepseek_v3_fp8");  // with layers for multi-token prediction and partial blocks
  partial.split_blocks(64, 32);
  expect_logits_of("deepseek_v3_fp8", partial.checkpoint.write(), StorageFormat::kFp8Block);
}

TEST_F(Spellings, GroupsOf32AreMxFp8) {
  Respelt respelt(kUe8m0Scales);
  respelt.split_blocks(1, 32);
  expect_logits_of(kUe8m0Scales, respelt.checkpoint.write(), StorageFormat::kMxFp8);
  Respelt named(kUe8m0Scales);
  named.split_blocks(1, 32);
  named.recontain("_scale_inv", DType::kU8);
  named.checkpoint.config["quantization_config"] = {{"quant_method", "mxfp8"}};
  expect_logits_of(kUe8m0Scales, named.checkpoint.write(), StorageFormat::kMxFp8);
}

TEST_F(Spellings, PackedExperts) {
  Respelt respelt(kFloatScales);
  respelt.pack_experts("model.layers.0.mlp.", 4);
  expect_logits_of(kFloatScales, respelt.checkpoint.write(), StorageFormat::kFp8Block);
}

// ---- one scale a matrix, static activations: against a plain checkpoint of the same values
// -------

float e4m3(uint8_t code) {
  const int exponent = code >> 3 & 15;
  const float magnitude = exponent == 0
                              ? std::ldexp(static_cast<float>(code & 7), -9)
                              : std::ldexp(static_cast<float>(8 + (code & 7)), exponent - 10);
  return (code & 128) != 0 ? -magnitude : magnitude;
}

// Each quantised weight with one scale of few bits, and the plain fixture that holds the products.
class OneScaleEach : public Spellings {
 protected:
  OneScaleEach() : quantized_(kFloatScales), plain_(kFloatScales) {
    plain_.checkpoint.config.erase("quantization_config");
    quantized_.checkpoint.config["quantization_config"]["weight_block_size"] = nullptr;
    int i = 0;
    for (const std::string& scales : quantized_.names_ending("_scale_inv")) {
      const std::string name = scales.substr(0, scales.size() - std::string("_scale_inv").size());
      const TensorView codes = quantized_.checkpoint.tensors.at(name);
      const float scale = std::ldexp(++i % 2 == 0 ? 1.5f : 1.25f, -12);
      Tensor& one = quantized_.keep(DType::kF32, {1, 1});
      *one->as<float>() = scale;
      quantized_.checkpoint.tensors[scales] = one.view();
      Tensor& values = plain_.keep(DType::kBF16, codes.shape());
      for (int64_t at = 0; at < codes.numel(); ++at) {
        values->as<BFloat16>()[at] = BFloat16(e4m3(codes.as<uint8_t>()[at]) * scale);  // exact
      }
      plain_.checkpoint.tensors[name] = values.view();
      plain_.checkpoint.tensors.erase(scales);
    }
  }

  // Of a plain checkpoint, in place of stored ones.
  Expected expected() {
    Expected result = read_expected(fixture(kFloatScales) / "expected.safetensors");
    const auto model = Model::from_pretrained(plain_.checkpoint.write(), options(DType::kF32));
    const std::vector<float> logits = all_logits(*model, result.input_ids, result.batch);
    result.logits.assign(logits.begin(), logits.end());
    return result;
  }

  void check(const std::string& path, ActivationScheme scheme) {
    const Expected wanted = expected();
    EXPECT_LE(logits_error(*Model::from_pretrained(path, dequantized(DType::kF32)), wanted), 1e-6);
    const ExpertsQuery query = inspect_model(path, options(DType::kF32)).experts.at(0).second;
    EXPECT_EQ(query.format, StorageFormat::kFp8Tensor);
    EXPECT_EQ(query.activation_scheme, scheme);
    for (const std::string& backend : backends_for(query)) {
      EXPECT_TRUE(scheme != ActivationScheme::kStatic || backend == "eager") << backend;
      const auto model = Model::from_pretrained(path, options(DType::kF32, backend));
      EXPECT_LE(logits_error(*model, wanted), 1.5e-1) << backend;
    }
    if (scheme != ActivationScheme::kStatic || backends_for(query).empty()) return;
    const auto by_default = Model::from_pretrained(path, options(DType::kF32));
    EXPECT_EQ(by_default->get_experts_implementation().at(""), "eager");
  }

  Respelt quantized_;
  Respelt plain_;
};

TEST_F(OneScaleEach, DenseAndExperts) {
  check(quantized_.checkpoint.write(), ActivationScheme::kDynamic);
}

TEST_F(OneScaleEach, Packed) {
  quantized_.pack_experts("model.layers.0.mlp.", 4);  // scales [4, 2, 1] and [4, 1, 1]
  check(quantized_.checkpoint.write(), ActivationScheme::kDynamic);
}

TEST_F(OneScaleEach, StaticActivations) {
  Tensor& scale = quantized_.keep(DType::kF32, {});
  *scale->as<float>() = 0.02f;
  for (const std::string& name : quantized_.names_ending("_scale_inv")) {
    const std::string module = name.substr(0, name.size() - std::string("weight_scale_inv").size());
    quantized_.checkpoint.tensors[module + "input_scale"] = scale.view();
  }
  quantized_.checkpoint.config["quantization_config"]["activation_scheme"] = "static";
  check(quantized_.checkpoint.write(), ActivationScheme::kStatic);
}

TEST_F(OneScaleEach, StaticActivationsOfPackedExperts) {
  Tensor& scale = quantized_.keep(DType::kF32, {});
  *scale->as<float>() = 0.02f;
  for (const std::string& name : quantized_.names_ending("_scale_inv")) {
    if (name.find("experts") != std::string::npos) continue;
    const std::string module = name.substr(0, name.size() - std::string("weight_scale_inv").size());
    quantized_.checkpoint.tensors[module + "activation_scale"] = scale.view();
  }
  quantized_.pack_experts("model.layers.0.mlp.", 4);
  Tensor& each = quantized_.keep(DType::kF32, {4});
  std::fill_n(each->as<float>(), 4, 0.02f);
  for (const char* part : {"gate_up_proj", "down_proj"}) {
    quantized_.checkpoint
        .tensors[std::string("model.layers.0.mlp.experts.") + part + "_activation_scale"] =
        each.view();
  }
  quantized_.checkpoint.config["quantization_config"]["activation_scheme"] = "static";
  check(quantized_.checkpoint.write(), ActivationScheme::kStatic);
}

// ---- packed experts with K first (Qwen3-VL on the hub), up beginning inside a block
// ---------------

// Quantises a packed tensor [E, N, K] in blocks of 16 x 16 and stores it as [E, K, N]; the plain
// one gets the products of codes and scales, which are exact.
void quantize_turned(const std::string& name, Respelt& quantized, Respelt& plain) {
  constexpr int64_t kBlock = 16;
  const TensorView from = plain.checkpoint.tensors.at(name);
  const int64_t e = from.dim(0), n = from.dim(1), k = from.dim(2);
  const int64_t rows = (n + kBlock - 1) / kBlock, cols = (k + kBlock - 1) / kBlock;
  Tensor& codes = quantized.keep(DType::kF8E4M3, {e, k, n});
  Tensor& scales = quantized.keep(DType::kF32, {e, cols, rows});
  Tensor& values = plain.keep(DType::kBF16, from.shape());
  for (int64_t i = 0; i < scales->numel(); ++i) {
    scales->as<float>()[i] = std::ldexp(i % 3 == 0 ? 1.5f : 1.0f, -12);
  }
  for (int64_t i = 0; i < from.numel(); ++i) {
    const int64_t expert = i / (n * k), row = i / k % n, col = i % k;
    const float scale = scales->as<float>()[(expert * cols + col / kBlock) * rows + row / kBlock];
    const uint8_t code = float_to_e4m3(static_cast<float>(from.as<BFloat16>()[i]) / scale);
    codes->as<uint8_t>()[(expert * k + col) * n + row] = code;
    values->as<BFloat16>()[i] = BFloat16(e4m3(code) * scale);
  }
  plain.checkpoint.tensors[name] = values.view();
  quantized.checkpoint.tensors[name] = codes.view();
  quantized.checkpoint.tensors[name + "_scale_inv"] = scales.view();
}

TEST_F(Spellings, PackedExpertsWithKFirst) {
  Respelt quantized("qwen3_vl_moe");
  Respelt plain("qwen3_vl_moe");
  quantized.checkpoint.config["quantization_config"] = {{"quant_method", "fp8"},
                                                        {"weight_block_size", {16, 16}}};
  for (const char* part : {".experts.gate_up_proj", ".experts.down_proj"}) {
    for (const std::string& name : plain.names_ending(part)) {
      quantize_turned(name, quantized, plain);
    }
  }
  const std::vector<TokenId> ids = {5, 9, 2, 7, 11, 3};
  const auto logits = [&](const std::string& path, const LoadOptions& options) {
    return all_logits(*Model::from_pretrained(path, options), ids, 1);
  };
  const std::vector<float> found = logits(plain.checkpoint.write(), options(DType::kF32));
  const std::vector<double> wanted(found.begin(), found.end());
  const auto error = [&](const std::vector<float>& got) {
    return relative_error(std::span<const float>(got), std::span<const double>(wanted));
  };
  const std::string path = quantized.checkpoint.write();
  EXPECT_LE(error(logits(path, dequantized(DType::kF32))), 1e-6);
  const ModelReport report = inspect_model(path, options(DType::kF32));
  const auto& [part, query] = report.experts.at(0);
  EXPECT_EQ(part, "text_config");
  EXPECT_TRUE(query.config.is_transposed);
  for (const std::string& backend : backends_for(query)) {
    const double own = error(logits(path, options(DType::kF32, backend)));
    EXPECT_LE(own, 1.5e-1) << backend;
    EXPECT_GT(own, 1e-5) << backend << ": activations are quantised";
  }
}

TEST_F(Spellings, ExclusionsUnderBothNames) {
  for (const char* key : {"modules_to_not_convert", "ignored_layers"}) {
    Respelt respelt(kFloatScales);
    respelt.checkpoint.config["quantization_config"][key] = {"lm_head", "model.layers.*.mlp.gate"};
    respelt.checkpoint.config["quantization_config"]["dequantize"] = true;
    const std::string path = respelt.checkpoint.write();
    const auto model = Model::from_pretrained(path, options(DType::kF32));
    EXPECT_EQ(model->experts_query().format, StorageFormat::kF32) << "its config says dequantize";
  }
}

TEST_F(Spellings, PackedFp4InBytes) {
  Respelt respelt("gpt_oss_mxfp4");
  for (const std::string& name : respelt.names_ending("_blocks")) {
    const TensorView blocks = respelt.checkpoint.tensors.at(name);
    const std::string plain = name.substr(0, name.size() - std::string("_blocks").size());
    respelt.checkpoint.tensors[plain] =
        TensorView(blocks.data(), DType::kI8, {blocks.dim(0), blocks.dim(1), blocks.dim(2) * 16});
    respelt.checkpoint.tensors.erase(name);
  }
  respelt.rename_ends("_scales", "_scale_inv");
  expect_logits_of("gpt_oss_mxfp4", respelt.checkpoint.write(), StorageFormat::kFp4);
}

TEST_F(Spellings, Fp4ScalesInOtherContainers) {
  if (lacks_compressed_ops("deepseek_v4")) GTEST_SKIP() << "no operations of DeepSeek-V4 here";
  for (const DType dtype : {DType::kF32, DType::kU8}) {
    Respelt respelt("deepseek_v4_fp4");
    respelt.recontain(".scale", dtype);
    expect_logits_of("deepseek_v4_fp4", respelt.checkpoint.write(), StorageFormat::kFp4);
  }
}

}  // namespace
}  // namespace cadre::test

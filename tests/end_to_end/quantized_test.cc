// Quantised checkpoints through the command: --dequantize, inspect, backends, and what is refused.
#include "end_to_end/fixtures.h"
#include "io/safetensors.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

const std::vector<std::string> kQuantized = {"qwen3_moe_fp8", "qwen3_moe_fp8_ue8m0",
                                             "deepseek_v3_fp8", "gpt_oss_mxfp4", "deepseek_v4_fp4"};

class QuantizedModels : public testing::TestWithParam<std::string> {};

TEST_P(QuantizedModels, DequantizedLogitsEqualTheStoredOnes) {
  const TempDir folder;
  const auto out = folder / "out.safetensors";
  expect_success(
      run_cadre({"forward", "--model", model_folder(GetParam()), "--inputs",
                 expected_file(GetParam()), "--out", out, "--dtype", "float32", "--dequantize"}));
  EXPECT_LE(relative_error(SafetensorsFile::open(out).tensor("logits"),
                           SafetensorsFile::open(expected_file(GetParam())).tensor("logits")),
            1e-4);
}

TEST_P(QuantizedModels, InspectListsTheFormatsOfEachPart) {
  const nlohmann::json json = json_of(run_cadre({"inspect", model_folder(GetParam()), "--json"}));
  EXPECT_TRUE(json["missing"].empty() && json["left_over"].empty());
  const nlohmann::json experts = json["formats_per_part"]["experts"];
  EXPECT_GT(experts["scales"].get<size_t>(), 0u) << experts;
  const std::string format = json["experts"][""]["format"];
  EXPECT_GT(experts[format].get<size_t>(), experts["scales"].get<size_t>()) << experts;
  size_t formats = 0;
  for (const nlohmann::json& bytes : json["formats"]) formats += bytes.get<size_t>();
  size_t parts = 0;
  for (const nlohmann::json& bytes : json["bytes_per_part"]) parts += bytes.get<size_t>();
  EXPECT_EQ(formats, parts);
  const Result text = run_cadre({"inspect", model_folder(GetParam())});
  expect_success(text);
  EXPECT_NE(text.out.find("stored as " + format), std::string::npos) << text.out;
  EXPECT_NE(text.out.find("scales of "), std::string::npos) << text.out;
}

TEST_P(QuantizedModels, BackendsAnswersForTheirFormat) {
  const nlohmann::json json =
      json_of(run_cadre({"backends", "--model", model_folder(GetParam()), "--json"}));
  for (const nlohmann::json& row : json["backends"]) {
    EXPECT_EQ(row["runs"].get<bool>(), row["reasons"].empty()) << row;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, QuantizedModels, testing::ValuesIn(kQuantized));

TEST(QuantizedFiles, FaultsHaveTheirExitCodes) {
  const TempDir folder;
  const auto model = copy_model("qwen3_moe_fp8", folder);
  const auto generate = [&] {
    return run_cadre({"generate", "--model", model, "--input-ids", expected_file("qwen3_moe_fp8"),
                      "--max-new-tokens", "1", "--dequantize"});
  };
  set_config(model, "quantization_config", {{"quant_method", "gptq"}});
  expect_failure(generate(), 4, {"quant_method", "gptq", "fp8, mxfp8, mxfp4"});
  set_config(model, "quantization_config",
             {{"quant_method", "fp8"}, {"weight_block_size", {64, 64}}});
  expect_failure(generate(), 3, {"_scale_inv", "expected shape", "64 x 64"});
  set_config(model, "quantization_config", nullptr);
  expect_failure(generate(), 3, {"float8_e4m3", "quantization_config"});
}

}  // namespace
}  // namespace cadre::test

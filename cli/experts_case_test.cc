#include "experts_case.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <map>
#include <vector>

#include "cadre/error.h"
#include "io/safetensors.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre::cli {
namespace {

namespace fs = std::filesystem;

// A case that is right, and that each test spoils in one place.
struct CaseFile {
  std::map<std::string, std::string> metadata = {
      {"num_experts", "2"},     {"hidden_size", "3"},       {"intermediate_size", "4"},
      {"top_k", "1"},           {"hidden_act", "\"silu\""}, {"has_gate", "true"},
      {"has_bias", "false"},    {"is_transposed", "false"}, {"is_concatenated", "true"},
      {"swiglu_limit", "null"}, {"swiglu_alpha", "null"},   {"route", "\"random\""},
      {"sentinel", "false"}};
  std::map<std::string, Tensor> tensors = {{"hidden_states", Tensor(DType::kF32, {5, 3})},
                                           {"top_k_index", Tensor(DType::kI32, {5, 1})},
                                           {"top_k_weights", Tensor(DType::kF32, {5, 1})},
                                           {"gate_up_proj", Tensor(DType::kBF16, {2, 8, 3})},
                                           {"down_proj", Tensor(DType::kBF16, {2, 3, 4})}};

  CaseFile() {
    for (auto& [name, tensor] : tensors) fill(tensor);
  }
  static void fill(const Tensor& tensor) {
    std::fill_n(static_cast<char*>(tensor->mutable_data()), tensor->nbytes(), 0);
  }
  void put(const std::string& name, DType dtype, const Dims& shape) {
    tensors[name] = Tensor(dtype, shape);
    fill(tensors[name]);
  }
  fs::path write(const test::TempDir& folder) const {
    std::vector<NamedTensor> list;
    for (const auto& [name, tensor] : tensors) list.push_back({name, tensor});
    write_safetensors(folder / "case.safetensors", list, metadata);
    return folder / "case.safetensors";
  }
};

std::string error_of(const CaseFile& file) {
  const test::TempDir folder;
  try {
    read_experts_case(file.write(folder));
  } catch (const CheckpointError& error) {
    EXPECT_NE(std::string(error.what()).find("case.safetensors"), std::string::npos)
        << error.what();
    return error.what();
  }
  return "no error";
}

#define EXPECT_NAMES(file, part) \
  EXPECT_NE(error_of(file).find(part), std::string::npos) << error_of(file)

TEST(ExpertsCase, ReadsFlagsWeightsAndTokens) {
  CaseFile file;
  file.metadata["swiglu_limit"] = "7.0";
  file.metadata["format"] = "pt";  // what some writers add; not JSON text
  const test::TempDir folder;
  const ExpertsCase result = read_experts_case(file.write(folder));
  EXPECT_EQ(result.config.num_experts, 2);
  EXPECT_EQ(result.config.swiglu_limit, 7.0f);
  EXPECT_FALSE(result.config.swiglu_alpha.has_value());
  EXPECT_EQ(result.format, StorageFormat::kBF16);
  EXPECT_EQ(result.weights->gate.size(), 2u);
  EXPECT_EQ(result.hidden_states.shape(), (Dims{5, 3}));
  EXPECT_FALSE(result.expected_output);
}

TEST(ExpertsCase, ReadsEveryStoredFixture) {
  int count = 0;
  for (const auto& entry : fs::directory_iterator(CADRE_TEST_DATA "/experts")) {
    if (entry.path().extension() != ".safetensors") continue;
    EXPECT_TRUE(read_experts_case(entry.path()).expected_output) << entry.path();
    ++count;
  }
  EXPECT_GE(count, 20);
}

TEST(ExpertsCase, NamesMetadataThatIsMissingUnknownOrNoJson) {
  CaseFile file;
  file.metadata.erase("has_bias");
  EXPECT_NAMES(file, "\"has_bias\" is missing");
  file = CaseFile();
  file.metadata["hidden_sizes"] = "3";
  EXPECT_NAMES(file, "unknown key \"hidden_sizes\"");
  file = CaseFile();
  file.metadata["hidden_act"] = "silu";
  EXPECT_NAMES(file, "hidden_act");
  file = CaseFile();
  file.metadata["top_k"] = "\"one\"";
  EXPECT_NAMES(file, "top_k");
}

TEST(ExpertsCase, MoreExpertsPerTokenThanThereAreIsTheFilesFault) {
  CaseFile file;
  file.metadata["top_k"] = "3";
  EXPECT_NAMES(file, "top_k");
}

TEST(ExpertsCase, AnActivationThatIsNotServedNamesTheFile) {
  const test::TempDir folder;
  CaseFile file;
  file.metadata["hidden_act"] = "\"xielu\"";
  const std::string path = file.write(folder).string();
  test::expect_error<Unsupported>([&] { read_experts_case(path); }, {path, "xielu"});
}

TEST(ExpertsCase, NamesTensorsThatAreMissingOrUnexpected) {
  CaseFile file;
  file.tensors.erase("down_proj");
  EXPECT_NAMES(file, "down_proj");
  file = CaseFile();
  file.put("up_proj", DType::kBF16, {2, 4, 3});
  EXPECT_NAMES(file, "unexpected tensor up_proj");
  file = CaseFile();
  file.metadata["has_bias"] = "true";
  EXPECT_NAMES(file, "gate_up_proj_bias");
}

TEST(ExpertsCase, NamesTensorsOfAnotherShapeOrDtype) {
  CaseFile file;
  file.put("hidden_states", DType::kF32, {5, 4});
  EXPECT_NAMES(file, "expected hidden_states: float32, bfloat16 or float16 [5, 3]");
  file = CaseFile();
  file.put("top_k_index", DType::kI32, {5, 2});
  EXPECT_NAMES(file, "top_k_index");
  file = CaseFile();
  file.put("top_k_index", DType::kF32, {5, 1});
  EXPECT_NAMES(file, "int64 or int32");
  file = CaseFile();
  file.put("top_k_weights", DType::kF32, {4, 1});
  EXPECT_NAMES(file, "top_k_weights");
  file = CaseFile();
  file.put("gate_up_proj", DType::kBF16, {2, 7, 3});
  EXPECT_NAMES(file, "gate_up_proj");
  file = CaseFile();
  file.put("down_proj", DType::kI64, {2, 3, 4});
  EXPECT_NAMES(file, "down_proj");
  file = CaseFile();
  file.put("output", DType::kF32, {5, 1});
  EXPECT_NAMES(file, "output");
}

}  // namespace
}  // namespace cadre::cli

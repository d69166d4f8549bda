// cadre experts: every stored case on every backend.
#include "end_to_end/fixtures.h"
#include "io/safetensors.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

const fs::path kCases = CADRE_TEST_DATA "/experts";

double error_of(const fs::path& file, const std::string& backend, const std::string& dtype) {
  const TempDir folder;
  const fs::path out = folder / "out.safetensors";
  const Result result =
      run_cadre({"experts", file, "--out", out, "--experts", backend, "--dtype", dtype, "--json"});
  expect_success(result);
  const SafetensorsFile input = SafetensorsFile::open(file);
  const TensorView expected = input.tensor("output");
  EXPECT_EQ(read_shape(out, "output"), expected.shape());
  const double error = relative_error(SafetensorsFile::open(out).tensor("output"), expected);
  EXPECT_NEAR(json_of(result)["relative_error"].get<double>(), error, 1e-9);
  return error;
}

class ExpertsBackends : public testing::TestWithParam<std::string> {};

TEST_P(ExpertsBackends, EveryStoredCaseIsWithinTheBoundsOfItsDtype) {
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(kCases)) {
    if (entry.path().extension() != ".safetensors") continue;
    SCOPED_TRACE(entry.path().filename());
    EXPECT_LE(error_of(entry.path(), GetParam(), "auto"), 1e-5);
    EXPECT_LE(error_of(entry.path(), GetParam(), "bfloat16"), 4e-3);
    EXPECT_LE(error_of(entry.path(), GetParam(), "float16"), 1e-3);
    ++count;
  }
  EXPECT_GE(count, 20);
}

INSTANTIATE_TEST_SUITE_P(Cpu, ExpertsBackends, testing::ValuesIn(kCpuBackends));

TEST(Experts, TheBackendMustBeNamed) {
  const fs::path file = kCases / "plain.safetensors";
  const std::vector<std::string> call = {"experts", file, "--out", "/dev/null"};
  expect_failure(run_cadre(call), 2, {"--experts", "eager", "got nothing"});
  expect_success(run_cadre({"experts", file, "--out", "/dev/null", "--json"},
                           {.environment = {{"CADRE_EXPERTS_IMPLEMENTATION", "eager"}}}));
  expect_failure(run_cadre({"experts", file, "--out", "/dev/null", "--experts", "fast"}), 2,
                 {"\"fast\"", "grouped_mm"});
  expect_failure(
      run_cadre({"experts", file, "--out", "/dev/null", "--experts", R"({"text_config":"eager"})"}),
      2, {"--experts", "map"});
}

TEST(Experts, AModelIsRefusedRatherThanIgnored) {
  const fs::path file = kCases / "plain.safetensors";
  const std::vector<std::string> call = {"experts",   file,    "--out",  "/dev/null",
                                         "--experts", "eager", "--model"};
  for (const std::string model : {"/no/such", CADRE_ASSETS "/tiny-moe"}) {
    std::vector<std::string> arguments = call;
    arguments.push_back(model);
    expect_failure(run_cadre(arguments), 2, {"--model " + model, "CASE"});
  }
}

TEST(Experts, ABackendThatCannotRunSaysWhyAndNamesOthers) {
  const fs::path file = kCases / "plain.safetensors";
  for (const char* name : {"sonicmoe", "deepgemm_megamoe"}) {
    expect_failure(run_cadre({"experts", file, "--out", "/dev/null", "--experts", name}), 4,
                   {name});
  }
  expect_failure(run_cadre({"experts", file, "--out", "/dev/null", "--experts", "eager", "--device",
                            kMissingGpu}),
                 4, {"eager", "cuda"});
}

TEST(Experts, ADamagedCaseIsNamed) {
  const TempDir folder;
  const SafetensorsFile plain = SafetensorsFile::open(kCases / "plain.safetensors");
  std::vector<NamedTensor> tensors;
  for (const SafetensorsEntry& entry : plain.header().entries) {
    tensors.push_back({entry.name, plain.view(entry)});
  }
  const auto fails = [&](const std::map<std::string, std::string>& metadata,
                         const std::vector<std::string>& parts) {
    const fs::path file = folder / "case.safetensors";
    write_safetensors(file, tensors, metadata);
    expect_failure(run_cadre({"experts", file, "--out", "/dev/null", "--experts", "eager"}), 3,
                   parts);
  };
  std::map<std::string, std::string> metadata = plain.header().metadata;
  metadata["top_k"] = "9";
  fails(metadata, {"case.safetensors", "top_k", "9", "8"});
  metadata = plain.header().metadata;
  metadata.erase("num_experts");
  fails(metadata, {"case.safetensors", "\"num_experts\" is missing"});
  metadata = plain.header().metadata;
  metadata["colour"] = "1";
  fails(metadata, {"case.safetensors", "\"colour\""});
  metadata = plain.header().metadata;
  tensors.erase(tensors.begin());
  fails(metadata, {"case.safetensors", plain.header().entries.front().name});
}

}  // namespace
}  // namespace cadre::test

// cadre backends and cadre inspect: answers without reading a weight.
#include <algorithm>
#include <set>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

TEST(Backends, EveryNameOfTheSpecificationIsListedForBothDevicesWithItsAnswer) {
  const Result result = run_cadre({"backends", "--json"});
  expect_success(result);
  std::vector<std::string> names;
  const nlohmann::json json = json_of(result);
  for (const nlohmann::json& row : json["backends"]) {
    EXPECT_NE(row["runs"].get<bool>(), row["formats"].empty());
    EXPECT_EQ(row["runs"].get<bool>(), row["reasons"].empty()) << row;
    if (row["device"] == "cpu") names.push_back(row["name"]);
  }
  EXPECT_EQ(names, (std::vector<std::string>{"eager", "batched_mm", "grouped_mm", "deepgemm",
                                             "deepgemm_megamoe", "sonicmoe"}));
}

TEST(Backends, TheCpuRunsThreeInEveryPlainFormatAndDtype) {
  const Result result = run_cadre({"backends", "--json"});
  const std::set<std::string> plain = {"float32", "bfloat16", "float16"};
  const nlohmann::json json = json_of(result);
  for (const nlohmann::json& row : json["backends"]) {
    const std::string name = row["name"];
    if (row["device"] != "cpu") {
      EXPECT_FALSE(row["runs"].get<bool>() && json["gpus"].empty());
      continue;
    }
    if (std::find(kCpuBackends.begin(), kCpuBackends.end(), name) == kCpuBackends.end()) continue;
    const std::set<std::string> formats = row["formats"];
    EXPECT_TRUE(std::includes(formats.begin(), formats.end(), plain.begin(), plain.end())) << row;
    EXPECT_EQ(row["dtypes"].get<std::set<std::string>>(), plain);
  }
}

TEST(Backends, EachGpuIsDescribedOrItIsSaidWhyThereIsNone) {
  const nlohmann::json json = json_of(run_cadre({"backends", "--json"}));
  EXPECT_EQ(json["gpus"].empty(), json.contains("why_no_gpu")) << json;
  EXPECT_EQ(json["gpus"].empty(), !json.contains("gpu_products")) << json;
  for (const nlohmann::json& gpu : json["gpus"]) {
    EXPECT_TRUE(gpu["device"].get<std::string>().starts_with("cuda:"));
    EXPECT_FALSE(gpu["name"].get<std::string>().empty());
    EXPECT_LE(gpu["free_bytes"].get<uint64_t>(), gpu["total_bytes"].get<uint64_t>());
  }
  const std::string text = run_cadre({"backends"}).out;
  const std::string expected = json["gpus"].empty()
                                   ? "GPU: none (" + json["why_no_gpu"].get<std::string>() + ")"
                                   : json["gpus"][0]["name"].get<std::string>();
  EXPECT_NE(text.find(expected), std::string::npos) << text;
}

TEST(Backends, TheTableNamesTheReasons) {
  const Result result = run_cadre({"backends"});
  expect_success(result);
  for (const char* part : {"why not", "grouped_mm", "sonicmoe", "cuda"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << result.out;
  }
}

TEST(Backends, WithAModelTheAnswerIsForItsExperts) {
  const Result result = run_cadre({"backends", "--model", model_folder("qwen3_moe"), "--json"});
  expect_success(result);
  const nlohmann::json json = json_of(result);
  EXPECT_EQ(json["model"]["architecture"], "Qwen3MoeForCausalLM");
  for (const nlohmann::json& row : json["backends"]) {
    EXPECT_EQ(row["sub_config"], "");
    EXPECT_EQ(row["runs"].get<bool>(), row["reasons"].empty());
    EXPECT_EQ(row["runs"].get<bool>(), !row["formats"].empty());
    const bool is_cpu_eager = row["name"] == "eager" && row["device"] == "cpu";
    EXPECT_TRUE(row["runs"].get<bool>() || !is_cpu_eager);
  }
  expect_success(run_cadre({"backends", "--model", model_folder("qwen3_moe")}));
  expect_failure(run_cadre({"backends", "--model", "/no/such/folder"}), 3, {"/no/such/folder"});
}

TEST(Backends, TheModelMayBeAnArgument) {
  const std::string model = model_folder("qwen3_moe");
  const auto answers = [](const Result& result) { return json_of(result)["backends"]; };
  EXPECT_EQ(answers(run_cadre({"backends", model, "--json"})),
            answers(run_cadre({"backends", "--model", model, "--json"})));
  expect_failure(run_cadre({"backends", model, "--model", model}), 2, {"one model", model});
}

TEST(Backends, DeviceExpertsAndDtypeChooseWhatIsListed) {
  const auto rows = [](const std::vector<std::string>& options) {
    std::vector<std::string> call = {"backends", "--json"};
    call.insert(call.end(), options.begin(), options.end());
    return json_of(run_cadre(call))["backends"];
  };
  EXPECT_EQ(rows({}).size(), 12u);
  const nlohmann::json cuda = rows({"--device", "cuda"});
  EXPECT_EQ(cuda.size(), 6u);
  for (const nlohmann::json& row : cuda) {
    EXPECT_EQ(row["device"], "cuda");
    EXPECT_FALSE(row["reasons"].empty());
  }
  EXPECT_EQ(rows({"--device", "cpu", "--model", model_folder("olmoe")}).size(), 6u);
  const nlohmann::json eager = rows({"--device", "cpu", "--experts", "eager"});
  ASSERT_EQ(eager.size(), 1u);
  EXPECT_EQ(eager[0]["name"], "eager");
  EXPECT_EQ(rows({"--dtype", "float16", "--experts", "eager"})[0]["dtypes"],
            nlohmann::json::array({"float16"}));
}

TEST(Backends, TheInstructionSetIsNamedAndChecked) {
  const RunOptions portable{.environment = {{"CADRE_CPU_ISA", "portable"}}};
  EXPECT_EQ(json_of(run_cadre({"backends", "--json"}, portable))["cpu_isa"], "portable");
  const Result table = run_cadre({"backends"}, portable);
  EXPECT_NE(table.out.find("CPU instruction set: portable"), std::string::npos) << table.out;
  const RunOptions wrong{.environment = {{"CADRE_CPU_ISA", "sse9"}}};
  for (const std::vector<std::string>& call :
       {std::vector<std::string>{"backends"}, {"backends", "--json"}, {"generate", "x"}}) {
    expect_failure(run_cadre(call, wrong), 2, {"CADRE_CPU_ISA", "\"sse9\"", "avx2"});
  }
}

class InspectModels : public testing::TestWithParam<std::string> {};

TEST_P(InspectModels, EveryTensorIsUsed) {
  const Result result = run_cadre({"inspect", model_folder(GetParam()), "--json"});
  expect_success(result);
  const nlohmann::json json = json_of(result);
  EXPECT_EQ(json["model_type"], GetParam());
  EXPECT_GT(json["used"].size(), 10u);
  EXPECT_TRUE(json["missing"].empty());
  EXPECT_TRUE(json["left_over"].empty());
  EXPECT_GT(json["bytes_per_part"]["experts"], 0);
  EXPECT_EQ(json["experts"][""]["format"], "bfloat16");
  size_t used = 0;
  for (const nlohmann::json& tensor : json["used"]) used += tensor["bytes"].get<size_t>();
  size_t parts = 0;
  for (const nlohmann::json& bytes : json["bytes_per_part"]) parts += bytes.get<size_t>();
  EXPECT_EQ(used, parts);
}

INSTANTIATE_TEST_SUITE_P(Fixtures, InspectModels, testing::ValuesIn(kModels));

TEST(Inspect, WithoutAModelShowsTheBundledOne) {
  const Result result = run_cadre({"inspect"});
  expect_success(result);
  for (const char* part : {"Qwen3MoeForCausalLM", "16 experts, 4 per token", "3 layers",
                           "vocabulary 4096", "0 missing, 0 left over", "total"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part << "\n" << result.out;
  }
  const nlohmann::json json = json_of(run_cadre({"inspect", "--json"}));
  EXPECT_EQ(json["experts"][""]["num_experts"], 16);
  EXPECT_EQ(json["experts"][""]["intermediate_size"], 128);
  EXPECT_EQ(json["eos_token_ids"], nlohmann::json::array({0}));
}

TEST(Inspect, TensorsListsEachOne) {
  const Result plain = run_cadre({"inspect", "--model", model_folder("olmoe")});
  const Result listed = run_cadre({"inspect", "--model", model_folder("olmoe"), "--tensors"});
  expect_success(listed);
  const std::string name = "model.layers.0.mlp.experts.0.down_proj.weight";
  EXPECT_EQ(plain.out.find(name), std::string::npos);
  EXPECT_NE(listed.out.find(name), std::string::npos);
}

TEST(Inspect, ReadsAHubIdFromTheLocalCacheAtMainOrARevision) {
  const TempDir cache;
  const auto repository = cache / "models--me--tiny";
  std::filesystem::create_directories(repository / "refs");
  std::filesystem::create_directories(repository / "snapshots" / "abc");
  const auto model = copy_model("olmoe", cache);
  for (const auto& entry : std::filesystem::directory_iterator(model)) {
    std::filesystem::copy_file(entry.path(),
                               repository / "snapshots" / "abc" / entry.path().filename());
  }
  write_file(repository / "refs" / "main", "abc");
  write_file(repository / "refs" / "v2", "def");
  const RunOptions options{.environment = {{"HF_HUB_CACHE", cache.path()}}};
  expect_success(run_cadre({"inspect", "me/tiny"}, options));
  expect_success(run_cadre({"inspect", "me/tiny", "--revision", "abc"}, options));
  expect_failure(run_cadre({"inspect", "me/tiny", "--revision", "v2"}, options), 3, {"me/tiny"});
  expect_failure(run_cadre({"inspect", "me/other"}, options), 3,
                 {"me/other", cache.path().string(), "download"});
}

TEST(Inspect, TheBundledModelIsFoundThroughTheEnvironment) {
  const TempDir folder;
  const RunOptions options{.environment = {{"CADRE_ASSETS", folder.path()}}};
  expect_failure(run_cadre({"inspect"}, options), 3,
                 {"bundled model", folder.path().string(), "CADRE_ASSETS", "--model"});
}

}  // namespace
}  // namespace cadre::test

// cadre generate: continuations equal to the stored ones, every option, and what comes out where.
#include <algorithm>
#include <sstream>

#include "end_to_end/fixtures.h"
#include "io/safetensors.h"

namespace cadre::test {
namespace {

const std::string kTinyData = CADRE_TEST_DATA "/tiny-moe/";

std::vector<std::string> with(std::vector<std::string> arguments,
                              const std::vector<std::string>& more) {
  arguments.insert(arguments.end(), more.begin(), more.end());
  return arguments;
}

/// The continuation of a fixed prompt by the bundled model.
std::string continuation(const std::vector<std::string>& options) {
  const Result result =
      run_cadre(with({"generate", "The king said", "--max-new-tokens", "24"}, options));
  expect_success(result);
  return result.out;
}

class GenerateModels : public testing::TestWithParam<std::string> {};

TEST_P(GenerateModels, GreedyIdsEqualTheStoredOnesOnEveryBackend) {
  for (const std::string& backend : kCpuBackends) {
    const TempDir folder;
    const auto out = folder / "out.safetensors";
    expect_success(run_cadre({"generate", "--model", model_folder(GetParam()), "--input-ids",
                              expected_file(GetParam()), "--out", out, "--max-new-tokens", "12",
                              "--ignore-eos", "--dtype", "float32", "--experts", backend}));
    EXPECT_EQ(read_shape(out, "output_ids"), (Dims{2, 12}));
    EXPECT_EQ(read_tensor(out, "output_ids"), read_tensor(expected_file(GetParam()), "greedy_ids"))
        << backend;
    EXPECT_EQ(SafetensorsFile::open(out).tensor("output_ids").dtype(), DType::kI64);
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, GenerateModels, testing::ValuesIn(kModels));

TEST(Generate, SixPromptsOfTheBundledModelContinueAsStored) {
  const auto expected = nlohmann::json::parse(read_file(kTinyData + "expected.json"));
  for (size_t i = 0; i < 6; ++i) {
    const std::string prompt = expected["prompts"][i];
    const Result result = run_cadre({"generate", prompt, "--max-new-tokens", "48", "--ignore-eos",
                                     "--dtype", "float32", "--json"});
    expect_success(result);
    const nlohmann::json json = json_of(result);
    const std::string name = "prompt" + std::to_string(i) + ".greedy_ids";
    EXPECT_EQ(json["output_ids"][0].get<std::vector<double>>(),
              read_tensor(kTinyData + "expected.safetensors", name));
    EXPECT_EQ(prompt + json["text"].get<std::string>(), expected["greedy_text"][i]);
    EXPECT_EQ(json["finish_reasons"][0], "length");
  }
}

TEST(Generate, PrintsTheContinuationAloneAndEndsTheLine) {
  const auto expected = nlohmann::json::parse(read_file(kTinyData + "expected.json"));
  const std::string prompt = expected["prompts"][3];
  const Result result = run_cadre(
      {"generate", prompt, "--max-new-tokens", "48", "--ignore-eos", "--dtype", "float32"});
  expect_success(result);
  EXPECT_EQ(prompt + result.out, expected["greedy_text"][3].get<std::string>() + "\n");
}

TEST(Generate, APromptMayComeFromStandardInputOrLookLikeAnything) {
  EXPECT_EQ(run_cadre({"generate", "-", "--max-new-tokens", "24"}, {.input = "The king said"}).out,
            continuation({}));
  for (const std::string prompt : {"eval", "[1,2]", "a=b", "--x", "\xff\xfe"}) {
    const Result result = run_cadre({"generate", "--max-new-tokens", "2", "--", prompt});
    expect_success(result);
    EXPECT_NE(result.out, "");
  }
}

TEST(Generate, NeedsAPromptAndOneThatIsNotEmpty) {
  expect_failure(run_cadre({"generate"}), 2, {"PROMPT", "--input-ids"});
  expect_failure(run_cadre({"generate", ""}), 2, {"prompt"});
}

TEST(Generate, AllBackendsThreadsAndNeutralOptionsGiveTheSameText) {
  const std::string text = continuation({"--dtype", "float32"});
  const std::vector<std::vector<std::string>> variants = {
      {"--experts", "eager"},
      {"--experts", "batched_mm"},
      {"--experts", "grouped_mm"},
      {"--experts", R"({"":"eager"})"},
      {"--threads", "1"},
      {"--threads", "2"},
      {"--device", "cpu"},
      {"--prepack", "off"},
      {"--prepack", "on"},
      {"--prepack", "on", "--experts", "eager"},
      {"--prepack", "auto"},
      {"--dequantize"},
      {"--decode-experts", "off"},
      {"--decode-experts", "8"},
      {"--no-graph"},
      {"--quiet"},
      {"--seed", "5"},
      {"--repetition-penalty", "1"},
      {"--temperature", "0"},
      {"--temperature", "0.7", "--top-k", "1"},
      {"--temperature", "0.7", "--top-p", "0.0001"},
      {"--temperature", "0.7", "--min-p", "1"},
      {"--model", CADRE_ASSETS "/tiny-moe"}};
  for (const std::vector<std::string>& variant : variants) {
    SCOPED_TRACE(variant.front());
    EXPECT_EQ(continuation(with({"--dtype", "float32"}, variant)), text);
  }
}

TEST(Generate, DrawsAreSetByTheSeed) {
  const auto draw = [](const char* seed) {
    return continuation({"--temperature", "1.5", "--top-k", "200", "--seed", seed});
  };
  EXPECT_EQ(draw("7"), draw("7"));
  EXPECT_NE(draw("7"), draw("8"));
}

TEST(Generate, TheRepetitionPenaltyChangesTheText) {
  EXPECT_NE(continuation({"--repetition-penalty", "1.8"}), continuation({}));
}

TEST(Generate, CutsWithoutATemperatureAreSaidToDoNothing) {
  const Result result = run_cadre({"generate", "x", "--top-k", "5", "--max-new-tokens", "1"});
  EXPECT_EQ(result.exit_code, 0);
  EXPECT_NE(result.err.find("--temperature"), std::string::npos);
  expect_success(run_cadre({"generate", "x", "--top-k", "5", "--max-new-tokens", "1", "--quiet"}));
}

TEST(Generate, TheBackendCanBeChosenByTheEnvironmentAndTheOptionWins) {
  const auto experts = [](const std::vector<std::string>& options) {
    const Result result =
        run_cadre(with({"generate", "x", "--max-new-tokens", "2", "--json", "--stats"}, options),
                  {.environment = {{"CADRE_EXPERTS_IMPLEMENTATION", "batched_mm"}}});
    expect_success(result);
    return json_of(result)["stats"]["prefill_experts"].get<std::string>();
  };
  EXPECT_EQ(experts({}), "batched_mm");
  EXPECT_EQ(experts({"--experts", "eager"}), "eager");
}

TEST(Generate, StatsNameRatesBackendsAndMemory) {
  const Result text = run_cadre({"generate", "Call me", "--max-new-tokens", "4", "--stats"});
  EXPECT_EQ(text.exit_code, 0);
  for (const char* part : {"prefill", "decode", "tokens/s", "grouped_mm", "KV cache", "cpu:"}) {
    EXPECT_NE(text.err.find(part), std::string::npos) << text.err;
  }
  const nlohmann::json stats = json_of(
      run_cadre({"generate", "Call me", "--max-new-tokens", "4", "--stats", "--json"}))["stats"];
  EXPECT_EQ(stats["prompt_tokens"], 3);
  EXPECT_EQ(stats["prefill_experts"], "grouped_mm");
  EXPECT_EQ(stats["decode_experts"], "grouped_mm");
  EXPECT_EQ(stats["cpu_isa"], json_of(run_cadre({"backends", "--json"}))["cpu_isa"]);
  EXPECT_GT(stats["prefill_tokens_per_second"], 0);
  EXPECT_GT(stats["decode_tokens_per_second"], 0);
  EXPECT_GT(stats["mapped_bytes"], 12'000'000);
  EXPECT_GT(stats["kv_cache_bytes"], 0);
  EXPECT_GT(stats["workspace_bytes"], 0);
}

TEST(Generate, InputIdsOfEitherWidthArePrintedWhenThereIsNoOut) {
  const TempDir folder;
  const std::string model = model_folder("olmoe");
  std::vector<std::string> texts;
  for (const DType dtype : {DType::kI64, DType::kI32}) {
    const auto file =
        write_input_ids(folder / "ids.safetensors", {2, 3}, {5, 6, 7, 8, 9, 1}, dtype);
    const Result result = run_cadre({"generate", "--model", model, "--input-ids", file,
                                     "--max-new-tokens", "3", "--ignore-eos"});
    expect_success(result);
    texts.push_back(result.out);
  }
  EXPECT_EQ(texts[0], texts[1]);
  std::istringstream numbers(texts[0]);
  int count = 0;
  for (int64_t id = 0; numbers >> id; ++count) EXPECT_LT(id, 256);
  EXPECT_EQ(count, 6);
}

TEST(Generate, ASequenceThatMeetsItsEndRepeatsTheEndTokenInOut) {
  const TempDir folder;
  const auto model = copy_model("mixtral", folder);
  const auto greedy = read_tensor(expected_file("mixtral"), "greedy_ids");
  // The fourth greedy token of the first sequence becomes its end.
  const auto eos = static_cast<int64_t>(greedy[3]);
  write_file(model / "generation_config.json", nlohmann::json{{"eos_token_id", {eos, 255}}}.dump());
  const auto out = folder / "out.safetensors";
  expect_success(run_cadre({"generate", "--model", model, "--input-ids", expected_file("mixtral"),
                            "--out", out, "--max-new-tokens", "12", "--dtype", "float32"}));
  EXPECT_EQ(read_shape(out, "output_ids"), (Dims{2, 12}));
  const std::vector<double> ids = read_tensor(out, "output_ids");
  const auto first_end = std::find(greedy.begin(), greedy.begin() + 12, greedy[3]);
  const auto length = static_cast<size_t>(first_end - greedy.begin()) + 1;
  for (size_t i = 0; i < 12; ++i) EXPECT_EQ(ids[i], i < length ? greedy[i] : greedy[3]) << i;
}

TEST(Generate, OptionsThatDoNotGoTogetherAreRefused) {
  const std::string file = expected_file("olmoe");
  expect_failure(run_cadre({"generate", "x", "--input-ids", file}), 2, {"--input-ids"});
  expect_failure(run_cadre({"generate", "x", "--out", "o"}), 2, {"--out", "--input-ids"});
  for (const char* option :
       {"--temperature", "--top-k", "--top-p", "--min-p", "--repetition-penalty"}) {
    expect_failure(run_cadre({"generate", "--input-ids", file, option, "1"}), 2, {option});
  }
}

TEST(Generate, ChatAndImageAreRefusedByModelsWithout) {
  expect_failure(run_cadre({"generate", "x", "--chat"}), 4,
                 {"--chat", "chat template", "tiny-moe"});
  expect_failure(run_cadre({"generate", "x", "--image", "cat.png"}), 4,
                 {"--image cat.png", "qwen3_moe", "vision"});
}

TEST(Generate, APromptLongerThanTheContextIsRefused) {
  std::string prompt;
  for (int i = 0; i < 3000; ++i) prompt += "word ";
  expect_failure(run_cadre({"generate", prompt}), 2, {"2048"});
  const TempDir folder;
  const auto ids = write_input_ids(folder / "ids.safetensors", {1, 5000}, {1});
  expect_failure(run_cadre({"generate", "--input-ids", ids}), 2, {"5000", "2048"});
}

TEST(Generate, TheEndOfTheContextEndsTheContinuation) {
  const TempDir folder;
  const auto model = copy_model("qwen3_moe", folder);
  set_config(model, "max_position_embeddings", 10);
  const auto ids = write_input_ids(folder / "ids.safetensors", {1, 7}, {1, 2, 3});
  const auto out = folder / "out.safetensors";
  const std::vector<std::string> call = {"generate", "--model",          model, "--input-ids",
                                         ids,        "--max-new-tokens", "50",  "--ignore-eos"};
  const Result noted = run_cadre(with(call, {"--out", out}));
  EXPECT_EQ(noted.exit_code, 0);
  EXPECT_NE(noted.err.find("the context of 10 tokens is full: stopped after 3 of 50"),
            std::string::npos)
      << noted.err;
  EXPECT_EQ(read_shape(out, "output_ids"), (Dims{1, 3}));
  const Result quiet = run_cadre(with(call, {"--json", "--quiet"}));
  expect_success(quiet);
  EXPECT_EQ(json_of(quiet)["finish_reasons"], nlohmann::json::array({"context"}));
}

}  // namespace
}  // namespace cadre::test

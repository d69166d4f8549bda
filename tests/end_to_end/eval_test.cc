// cadre eval: perplexity of the held-out text as Transformers gives it.
#include <cmath>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

const std::string kTinyData = CADRE_TEST_DATA "/tiny-moe/";

TEST(Eval, PerplexityAndEveryTokensLossEqualTheStoredOnes) {
  const TempDir folder;
  const auto out = folder / "nll.safetensors";
  const Result result = run_cadre(
      {"eval", "--text", kTinyData + "heldout.txt", "--dtype", "float32", "--json", "--out", out});
  expect_success(result);
  const nlohmann::json json = json_of(result);
  EXPECT_NEAR(json["perplexity"].get<double>(), 26.746, 0.005);
  EXPECT_NEAR(json["mean_nll"].get<double>(), 3.2863779, 1e-4);
  EXPECT_EQ(json["num_tokens"], 7 * 511);
  EXPECT_GT(json["left_out_tokens"], 0);
  EXPECT_LT(json["left_out_tokens"], 512);
  const std::vector<double> actual = read_tensor(out, "window_nll");
  const std::vector<double> expected =
      read_tensor(kTinyData + "expected.safetensors", "window_nll");
  EXPECT_EQ(read_shape(out, "window_nll"), (Dims{7, 511}));
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) EXPECT_NEAR(actual[i], expected[i], 1e-4) << i;
}

TEST(Eval, PackedExpertsGiveTheSameNumbers) {
  const std::string text = read_file(kTinyData + "heldout.txt").substr(0, 2000);
  const auto eval = [&](const char* prepack) {
    const Result result =
        run_cadre({"eval", "--text", "-", "--window", "128", "--prepack", prepack, "--json"},
                  {.input = text});
    expect_success(result);
    return json_of(result);
  };
  EXPECT_EQ(eval("on")["perplexity"], eval("off")["perplexity"]);
}

TEST(Eval, TheWindowIsTheUsersAndTheTextMayComeFromStandardInput) {
  const std::string text = read_file(kTinyData + "heldout.txt").substr(0, 2000);
  const auto eval = [&](const char* window) {
    const Result result =
        run_cadre({"eval", "--text", "-", "--window", window, "--dtype", "float32", "--json"},
                  {.input = text});
    expect_success(result);
    return json_of(result);
  };
  const nlohmann::json large = eval("256");
  const nlohmann::json small = eval("32");
  EXPECT_EQ(large["window"], 256);
  EXPECT_EQ(small["num_tokens"].get<int64_t>(), small["num_windows"].get<int64_t>() * 31);
  // Both windows see the same text.
  const auto total = [](const nlohmann::json& json) {
    return json["num_windows"].get<int64_t>() * json["window"].get<int64_t>() +
           json["left_out_tokens"].get<int64_t>();
  };
  EXPECT_EQ(total(large), total(small));
  EXPECT_GT(small["mean_nll"].get<double>(), large["mean_nll"].get<double>());  // less context
}

TEST(Eval, PrintsALineForPeople) {
  const Result result =
      run_cadre({"eval", "--text", kTinyData + "heldout.txt", "--window", "1024"});
  expect_success(result);
  EXPECT_EQ(result.out.rfind("perplexity ", 0), 0u) << result.out;
  EXPECT_NE(result.out.find("left out"), std::string::npos) << result.out;
}

TEST(Eval, ATextShorterThanAWindowOrMissingIsNamed) {
  const TempDir folder;
  const auto text = folder.write("short.txt", "Call me");
  expect_failure(run_cadre({"eval", "--text", text}), 2,
                 {"--window 512", "short.txt", "3", "smaller"});
  expect_failure(run_cadre({"eval", "--text", folder / "none.txt"}), 3,
                 {"none.txt", "No such file"});
  expect_failure(run_cadre({"eval", "--text", text, "--window", "4096"}), 2, {"4096", "2048"});
  expect_failure(run_cadre({"eval", "--text", folder.path()}), 3, {folder.path().string()});
}

}  // namespace
}  // namespace cadre::test

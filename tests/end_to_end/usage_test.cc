// How the command is called: help, version, names it does not know, values it refuses.
#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

const std::vector<std::string> kCommands = {"generate", "forward", "experts",
                                            "backends", "inspect", "eval"};

TEST(Usage, HelpListsEveryCommandAndExitStatus) {
  const Result help = run_cadre({"--help"});
  expect_success(help);
  for (const std::string& command : kCommands) EXPECT_NE(help.out.find(command), std::string::npos);
  EXPECT_NE(help.out.find("Exit status"), std::string::npos);
  EXPECT_NE(help.out.find("Example"), std::string::npos);
}

TEST(Usage, EveryCommandHasHelpWithAnExampleAndTheCommonOptions) {
  for (const std::string& command : kCommands) {
    const Result help = run_cadre({command, "--help"});
    expect_success(help);
    EXPECT_NE(help.out.find("cadre " + command), std::string::npos);
    for (const char* part : {"Example", "--model", "--revision", "--device", "--dtype", "--experts",
                             "--threads", "--prepack", "--dequantize", "--seed", "--quiet",
                             "--json", "--decode-experts", "--no-graph"}) {
      EXPECT_NE(help.out.find(part), std::string::npos) << command << " " << part;
    }
  }
}

TEST(Usage, VersionIsPrinted) {
  const Result version = run_cadre({"--version"});
  expect_success(version);
  EXPECT_EQ(version.out.rfind("cadre ", 0), 0u) << version.out;
}

TEST(Usage, WithoutACommandTheHelpIsNamed) {
  expect_failure(run_cadre({}), 2, {"subcommand", "cadre --help"});
}

TEST(Usage, UnknownCommandGetsTheNearestName) {
  expect_failure(run_cadre({"genrate"}), 2,
                 {"unknown command \"genrate\"", "inspect", "did you mean generate?", "--help"});
  const Result far = run_cadre({"xyzzy"});
  expect_failure(far, 2, {"unknown command \"xyzzy\"", "generate"});
  EXPECT_EQ(far.err.find("did you mean"), std::string::npos);
}

TEST(Usage, UnknownOptionGetsTheNearestName) {
  expect_failure(run_cadre({"generate", "x", "--tempreture=1"}), 2,
                 {"cadre generate: unknown option --tempreture;", "did you mean --temperature?",
                  "cadre generate --help"});
  expect_failure(run_cadre({"--versoin"}), 2, {"unknown option --versoin", "--version"});
  for (const std::string& command : kCommands) {
    expect_failure(run_cadre({command, "--no-such-option"}), 2, {"cadre " + command});
  }
}

TEST(Usage, MissingAndSurplusArgumentsAreNamed) {
  expect_failure(run_cadre({"forward", "--out", "x"}), 2, {"--inputs is required"});
  expect_failure(run_cadre({"forward", "--inputs", "x"}), 2, {"--out is required"});
  expect_failure(run_cadre({"eval"}), 2, {"--text is required"});
  expect_failure(run_cadre({"experts", "--out", "x"}), 2, {"CASE is required"});
  expect_failure(run_cadre({"generate", "two", "words"}), 2, {"\"words\"", "quotes"});
  expect_failure(run_cadre({"generate", "x", "--max-new-tokens"}), 2, {"--max-new-tokens"});
  expect_failure(run_cadre({"generate", "x", "--seed", "1", "--seed", "2"}), 2, {"--seed"});
  expect_failure(run_cadre({"inspect", "a", "--model", "b"}), 2, {"one model", "a", "b"});
}

TEST(Usage, ValuesOutOfRangeNameTheOptionItsRangeAndTheValue) {
  const std::vector<std::vector<std::string>> calls = {{"--threads", "-1"},
                                                       {"--threads", "1025"},
                                                       {"--seed", "-1"},
                                                       {"--seed", "x"},
                                                       {"--prepack", "maybe"},
                                                       {"--dtype", "int7"},
                                                       {"--device", "tpu"},
                                                       {"--decode-experts", "0"},
                                                       {"--experts", "nope"},
                                                       {"--experts", "{\"\":3}"},
                                                       {"--experts", "{"},
                                                       {"--max-new-tokens", "0"},
                                                       {"--max-new-tokens", "1e3"},
                                                       {"--temperature", "-1"},
                                                       {"--temperature", "nan"},
                                                       {"--top-k", "-1"},
                                                       {"--top-p", "1.5"},

                                                       {"--min-p", "2"},
                                                       {"--repetition-penalty", "0"}};
  for (const std::vector<std::string>& call : calls) {
    const Result result = run_cadre({"generate", "x", call[0], call[1]});
    SCOPED_TRACE(call[0] + " " + call[1]);
    expect_failure(result, 2, {"cadre generate: ", call[1]});
  }
  expect_failure(run_cadre({"eval", "--text", "x", "--window", "1"}), 2, {"--window", "from 2 to"});
}

TEST(Usage, AKnownDtypeThatNoModelComputesInIsUnsupported) {
  expect_failure(run_cadre({"generate", "x", "--dtype", "float64"}), 4,
                 {"--dtype", "float64", "bfloat16"});
}

TEST(Usage, ADeviceWithoutItsBackendsIsUnsupported) {
  expect_failure(run_cadre({"generate", "x", "--device", "cuda"}), 4, {"cuda"});
}

TEST(Usage, ABackendThatCannotRunHereIsUnsupportedAndOthersAreNamed) {
  for (const char* name : {"deepgemm", "deepgemm_megamoe", "sonicmoe"}) {
    expect_failure(run_cadre({"generate", "x", "--experts", name}), 4, {name, "grouped_mm"});
  }
}

TEST(Usage, AnUnknownBackendListsTheNames) {
  expect_failure(run_cadre({"generate", "x", "--experts", "groupedmm"}), 2,
                 {"\"groupedmm\"", "eager", "batched_mm", "did you mean grouped_mm?"});
  expect_failure(
      run_cadre({"generate", "x"}, {.environment = {{"CADRE_EXPERTS_IMPLEMENTATION", "nope"}}}), 2,
      {"CADRE_EXPERTS_IMPLEMENTATION", "\"nope\"", "grouped_mm"});
}

TEST(Usage, AnUnknownSubConfigKeyIsRefused) {
  expect_failure(run_cadre({"generate", "x", "--experts", R"({"text_confg":"eager"})"}), 2,
                 {"text_confg"});
}

}  // namespace
}  // namespace cadre::test

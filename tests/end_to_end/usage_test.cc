// How the command is called: help, version, names it does not know, values it refuses.
#include <map>
#include <set>
#include <sstream>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

const std::vector<std::string> kCommands = {"generate", "chat",    "forward", "experts",
                                            "backends", "inspect", "eval",    "quantize"};

TEST(Usage, HelpListsEveryCommandAndExitStatus) {
  const Result help = run_cadre({"--help"});
  expect_success(help);
  for (const std::string& command : kCommands) EXPECT_NE(help.out.find(command), std::string::npos);
  EXPECT_NE(help.out.find("Exit status"), std::string::npos);
  EXPECT_NE(help.out.find("Example"), std::string::npos);
}

/// The words of a help text that are options.
std::set<std::string> options_in(const std::string& help) {
  std::set<std::string> options;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (line.starts_with("  --")) options.insert(line.substr(2, line.find(' ', 2) - 2));
  }
  return options;
}

TEST(Usage, HelpShowsTheCommonOptionsThatActInItsCommand) {
  const std::map<std::string, std::vector<std::string>> acting = {
      {"generate",
       {"--model", "--revision", "--device", "--dtype", "--experts", "--threads", "--prepack",
        "--dequantize", "--seed", "--decode-experts", "--no-graph"}},
      {"chat",
       {"--model", "--revision", "--device", "--dtype", "--experts", "--threads", "--prepack",
        "--dequantize", "--seed", "--decode-experts", "--no-graph"}},
      {"forward",
       {"--model", "--revision", "--device", "--dtype", "--experts", "--threads", "--prepack",
        "--dequantize"}},
      {"eval",
       {"--model", "--revision", "--device", "--dtype", "--experts", "--threads", "--prepack",
        "--dequantize"}},
      {"experts", {"--device", "--dtype", "--experts", "--threads"}},
      {"backends", {"--model", "--revision", "--device", "--dtype", "--experts"}},
      {"inspect", {"--model", "--revision", "--dtype"}},
      {"quantize", {"--revision", "--threads"}}};
  for (const auto& [command, expected] : acting) {
    const std::string help = run_cadre({command, "--help"}).out;
    std::vector<std::string> common = {"--quiet", "--json"};
    common.insert(common.end(), expected.begin(), expected.end());
    const std::set<std::string> wanted(common.begin(), common.end());
    const size_t start = help.find("Common options:");
    ASSERT_NE(start, std::string::npos) << help;
    EXPECT_EQ(options_in(help.substr(start)), wanted) << command;
  }
}

TEST(Usage, EveryCommandTakesEveryCommonOption) {
  const std::vector<std::string> neutral = {
      "--device",  "cpu",          "--dtype",   "float32", "--threads",        "1",
      "--prepack", "auto",         "--seed",    "1",       "--quiet",          "--no-graph",
      "--json",    "--dequantize", "--experts", "eager",   "--decode-experts", "auto"};
  const TempDir folder;
  const std::string out = folder / "out.safetensors";
  const auto chat_model = folder / "model";
  std::filesystem::copy(CADRE_ASSETS "/tiny-moe", chat_model);
  write_file(chat_model / "chat_template.jinja", "{{ messages[-1].content }}");
  for (std::vector<std::string> call :
       {std::vector<std::string>{"inspect"},
        {"backends"},
        {"generate", "x", "--max-new-tokens", "1"},
        {"chat", "--model", chat_model},
        {"eval", "--text", CADRE_TEST_DATA "/tiny-moe/heldout.txt", "--window", "1024"},
        {"quantize", model_folder("olmoe"), folder / "quantized"},
        {"experts", CADRE_TEST_DATA "/experts/plain.safetensors", "--out", out},
        {"forward", "--model", model_folder("olmoe"), "--inputs", expected_file("olmoe"), "--out",
         out}}) {
    SCOPED_TRACE(call.front());
    call.insert(call.end(), neutral.begin(), neutral.end());
    expect_success(run_cadre(call));
  }
}

TEST(Usage, EveryHelpHasAnExampleAndFitsEightyColumns) {
  for (const std::string& command : kCommands) {
    const Result help = run_cadre({command, "--help"});
    expect_success(help);
    EXPECT_NE(help.out.find("cadre " + command), std::string::npos);
    EXPECT_NE(help.out.find("Example"), std::string::npos) << command;
    EXPECT_EQ(help.out.find("\n\n\n"), std::string::npos) << command;
    std::istringstream lines(help.out);
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 80u) << line;
  }
}

TEST(Usage, HelpIsACommandToo) {
  EXPECT_EQ(run_cadre({"help"}).out, run_cadre({"--help"}).out);
  EXPECT_EQ(run_cadre({"help", "inspect"}).out, run_cadre({"inspect", "--help"}).out);
  expect_failure(run_cadre({"help", "inspct"}), 2, {"\"inspct\"", "did you mean inspect?"});
  EXPECT_EQ(run_cadre({"inspect", "--help"}).out.find("MODEL MODEL  "), std::string::npos);
}

TEST(Usage, HelpNamesTheEnvironmentsVariables) {
  EXPECT_NE(run_cadre({"--help"}).out.find("CADRE_CPU_ISA"), std::string::npos);
  EXPECT_NE(run_cadre({"backends", "--help"}).out.find("CADRE_CPU_ISA"), std::string::npos);
}

TEST(Usage, AnEmptyValueIsNeverTakenForTheDefault) {
  const std::string ids = expected_file("olmoe");
  const std::vector<std::vector<std::string>> calls = {
      {"generate", "x", "--model", ""},
      {"generate", "x", "--revision", ""},
      {"generate", "x", "--image", ""},
      {"generate", "x", "--chat", "--system", ""},
      {"chat", "--system", ""},
      {"generate", "--input-ids", ""},
      {"generate", "--input-ids", ids, "--out", ""},
      {"forward", "--inputs", "", "--out", "o"},
      {"forward", "--inputs", ids, "--out", ""},
      {"eval", "--text", ""},
      {"eval", "--text", "x", "--out", ""},
      {"inspect", ""},
      {"inspect", "--model", ""},
      {"backends", ""},
      {"quantize", "", "o"},
      {"experts", "", "--out", "o", "--experts", "eager"}};
  for (const std::vector<std::string>& call : calls) {
    SCOPED_TRACE(call.front() + " " + call[1]);
    expect_failure(run_cadre(call), 2, {"cadre " + call[0] + ": ", "expected", "empty", "unset"});
  }
  // CLI11 would take the next word as the model.
  expect_failure(run_cadre({"generate", "--model=", "x"}), 2, {"--model", "unset"});
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
  expect_failure(run_cadre({"quantize"}), 2, {"MODEL is required"});
  expect_failure(run_cadre({"quantize", "x"}), 2, {"OUT is required"});
  expect_failure(run_cadre({"generate", "two", "words"}), 2, {"\"words\"", "quotes"});
  expect_failure(run_cadre({"generate", "x", "--max-new-tokens"}), 2,
                 {"--max-new-tokens: expected a value"});
  expect_failure(run_cadre({"generate", "x", "--seed", "1", "--seed", "2"}), 2,
                 {"--seed: expected once, got it 2 times"});
  expect_failure(run_cadre({"generate", "--loud voices"}), 2, {"--loud voices", "after \"--\""});
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

TEST(Usage, ADeviceThatIsNotThereIsRefused) {
  expect_failure(run_cadre({"generate", "x", "--device", kMissingGpu}), missing_gpu_status(),
                 {"cuda"});
}

TEST(Usage, ABackendThatCannotRunHereIsUnsupportedAndOthersAreNamed) {
  for (const char* name : {"deepgemm_megamoe", "sonicmoe"}) {
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

TEST(Usage, AnUnknownSubConfigKeyIsRefusedAlike) {
  const std::string model = model_folder("olmoe");
  const std::string map = R"({"text_confg":"eager"})";
  for (const std::vector<std::string>& call :
       {std::vector<std::string>{"generate", "x", "--model", model},
        {"backends", "--model", model},
        {"inspect", model}}) {
    std::vector<std::string> arguments = call;
    arguments.insert(arguments.end(), {"--experts", map});
    expect_failure(run_cadre(arguments), 2,
                   {"unknown sub-config \"text_confg\"", "this model has"});
  }
  expect_failure(run_cadre({"backends", "--experts", map}), 2, {"text_confg", "MODEL"});
}

TEST(Usage, ARevisionOfAFolderIsRefused) {
  const std::string model = model_folder("olmoe");
  for (const char* command : {"generate", "inspect", "backends"}) {
    std::vector<std::string> call = {command, "--model", model, "--revision", "v2"};
    if (call.front() == "generate") call.push_back("x");
    expect_failure(run_cadre(call), 2, {"--revision v2", "hub id", model});
  }
  expect_failure(run_cadre({"generate", "x", "--revision", "v2"}), 2, {"--revision v2", "hub id"});
  expect_failure(run_cadre({"backends", "--revision", "v2"}), 2, {"--revision v2"});
}

TEST(Usage, MessagesNameTheCommandOnce) {
  const Result result = run_cadre({"generate", ""});
  expect_failure(result, 2, {"cadre generate: prompt 0 is empty"});
}

}  // namespace
}  // namespace cadre::test

// cadre bench: rows, pages and refusals. Small shapes and little memory; no time is asserted.
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <set>
#include <sstream>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

const std::vector<std::string> kQuick = {"--repeats", "3", "--threads", "2"};

Result bench(const std::vector<std::string>& words, const RunOptions& run = {}) {
  std::vector<std::string> call = {"bench"};
  call.insert(call.end(), words.begin(), words.end());
  call.insert(call.end(), kQuick.begin(), kQuick.end());
  if (std::find(words.begin(), words.end(), "--memory") == words.end()) {
    call.insert(call.end(), {"--memory", "1"});
  }
  return run_cadre(call, run);
}

/// One object a line, nothing else.
std::vector<nlohmann::json> rows_of(const Result& result) {
  expect_success(result);
  std::vector<nlohmann::json> rows;
  std::istringstream lines(result.out);
  for (std::string line; std::getline(lines, line);) rows.push_back(nlohmann::json::parse(line));
  return rows;
}

void expect_machine(const nlohmann::json& row) {
  EXPECT_NE(row["commit"], "");
  EXPECT_NE(row["cpu"], "");
  EXPECT_NE(row["isa"], "");
  EXPECT_GE(row["threads"].get<int>(), 1);
}

/// Whether the system hands out huge pages when asked.
bool huge_pages_on_demand() {
  const fs::path file = "/sys/kernel/mm/transparent_hugepage/enabled";
  return fs::exists(file) && read_file(file).find("[never]") == std::string::npos;
}

void expect_pages(const nlohmann::json& bytes, bool huge) {
  const auto small = static_cast<size_t>(sysconf(_SC_PAGESIZE));
  if (huge && huge_pages_on_demand()) {
    EXPECT_GT(bytes.get<size_t>(), small);
  } else {
    EXPECT_EQ(bytes.get<size_t>(), small);
  }
}

TEST(BenchExperts, EveryRowSaysWhatWhereAndHowFast) {
  const auto rows = rows_of(bench({"experts", "--shape", "6,2,40,24", "--shape", "8,1,16,8",
                                   "--tokens", "1,5", "--experts", "all", "--json"}));
  ASSERT_EQ(rows.size(), 2u * 2 * kCpuBackends.size());
  std::set<std::string> cells;
  for (const nlohmann::json& row : rows) {
    SCOPED_TRACE(row.dump());
    expect_machine(row);
    cells.insert(row["shape"].get<std::string>() + " " + row["tokens"].dump() + " " +
                 row["experts"].get<std::string>());
    EXPECT_EQ(row["device"], "cpu");
    EXPECT_EQ(row["dtype"], "bfloat16");
    EXPECT_EQ(row["format"], "bfloat16");
    EXPECT_EQ(row["routing"], "uniform");
    EXPECT_EQ(row["threads"], 2);
    for (const char* key : {"us_median", "tflops", "gbs", "ceiling_gbs", "ceiling_tflops"}) {
      EXPECT_GT(row[key].get<double>(), 0) << key;
    }
    EXPECT_GE(row["us_mad"].get<double>(), 0);
    EXPECT_TRUE(row["percent_of_limit"].is_null() || row["percent_of_limit"].get<double>() > 0);
    EXPECT_EQ(row["percent_of_limit"].is_null(), row["calls_dropped"] == row["calls"]);
    EXPECT_EQ(row["calls"], 3);
    EXPECT_GE(row["active_experts"].get<int>(), row["top_k"].get<int>());
    EXPECT_LE(row["active_experts"].get<int>(), row["num_experts"].get<int>());
    EXPECT_GT(row["rel_error"].get<double>(), 0);
    EXPECT_LE(row["rel_error"].get<double>(), row["bound"].get<double>());
  }
  EXPECT_EQ(cells.size(), rows.size());
}

// A lone number may be off by several roundings, or cancel.
TEST(BenchExperts, OutputsOfFewNumbersAreHeldToAWiderBound) {
  for (const char* shape : {"1,1,1,1", "4,2,4,4", "8,8,64,16"}) {
    for (int seed = 0; seed < 12; ++seed) {
      const auto rows = rows_of(bench({"experts", "--shape", shape, "--tokens", "1", "--seed",
                                       std::to_string(seed), "--json"}));
      EXPECT_LE(rows.at(0)["rel_error"].get<double>(), rows.at(0)["bound"].get<double>());
    }
  }
}

TEST(BenchExperts, FormatDtypeRoutingAndSeedAreTaken) {
  for (const auto& [format, name] :
       {std::pair{"bf16", "bfloat16"}, std::pair{"f32", "float32"}, std::pair{"fp16", "float16"}}) {
    const auto own = rows_of(bench({"experts", "--shape", "6,2,40,24", "--tokens", "4", "--format",
                                    format, "--routing", "one", "--json"}));
    ASSERT_EQ(own.size(), 1u);
    EXPECT_EQ(own[0]["format"], name);
    EXPECT_EQ(own[0]["dtype"], name);
    EXPECT_EQ(own[0]["experts"], "grouped_mm");
    EXPECT_EQ(own[0]["active_experts"], 2);  // one: all tokens to the same k
    const auto other =
        rows_of(bench({"experts", "--shape", "6,2,40,24", "--tokens", "4", "--format", format,
                       "--dtype", "float32", "--routing", "skewed", "--seed", "7", "--json"}));
    EXPECT_EQ(other.at(0)["dtype"], "float32");
    EXPECT_EQ(other.at(0)["format"], name);
    EXPECT_EQ(other.at(0)["routing"], "skewed");
  }
}

// Each backend says that it cannot, or is held to its bound.
TEST(BenchExperts, QuantisedFormatsAreCheckedAndCountedWithTheirScales) {
  for (const char* format : {"fp8", "fp8-ue8m0", "fp8-tensor", "mxfp8", "fp4"}) {
    for (const std::string& backend : kCpuBackends) {
      SCOPED_TRACE(std::string(format) + " " + backend);
      const Result result = bench({"experts", "--shape", "6,2,160,96", "--tokens", "1,5",
                                   "--format", format, "--experts", backend, "--json"});
      if (result.exit_code == 4) {
        expect_failure(result, 4, {"--experts " + backend, format});
        continue;
      }
      const auto rows = rows_of(result);
      ASSERT_EQ(rows.size(), 2u);
      const bool is_fp8 = std::string(format).starts_with("fp8");
      for (const nlohmann::json& row : rows) {
        EXPECT_EQ(row["format"], format);
        EXPECT_EQ(row["activations"], is_fp8 ? "dynamic" : "none");
        EXPECT_LE(row["rel_error"].get<double>(), row["bound"].get<double>());
      }
    }
  }
}

TEST(BenchExperts, RowsSayWhetherExpertsArePacked) {
  for (const char* prepack : {"on", "off", "auto"}) {
    const auto rows = rows_of(bench({"experts", "--shape", "6,2,40,24", "--tokens", "1,5",
                                     "--experts", "all", "--prepack", prepack, "--json"}));
    ASSERT_EQ(rows.size(), 2 * kCpuBackends.size());
    for (const nlohmann::json& row : rows) EXPECT_EQ(row["packed"], prepack == std::string("on"));
  }
  const Result table =
      bench({"experts", "--shape", "6,2,40,24", "--tokens", "1", "--prepack", "on"});
  expect_success(table);
  EXPECT_NE(table.out.find("bfloat16/bfloat16 packed"), std::string::npos) << table.out;
}

TEST(BenchExperts, RowsSayOnWhichPagesTheLimitWasMeasured) {
  for (const char* prepack : {"on", "off"}) {
    const auto rows = rows_of(bench({"experts", "--shape", "6,2,40,24", "--tokens", "1",
                                     "--prepack", prepack, "--memory", "4", "--json"}));
    ASSERT_EQ(rows.size(), 1u);
    expect_pages(rows[0]["pages"], prepack == std::string("on"));
  }
}

TEST(BenchExperts, TheTableAndThePageShowTheSameRows) {
  const TempDir folder;
  const fs::path page = folder / "report.html";
  const Result result = bench({"experts", "--shape", "6,2,40,24", "--tokens", "1,5", "--experts",
                               "eager,grouped_mm", "--report", page});
  expect_success(result);
  for (const char* part : {"% of limit", "6,2,40,24", "eager", "grouped_mm", "threads"}) {
    EXPECT_NE(result.out.find(part), std::string::npos) << part;
  }
  EXPECT_EQ(result.out.find("batched_mm"), std::string::npos);
  const std::string html = read_file(page);
  for (const char* part : {"<!doctype html>", "<svg", "6,2,40,24", "eager", "grouped_mm"}) {
    EXPECT_NE(html.find(part), std::string::npos) << part;
  }
}

TEST(BenchExperts, WhatIsNotServedIsSaidBeforeAnythingIsMeasured) {
  expect_failure(bench({"experts", "--activations", "dynamic"}), 2,
                 {"--activations dynamic", "bf16", "fp8"});
  expect_failure(bench({"experts", "--graph"}), 4, {"--graph", "GPU"});
  expect_failure(bench({"experts", "--device", kMissingGpu}), missing_gpu_status(), {"cuda"});
  expect_failure(bench({"experts", "--experts", "sonicmoe", "--shape", "6,2,40,24"}), 4,
                 {"sonicmoe", "grouped_mm"});
}

TEST(BenchExperts, WrongValuesNameTheOption) {
  expect_failure(bench({"experts", "--shape", "qwen3-30b-a3"}), 2,
                 {"--shape", "did you mean qwen3-30b-a3b?"});
  expect_failure(bench({"experts", "--shape", "2,6,8,8"}), 2, {"top_k"});
  expect_failure(bench({"experts", "--tokens", "1,x"}), 2, {"--tokens", "\"x\""});
  expect_failure(bench({"experts", "--tokens", "0"}), 2, {"--tokens", "1 to"});
  expect_failure(bench({"experts", "--tokens", ""}), 2, {"--tokens"});
  expect_failure(bench({"experts", "--experts", "eager,fast"}), 2, {"--experts", "\"fast\""});
  expect_failure(bench({"experts", "--routing", "round"}), 2, {"--routing", "uniform"});
  expect_failure(bench({"experts", "--format", "int4"}), 2, {"--format", "bf16"});
  expect_failure(run_cadre({"bench", "experts", "--repeats", "0"}), 2, {"--repeats"});
  expect_failure(run_cadre({"bench", "experts", "--memory", "0"}), 2, {"--memory"});
  expect_failure(bench({"experts", "--shape", "6,2,40,24", "--report", "/no/such/folder/r.html"}),
                 1, {"--report", "/no/such/folder"});
}

TEST(BenchExperts, AShapeThatDoesNotFitSaysHowMuchItNeeds) {
  expect_failure(bench({"experts", "--shape", "1024,8,1048576,16384"}), 5,
                 {"GiB", "available", "--shape"});
}

TEST(BenchCeilings, ARowForEachNumberOfThreads) {
  const auto rows = rows_of(bench({"ceilings", "--memory", "4", "--json"}));
  ASSERT_EQ(rows.size(), 2u);
  for (size_t i = 0; i < rows.size(); ++i) {
    expect_machine(rows[i]);
    EXPECT_EQ(rows[i]["threads"], i + 1);
    for (const char* key : {"bfloat16_tflops", "float32_tflops"}) {
      EXPECT_GT(rows[i][key].get<double>(), 0) << key;
    }
    const auto& read = rows[i]["read"];
    ASSERT_EQ(read.size(), huge_pages_on_demand() ? 2u : 1u);
    for (size_t p = 0; p < read.size(); ++p) {
      expect_pages(read[p]["pages"], p == 1);
      EXPECT_GT(read[p]["gbs"].get<double>(), 0);
      EXPECT_GE(read[p]["gbs_mad"].get<double>(), 0);
      EXPECT_NE(read[p]["way"], "");
    }
  }
  const Result table = bench({"ceilings"});
  expect_success(table);
  EXPECT_NE(table.out.find("read GB/s"), std::string::npos);
  expect_failure(bench({"ceilings", "--device", kMissingGpu}), missing_gpu_status(), {"cuda"});
}

TEST(BenchCeilings, TheInstructionSetIsTheOneInUse) {
  const auto rows =
      rows_of(bench({"ceilings", "--json"}, {.environment = {{"CADRE_CPU_ISA", "portable"}}}));
  EXPECT_EQ(rows.at(0)["isa"], "portable");
}

TEST(BenchGenerate, ARowForEachBackendAndPromptLength) {
  const std::string model = model_folder("qwen2_moe");
  const auto rows = rows_of(bench({"generate", "--model", model, "--prompt-lengths", "3,6",
                                   "--new-tokens", "4", "--experts", "all", "--json"}));
  ASSERT_EQ(rows.size(), 2 * kCpuBackends.size());
  double bytes = 0;  // of the checkpoint
  for (const fs::directory_entry& entry : fs::directory_iterator(model)) {
    const std::string name = entry.path().filename();
    if (name.starts_with("model") && name.ends_with(".safetensors")) {
      bytes += static_cast<double>(entry.file_size());
    }
  }
  for (const nlohmann::json& row : rows) {
    SCOPED_TRACE(row.dump());
    expect_machine(row);
    for (const char* key :
         {"prefill_tokens_per_second", "decode_tokens_per_second", "decode_us_median", "gbs"}) {
      EXPECT_GT(row[key].get<double>(), 0) << key;
    }
    // Decoding reads no more than all weights and no less than the experts of one token.
    EXPECT_LT(row["decode_bytes"].get<double>(), bytes);
    EXPECT_GT(row["decode_bytes"].get<double>(), bytes / 20);
  }
  const Result table =
      bench({"generate", "--model", model, "--prompt-lengths", "3", "--new-tokens", "2"});
  expect_success(table);
  EXPECT_NE(table.out.find("decode tokens/s"), std::string::npos);
}

TEST(BenchGenerate, RowsSayWhetherExpertsArePacked) {
  for (const char* prepack : {"on", "off"}) {
    const auto rows =
        rows_of(bench({"generate", "--model", model_folder("qwen2_moe"), "--prompt-lengths", "3",
                       "--new-tokens", "2", "--prepack", prepack, "--memory", "4", "--json"}));
    ASSERT_EQ(rows.size(), 1u);
    EXPECT_EQ(rows[0]["packed"], prepack == std::string("on"));
    expect_pages(rows[0]["pages"], false);
    expect_pages(rows[0]["expert_pages"], prepack == std::string("on"));
  }
}

TEST(BenchGenerate, ASyntheticModelIsWrittenAndRemoved) {
  const TempDir folder;
  const Result result = bench({"generate", "--synthetic", "1,4,2,32,16", "--prompt-lengths", "3",
                               "--new-tokens", "2", "--quiet", "--json"},
                              {.environment = {{"TMPDIR", folder.path()}}});
  const auto rows = rows_of(result);
  ASSERT_EQ(rows.size(), 1u);
  EXPECT_EQ(rows[0]["architecture"], "Qwen3MoeForCausalLM");
  EXPECT_TRUE(fs::is_empty(folder.path()));
}

TEST(BenchGenerate, AKilledRunLeavesNoSyntheticModel) {
  const TempDir folder;
  Process process({"bench", "generate", "--synthetic", "1,4,2,32,16", "--prompt-lengths", "3",
                   "--new-tokens", "2", "--memory", "1", "--repeats", "3", "--json", "--prepack",
                   "on", "--experts", "eager,eager,eager,eager,eager,eager"},
                  {.environment = {{"TMPDIR", folder.path()}}});
  process.wait_for_output(1);
  EXPECT_TRUE(fs::is_empty(folder.path()));
  process.send_signal(SIGKILL);
  process.wait();
}

TEST(BenchGenerate, AFolderThatIsNotThereOrTooSmallIsNamedBeforeAnythingIsWritten) {
  expect_failure(bench({"generate", "--synthetic", "1,4,2,32,16"},
                       {.environment = {{"TMPDIR", "/no/such/folder"}}}),
                 1, {"/no/such/folder", "TMPDIR"});
  expect_failure(bench({"generate", "--synthetic", "1000,1000,8,16777216,16777216"}), 1,
                 {"GiB", "free", "TMPDIR"});
}

TEST(BenchGenerate, WrongValuesNameTheOption) {
  expect_failure(bench({"generate", "--synthetic", "2"}), 2, {"--synthetic", "LAYERS,SHAPE"});
  expect_failure(bench({"generate", "--synthetic", "0,6,2,40,24"}), 2, {"--synthetic"});
  expect_failure(bench({"generate", "--synthetic", "1,6,2,40,24", "--model", "x"}), 2,
                 {"--synthetic", "--model"});
  expect_failure(bench({"generate", "--new-tokens", "1"}), 2, {"--new-tokens"});
  expect_failure(bench({"generate", "--prompt-lengths", "1000000"}), 2,
                 {"--prompt-lengths", "max_position_embeddings"});
  expect_failure(bench({"generate", "--model", "/no/such/model"}), 3, {"/no/such/model"});
}

TEST(Bench, WithoutAWordOrWithAWrongOneTheWordsAreListed) {
  expect_failure(run_cadre({"bench"}), 2,
                 {"cadre bench: expected a subcommand", "experts, generate, ceilings"});
  expect_failure(run_cadre({"bench", "expert"}), 2,
                 {"cadre bench: unknown command \"expert\"", "did you mean experts?"});
  for (const std::string word : {"experts", "generate", "ceilings"}) {
    const Result help = run_cadre({"bench", word, "--help"});
    expect_success(help);
    EXPECT_NE(help.out.find("Example: cadre bench " + word), std::string::npos);
    EXPECT_NE(help.out.find("--repeats"), std::string::npos);
    expect_failure(
        run_cadre({"bench", word, "--repeat"}), 2,
        {"cadre bench " + word + ": unknown option --repeat", "did you mean --repeats?"});
  }
}

TEST(Bench, CtrlCOrAClosedTerminalStopsBetweenCallsAndKeepsWhatWasMeasured) {
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) {
    Process process({"bench", "experts", "--shape", "6,2,40,24", "--tokens", "1,4", "--memory", "1",
                     "--repeats", "3", "--json", "--experts", "eager,eager,eager,eager,eager"});
    process.wait_for_output(1);
    process.send_signal(signal);
    const Result result = process.wait();
    // It may have finished.
    EXPECT_TRUE(result.exit_code == 128 + signal || result.exit_code == 0) << result.exit_code;
    EXPECT_EQ(result.signal, 0);
    EXPECT_TRUE(result.out.ends_with("}\n"));
  }
}

}  // namespace
}  // namespace cadre::test

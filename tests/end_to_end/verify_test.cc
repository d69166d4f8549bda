// cadre verify on every fixture model. Wrong backends are in src/models/verify_test.cc.
#include <sstream>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

TEST(Verify, EveryFixtureModelPasses) {
  int count = 0;
  for (const fs::directory_entry& entry : fs::directory_iterator(CADRE_TEST_DATA "/models")) {
    if (!entry.is_directory()) continue;
    SCOPED_TRACE(entry.path().filename());
    for (const char* prepack : {"off", "on"}) {
      const Result result =
          run_cadre({"verify", entry.path(), "--tokens", "4", "--prepack", prepack});
      expect_success(result);
      for (const char* part : {"layer", "relative error", "bound", "grouped_mm", "eager",
                               "batched_mm", "all within their bounds"}) {
        EXPECT_NE(result.out.find(part), std::string::npos) << part;
      }
      EXPECT_EQ(result.out.find("OUT OF BOUND"), std::string::npos);
    }
    ++count;
  }
  EXPECT_GE(count, 15);
}

TEST(Verify, JsonHasAnObjectForEachLayerAndBackend) {
  for (const char* dtype : {"float32", "bfloat16", "float16"}) {
    const Result result = run_cadre(
        {"verify", "--dtype", dtype, "--layers", "2", "--seed", "3", "--threads", "1", "--json"});
    expect_success(result);
    std::istringstream lines(result.out);
    int count = 0;
    for (std::string line; std::getline(lines, line); ++count) {
      const nlohmann::json row = nlohmann::json::parse(line);
      EXPECT_EQ(row["dtype"], dtype);
      EXPECT_LT(row["layer"].get<int>(), 2);
      EXPECT_EQ(row["ok"], true);
      EXPECT_LE(row["relative_error"].get<double>(), row["bound"].get<double>());
      EXPECT_GT(row["us"].get<double>(), 0);
    }
    EXPECT_EQ(count, 2 * static_cast<int>(kCpuBackends.size()));
  }
}

TEST(Verify, WrongCallsAreRefused) {
  expect_failure(run_cadre({"verify", "--layers", "99"}), 2, {"from 1 to", "layers", "99"});
  expect_failure(run_cadre({"verify", "--tokens", "0"}), 2, {"--tokens"});
  expect_failure(run_cadre({"verify", "--tokens", "1000000"}), 2, {"tokens", "1000000"});
  expect_failure(run_cadre({"verify", "/no/such/model"}), 3, {"/no/such/model"});
  expect_failure(run_cadre({"verify", "--device", kMissingGpu}), missing_gpu_status(), {"cuda"});
}

}  // namespace
}  // namespace cadre::test

// cadre forward: logits and captured experts equal to the stored ones.
#include <algorithm>

#include "end_to_end/fixtures.h"
#include "io/safetensors.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

class ForwardModels : public testing::TestWithParam<std::string> {};

TEST_P(ForwardModels, LogitsAndCapturedExpertsEqualTheStoredOnes) {
  const auto expected_path = expected_file(GetParam());
  for (const std::string& backend : kCpuBackends) {
    const TempDir folder;
    const auto out = folder / "out.safetensors";
    expect_success(
        run_cadre({"forward", "--model", model_folder(GetParam()), "--inputs", expected_path,
                   "--out", out, "--capture-experts", "--dtype", "float32", "--experts", backend}));
    const SafetensorsFile expected = SafetensorsFile::open(expected_path);
    const SafetensorsFile actual = SafetensorsFile::open(out);
    EXPECT_EQ(actual.tensor("logits").shape(), expected.tensor("logits").shape());
    EXPECT_LE(relative_error(actual.tensor("logits"), expected.tensor("logits")), 1e-4) << backend;
    int layers = 0;
    for (const SafetensorsEntry& entry : expected.header().entries) {
      if (entry.name.rfind("moe", 0) != 0) continue;
      const TensorView captured = actual.tensor(entry.name);
      EXPECT_EQ(captured.shape(), entry.shape) << entry.name;
      EXPECT_EQ(captured.dtype(), entry.dtype) << entry.name;
      // Slots of a row may stand in any order, so ids and weights are compared by their sums.
      if (entry.name.ends_with(".hidden_states") || entry.name.ends_with(".output")) {
        EXPECT_LE(relative_error(captured, expected.view(entry)), 1e-4) << entry.name;
      }
      layers += entry.name.ends_with(".output") ? 1 : 0;
    }
    EXPECT_GT(layers, 0);
  }
}

/// Rows of (id, weight) pairs in ascending order of ids.
std::vector<std::pair<double, double>> sorted_slots(const SafetensorsFile& file,
                                                    const std::string& layer) {
  const std::vector<double> ids = to_doubles(file.tensor(layer + ".top_k_index"));
  const std::vector<double> weights = to_doubles(file.tensor(layer + ".top_k_weights"));
  const auto top_k = static_cast<size_t>(file.tensor(layer + ".top_k_index").dim(1));
  std::vector<std::pair<double, double>> slots;
  for (size_t i = 0; i < ids.size(); ++i) slots.emplace_back(ids[i], weights[i]);
  for (size_t row = 0; row < slots.size(); row += top_k) {
    std::sort(slots.begin() + static_cast<ptrdiff_t>(row),
              slots.begin() + static_cast<ptrdiff_t>(row + top_k));
  }
  return slots;
}

TEST_P(ForwardModels, CapturedRoutingEqualsTheStoredOne) {
  const TempDir folder;
  const auto out = folder / "out.safetensors";
  expect_success(run_cadre({"forward", "--model", model_folder(GetParam()), "--inputs",
                            expected_file(GetParam()), "--out", out, "--capture-experts", "--dtype",
                            "float32"}));
  const auto actual = sorted_slots(SafetensorsFile::open(out), "moe1");
  const auto expected = sorted_slots(SafetensorsFile::open(expected_file(GetParam())), "moe1");
  ASSERT_EQ(actual.size(), expected.size());
  for (size_t i = 0; i < actual.size(); ++i) {
    EXPECT_EQ(actual[i].first, expected[i].first) << i;
    EXPECT_NEAR(actual[i].second, expected[i].second, 1e-5) << i;
  }
}

INSTANTIATE_TEST_SUITE_P(Fixtures, ForwardModels, testing::ValuesIn(kModels));

TEST(Forward, HalfPrecisionStaysNearAndCaptureIsOnlyOnRequest) {
  for (const auto& [dtype, bound] : {std::pair{"bfloat16", 2e-1}, std::pair{"float16", 2e-1}}) {
    const TempDir folder;
    const auto out = folder / "out.safetensors";
    expect_success(run_cadre({"forward", "--model", model_folder("mixtral"), "--inputs",
                              expected_file("mixtral"), "--out", out, "--dtype", dtype}));
    const SafetensorsFile file = SafetensorsFile::open(out);
    EXPECT_EQ(file.header().entries.size(), 1u);
    EXPECT_EQ(file.tensor("logits").dtype(), DType::kF32);
    EXPECT_LE(relative_error(file.tensor("logits"),
                             SafetensorsFile::open(expected_file("mixtral")).tensor("logits")),
              bound);
  }
}

TEST(Forward, CapturesAreTheSameWhenALongInputIsCutIntoPieces) {
  const TempDir folder;
  std::vector<int64_t> ids(997);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 37 % 4096);
  const auto input = write_input_ids(folder / "in.safetensors", {3, 997}, ids);
  const auto out = folder / "out.safetensors";
  expect_success(
      run_cadre({"forward", "--inputs", input, "--out", out, "--capture-experts", "--quiet"}));
  EXPECT_EQ(read_shape(out, "logits"), (Dims{3, 997, 4096}));
  EXPECT_EQ(read_shape(out, "moe2.output"), (Dims{3 * 997, 256}));
  // Equal sequences: their rows repeat, in the order of the sequences.
  const SafetensorsFile file = SafetensorsFile::open(out);
  const std::vector<double> rows = to_doubles(file.tensor("moe2.top_k_index"));
  const size_t size = rows.size() / 3;
  EXPECT_TRUE(std::equal(rows.begin(), rows.begin() + static_cast<ptrdiff_t>(size),
                         rows.begin() + static_cast<ptrdiff_t>(size)));
}

TEST(Forward, JsonSaysWhatWasWritten) {
  const TempDir folder;
  const Result result = run_cadre({"forward", "--model", model_folder("olmoe"), "--inputs",
                                   expected_file("olmoe"), "--out", folder / "o", "--json"});
  expect_success(result);
  const nlohmann::json json = json_of(result);
  EXPECT_EQ(json["logits"], (nlohmann::json{2, 17, 256}));
  EXPECT_EQ(json["experts"][""], "grouped_mm");
}

TEST(Forward, InputsOfTheWrongKindAreNamedWithFileTensorAndBothKinds) {
  const TempDir folder;
  const std::string out = folder / "out.safetensors";
  const auto fails = [&](const std::filesystem::path& file, const std::vector<std::string>& parts) {
    expect_failure(run_cadre({"forward", "--inputs", file, "--out", out}), 3, parts);
    EXPECT_FALSE(std::filesystem::exists(out));
  };
  fails(folder / "missing.safetensors", {"missing.safetensors"});
  const float number = 1;
  const NamedTensor floats{"input_ids", TensorView(&number, DType::kF32, {1, 1})};
  write_safetensors(folder / "f.safetensors", {&floats, 1});
  fails(folder / "f.safetensors", {"f.safetensors", "int64", "float32 [1, 1]"});
  const NamedTensor other{"ids", TensorView(&number, DType::kF32, {1, 1})};
  write_safetensors(folder / "n.safetensors", {&other, 1});
  fails(folder / "n.safetensors", {"n.safetensors", "input_ids", "ids"});
  fails(write_input_ids(folder / "r.safetensors", {4}, {1}), {"r.safetensors", "int64 [4]"});
  fails(write_input_ids(folder / "z.safetensors", {1, 0}, {1}), {"z.safetensors", "[1, 0]"});
  fails(write_input_ids(folder / "v.safetensors", {2, 2}, {1, 2, 3, 4096}),
        {"v.safetensors", "input_ids[1, 1]", "4095", "4096"});
  fails(write_input_ids(folder / "m.safetensors", {1, 2}, {1, -1}), {"input_ids[0, 1]", "-1"});
}

TEST(Forward, MoreTokensThanTheContextAreRefused) {
  const TempDir folder;
  const auto ids = write_input_ids(folder / "ids.safetensors", {1, 2049}, {1});
  expect_failure(run_cadre({"forward", "--inputs", ids, "--out", folder / "o"}), 2,
                 {"ids.safetensors", "2049", "2048"});
}

TEST(Forward, PackedExpertsGiveTheSameBytes) {
  for (const std::string& model : kModels) {
    const TempDir folder;
    std::vector<std::string> files;
    for (const char* prepack : {"off", "on"}) {
      const std::filesystem::path out = folder / prepack;
      expect_success(
          run_cadre({"forward", "--model", model_folder(model), "--inputs", expected_file(model),
                     "--out", out, "--capture-experts", "--prepack", prepack}));
      files.push_back(read_file(out));
    }
    EXPECT_TRUE(files[0] == files[1]) << model;
  }
}

}  // namespace
}  // namespace cadre::test

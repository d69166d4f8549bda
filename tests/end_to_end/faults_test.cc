// Damaged checkpoints and places that cannot be written: each has its exit status and a message
// that says where, what was expected, what came and what to do.
#include <sys/mount.h>

#include <cstring>

#include "end_to_end/fixtures.h"
#include "io/safetensors.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

constexpr const char* kVictim = "model.layers.1.mlp.experts.3.up_proj.weight";

/// A safetensors file taken apart, so that a test can spoil the header in any way.
struct RawFile {
  explicit RawFile(const fs::path& path) : path(path) {
    const std::string bytes = read_file(path);
    uint64_t length = 0;
    std::memcpy(&length, bytes.data(), sizeof length);
    header = bytes.substr(sizeof length, length);
    data = bytes.substr(sizeof length + length);
  }
  nlohmann::json json() const { return nlohmann::json::parse(header); }
  void save() const {
    const uint64_t length = header.size();
    std::string bytes(sizeof length, '\0');
    std::memcpy(bytes.data(), &length, sizeof length);
    write_file(path, bytes + header + data);
  }

  fs::path path;
  std::string header;
  std::string data;
};

class Faults : public testing::Test {
 protected:
  Faults() : model_(copy_model("qwen3_moe", folder_)) {}

  RawFile raw() const { return RawFile(model_ / "model.safetensors"); }

  /// Writes the checkpoint anew with the tensors that `change` leaves.
  void rewrite(const std::function<void(std::vector<NamedTensor>&)>& change) {
    const SafetensorsFile file =
        SafetensorsFile::open(model_folder("qwen3_moe") / "model.safetensors");
    std::vector<NamedTensor> tensors;
    for (const SafetensorsEntry& entry : file.header().entries) {
      tensors.push_back({entry.name, file.view(entry)});
    }
    change(tensors);
    write_safetensors(model_ / "model.safetensors", tensors);
  }

  Result forward() const {
    return run_cadre({"forward", "--model", model_, "--inputs", expected_file("qwen3_moe"), "--out",
                      folder_ / "out.safetensors"});
  }

  /// Every command that loads the model fails alike.
  void expect_fault(int code, const std::vector<std::string>& parts) const {
    expect_failure(forward(), code, parts);
    EXPECT_FALSE(fs::exists(folder_ / "out.safetensors"));
    expect_failure(run_cadre({"generate", "x", "--model", model_}), code, parts);
  }
  void expect_fault_and_inspect(int code, const std::vector<std::string>& parts) const {
    expect_fault(code, parts);
    expect_failure(run_cadre({"inspect", model_}), code, parts);
    expect_failure(run_cadre({"backends", "--model", model_}), code, parts);
  }

  TempDir folder_;
  fs::path model_;
};

TEST_F(Faults, ATruncatedFileIsNamed) {
  RawFile file = raw();
  file.data.resize(file.data.size() - 10);
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors", "again"});
  write_file(file.path, "short");
  expect_fault_and_inspect(3, {"model.safetensors", "5"});
  write_file(file.path, "");
  expect_fault_and_inspect(3, {"model.safetensors"});
}

TEST_F(Faults, OverlappingTensorsAreNamed) {
  RawFile file = raw();
  nlohmann::json header = file.json();
  auto& offsets = header[kVictim]["data_offsets"];
  const int64_t shift = 2;
  offsets = {offsets[0].get<int64_t>() - shift, offsets[1].get<int64_t>() - shift};
  file.header = header.dump();
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors", kVictim, "overlap"});
}

TEST_F(Faults, OverflowingShapesAndOffsetsAreNamed) {
  RawFile file = raw();
  nlohmann::json header = file.json();
  header[kVictim]["shape"] = {int64_t{1} << 62, 8};
  file.header = header.dump();
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors", kVictim, "4611686018427387904"});
  header = raw().json();
  header[kVictim]["shape"] = {64, 32};
  header[kVictim]["data_offsets"] = {0, uint64_t{18446744073709551615u}};
  file.header = header.dump();
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors", kVictim});
}

TEST_F(Faults, AHeaderLongerThanTheFileOrThatIsNoJsonIsRefused) {
  RawFile file = raw();
  std::string bytes = read_file(file.path);
  std::memset(bytes.data(), 0xff, 8);
  write_file(file.path, bytes);
  expect_fault_and_inspect(3, {"model.safetensors", "header"});
  file.header.front() = '[';
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors"});
}

TEST_F(Faults, ATensorNamedTwiceIsRefused) {
  RawFile file = raw();
  const std::string entry = nlohmann::json(kVictim).dump() + ":" + file.json()[kVictim].dump();
  file.header = "{" + entry + "," + file.header.substr(1);
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors", kVictim});
}

TEST_F(Faults, ATensorInTwoShardsIsRefused) {
  const auto model = copy_model("qwen2_moe", folder_);
  const fs::path second = model / "model-00002-of-00003.safetensors";
  const SafetensorsFile first = SafetensorsFile::open(model / "model-00001-of-00003.safetensors");
  const SafetensorsFile original = SafetensorsFile::open(second);
  std::vector<NamedTensor> tensors;
  for (const SafetensorsEntry& entry : original.header().entries) {
    tensors.push_back({entry.name, original.view(entry)});
  }
  const SafetensorsEntry& stray = first.header().entries.front();
  tensors.push_back({stray.name, first.view(stray)});
  write_safetensors(second, tensors);
  expect_failure(run_cadre({"inspect", model}), 3, {stray.name, "model-00002-of-00003"});
  fs::remove(second);
  expect_failure(run_cadre({"inspect", model}), 3, {"model-00002-of-00003"});
}

TEST_F(Faults, AMissingTensorIsNamedWithItsShape) {
  rewrite([](std::vector<NamedTensor>& tensors) {
    std::erase_if(tensors, [](const NamedTensor& tensor) { return tensor.name == kVictim; });
  });
  expect_fault(3, {kVictim, "missing"});
  const Result inspected = run_cadre({"inspect", model_});
  EXPECT_EQ(inspected.exit_code, 3);
  EXPECT_NE(inspected.out.find(kVictim), std::string::npos);
  EXPECT_NE(inspected.err.find("0 unfit, 1 missing and 0 left over"), std::string::npos)
      << inspected.err;
  const Result json = run_cadre({"inspect", model_, "--json"});
  EXPECT_EQ(json.exit_code, 3);
  EXPECT_EQ(json_of(json)["missing"].size(), 1u);
  EXPECT_EQ(json_of(json)["num_missing"], 1);
  EXPECT_EQ(json_of(json)["num_unfit"], 0);
}

TEST_F(Faults, AnExtraTensorIsNamed) {
  rewrite([](std::vector<NamedTensor>& tensors) {
    tensors.push_back({"model.layers.1.mlp.experts.99.up_proj.weight", tensors.front().tensor});
  });
  expect_fault(3, {"model.layers.1.mlp.experts.99.up_proj.weight"});
  const Result json = run_cadre({"inspect", model_, "--json"});
  EXPECT_EQ(json.exit_code, 3);
  EXPECT_EQ(json_of(json)["left_over"][0]["name"], "model.layers.1.mlp.experts.99.up_proj.weight");
}

TEST_F(Faults, ATensorOfAnotherDtypeOrShapeIsNamedWithBoth) {
  RawFile file = raw();
  nlohmann::json header = file.json();
  header[kVictim]["dtype"] = "I16";
  file.header = header.dump();
  file.save();
  expect_fault(3, {kVictim, "int16"});
  EXPECT_EQ(run_cadre({"inspect", model_}).exit_code, 3);
  header[kVictim]["dtype"] = "X99";
  file.header = header.dump();
  file.save();
  expect_fault_and_inspect(3, {"model.safetensors", kVictim, "X99"});
  header[kVictim]["dtype"] = "BF16";
  std::swap(header[kVictim]["shape"][0], header[kVictim]["shape"][1]);
  file.header = header.dump();
  file.save();
  expect_fault(3, {kVictim});
  EXPECT_EQ(run_cadre({"inspect", model_}).exit_code, 3);
}

TEST_F(Faults, AnEditedConfigIsCountedAlikeByInspectAndGenerate) {
  set_config(model_, "vocab_size", 250);  // embedding and lm_head no longer fit
  expect_fault(3, {"2 unfit:", "check config.json"});
  const Result inspected = run_cadre({"inspect", model_});
  EXPECT_EQ(inspected.exit_code, 3);
  for (const char* part : {"2 unfit, 0 missing and 0 left over", "check config.json"}) {
    EXPECT_NE(inspected.err.find(part), std::string::npos) << inspected.err;
  }
  EXPECT_EQ(json_of(run_cadre({"inspect", model_, "--json"}))["num_unfit"], 2);
}

TEST_F(Faults, BadJsonIsNamedWithItsFile) {
  write_file(model_ / "config.json", R"({"model_type": )");
  expect_fault_and_inspect(3, {"config.json"});
  write_file(model_ / "config.json", "[]");
  expect_fault_and_inspect(3, {"config.json"});
  const auto sharded = copy_model("qwen2_moe", folder_);
  write_file(sharded / "model.safetensors.index.json", "{\"weight_map\": 3}");
  expect_failure(run_cadre({"inspect", sharded}), 3,
                 {"model.safetensors.index.json", "weight_map"});
}

TEST_F(Faults, AWrongValueInTheConfigIsNamedWithItsKey) {
  set_config(model_, "hidden_size", "wide");
  expect_fault_and_inspect(3, {"config.json", "hidden_size", "wide"});
  set_config(model_, "hidden_size", -64);
  expect_fault_and_inspect(3, {"config.json", "hidden_size", "-64"});
}

TEST_F(Faults, AFolderWithoutWeightsOrConfigSaysWhatItLookedFor) {
  fs::remove(model_ / "model.safetensors");
  expect_fault_and_inspect(3, {model_.string(), "model.safetensors"});
  fs::remove(model_ / "config.json");
  expect_fault_and_inspect(3, {"config.json"});
}

TEST_F(Faults, AModelThatIsNotThereSaysHowToGetIt) {
  const RunOptions options{.environment = {{"HF_HUB_CACHE", folder_.path()}}};
  expect_failure(run_cadre({"generate", "x", "--model", "nobody/nothing"}, options), 3,
                 {"nobody/nothing", folder_.path().string(), "download"});
  expect_failure(run_cadre({"generate", "x", "--model", "/no/such/place"}, options), 3,
                 {"/no/such/place"});
}

TEST_F(Faults, AnUnknownArchitectureListsTheKnownOnes) {
  set_config(model_, "architectures", {"WhaleForCausalLM"});
  set_config(model_, "model_type", "whale");
  expect_fault_and_inspect(4, {"WhaleForCausalLM", "qwen3_moe"});
}

TEST_F(Faults, MoreExpertsPerTokenThanThereAreIsTheCheckpointsFault) {
  set_config(model_, "num_experts_per_tok", 999);
  expect_fault_and_inspect(3, {"config.json", "num_experts_per_tok", "999"});
}

TEST_F(Faults, AModelWithoutATokenizerServesIdsButNoText) {
  expect_failure(run_cadre({"generate", "x", "--model", model_}), 3,
                 {"tokenizer.json", "--input-ids"});
  write_file(model_ / "tokenizer.json", "{\"model\":{\"type\":\"Psychic\"}}");
  const Result result = run_cadre({"generate", "x", "--model", model_});
  EXPECT_TRUE(result.exit_code == 3 || result.exit_code == 4) << result.err;
  EXPECT_NE(result.err.find("tokenizer.json"), std::string::npos) << result.err;
}

// ---- places that cannot be written -----------------------------------------------------------

/// The commands that write a file, without --out.
std::vector<std::vector<std::string>> writers() {
  const std::string model = model_folder("olmoe");
  const std::string ids = expected_file("olmoe");
  return {{"forward", "--model", model, "--inputs", ids},
          {"generate", "--model", model, "--input-ids", ids, "--max-new-tokens", "2"},
          {"experts", CADRE_TEST_DATA "/experts/plain.safetensors", "--experts", "eager"},
          {"eval", "--text", CADRE_TEST_DATA "/tiny-moe/heldout.txt"}};
}

void expect_cannot_write(const std::string& out, const std::vector<std::string>& parts) {
  for (std::vector<std::string> call : writers()) {
    SCOPED_TRACE(call.front());
    call.insert(call.end(), {"--out", out});
    expect_failure(run_cadre(call), 1, parts);
  }
}

TEST(Writing, AFullDeviceIsNamedWithTheReason) {
  expect_cannot_write("/dev/full", {"/dev/full", "No space left on device", "bytes", "free space"});
  EXPECT_TRUE(fs::is_character_file("/dev/full"));
}

TEST(Writing, AFullDiskLeavesNothingBehindAndKeepsWhatWasThere) {
  const TempDir folder;
  if (mount("tmpfs", folder.path().c_str(), "tmpfs", 0, "size=4096") != 0) {
    GTEST_SKIP() << "cannot mount a small tmpfs: " << std::strerror(errno);
  }
  const std::string out = folder / "out.safetensors";
  write_file(out, "old");
  expect_cannot_write(out, {out, "No space left on device"});
  EXPECT_EQ(read_file(out), "old");
  EXPECT_EQ(std::distance(fs::directory_iterator(folder.path()), fs::directory_iterator()), 1);
  umount(folder.path().c_str());
}

TEST(Writing, AMissingFolderIsNamedBeforeAnyWork) {
  const TempDir folder;
  expect_cannot_write(folder / "no" / "out", {(folder / "no").string(), "No such file"});
  expect_cannot_write(folder.path(), {folder.path().string(), "got a folder"});
}

TEST(Writing, AnInputIsNeverOverwritten) {
  const TempDir folder;
  const auto model = copy_model("olmoe", folder);
  const auto ids = write_input_ids(folder / "ids.safetensors", {1, 3}, {1, 2, 3});
  fs::create_hard_link(ids, folder / "again.safetensors");
  const auto experts_case = folder / "case.safetensors";
  fs::copy_file(CADRE_TEST_DATA "/experts/plain.safetensors", experts_case);
  const auto text = folder.write("text.txt", "Call me");
  const auto weights = model / "model.safetensors";
  const std::vector<std::vector<std::string>> calls = {
      {"forward", "--model", model, "--inputs", ids, "--out", folder / "again.safetensors"},
      {"forward", "--model", model, "--inputs", ids, "--out", weights},
      {"generate", "--model", model, "--input-ids", ids, "--out", ids},
      {"generate", "--model", model, "--input-ids", ids, "--out", weights},
      {"experts", experts_case, "--experts", "eager", "--out", experts_case},
      {"eval", "--text", text, "--out", text}};
  for (const std::vector<std::string>& call : calls) {
    SCOPED_TRACE(call.front());
    const std::string before = read_file(call.back());
    expect_failure(run_cadre(call), 2, {"--out " + call.back(), "name another place"});
    EXPECT_EQ(read_file(call.back()), before);
  }
}

TEST(Writing, AFullStandardOutputIsAnError) {
  for (const std::vector<std::string>& call :
       {std::vector<std::string>{"generate", "x", "--max-new-tokens", "2"},
        {"generate", "x", "--max-new-tokens", "2", "--json"},
        {"inspect"},
        {"backends", "--json"},
        {"--help"},
        {"--version"}}) {
    SCOPED_TRACE(call.front());
    expect_failure(run_cadre(call, {.stdout_file = "/dev/full"}), 1,
                   {"standard output", "No space left on device"});
  }
}

}  // namespace
}  // namespace cadre::test

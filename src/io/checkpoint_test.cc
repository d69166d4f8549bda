#include "io/checkpoint.h"

#include <gtest/gtest.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using test::expect_error;
using test::TempDir;
namespace fs = std::filesystem;

// Folders with tensors of one byte each.
class CheckpointFolder : public ::testing::Test {
 protected:
  void write_shard(const std::string& file, const std::vector<std::string>& names) {
    static const uint8_t kByte = 7;
    std::vector<NamedTensor> tensors;
    for (const std::string& name : names)
      tensors.push_back({name, TensorView(&kByte, DType::kU8, {1})});
    write_safetensors(dir_ / file, tensors);
  }
  void write_index(const std::string& weight_map) {
    dir_.write("model.safetensors.index.json", "{\"weight_map\": " + weight_map + "}");
  }
  void write_config() { dir_.write("config.json", "{\"model_type\": \"x\"}"); }
  void expect_refused(std::initializer_list<std::string> parts) {
    expect_error<CheckpointError>([&] { Checkpoint::open(dir_.path()); }, parts);
  }

  TempDir dir_;
};

TEST(Checkpoint, OpensTheBundledModelWithAllTensorsOfItsIndex) {
  const Checkpoint checkpoint = Checkpoint::open(fs::path(CADRE_ASSETS) / "tiny-moe");
  const Json index = read_json_file(checkpoint.folder() / "model.safetensors.index.json");
  const Json& map = index.at("weight_map");
  EXPECT_EQ(checkpoint.tensors().size(), map.size());
  size_t bytes = 0;
  for (const CheckpointTensor& tensor : checkpoint.tensors()) {
    EXPECT_EQ(map.at(tensor.name), tensor.file);
    EXPECT_EQ(checkpoint.find(tensor.name), &tensor);
    bytes += tensor.view.nbytes();
  }
  EXPECT_EQ(bytes, index.at("metadata").at("total_size"));
  EXPECT_GT(checkpoint.mapped_bytes(), bytes);
  EXPECT_TRUE(std::is_sorted(checkpoint.tensors().begin(), checkpoint.tensors().end(),
                             [](const auto& a, const auto& b) { return a.name < b.name; }));
  EXPECT_EQ(checkpoint.config().text("model_type"), "qwen3_moe");
  ASSERT_TRUE(checkpoint.generation_config().has_value());
  EXPECT_EQ(checkpoint.find("nothing"), nullptr);
}

TEST_F(CheckpointFolder, ASingleFileNeedsNoIndexAndNoGenerationConfig) {
  write_config();
  write_shard("model.safetensors", {"b", "a"});
  const Checkpoint checkpoint = Checkpoint::open(dir_.path());
  ASSERT_EQ(checkpoint.tensors().size(), 2u);
  EXPECT_EQ(checkpoint.tensors()[0].name, "a");
  EXPECT_EQ(checkpoint.tensors()[0].file, "model.safetensors");
  EXPECT_EQ(checkpoint.tensors()[0].view.as<uint8_t>()[0], 7);
  EXPECT_FALSE(checkpoint.generation_config().has_value());
  EXPECT_EQ(checkpoint.mapped_bytes(), fs::file_size(dir_ / "model.safetensors"));
}

TEST_F(CheckpointFolder, TheSingleFileGoesBeforeAnIndex) {
  write_config();
  write_shard("model.safetensors", {"a"});
  write_index("{\"b\": \"other.safetensors\"}");
  EXPECT_NE(Checkpoint::open(dir_.path()).find("a"), nullptr);
}

TEST_F(CheckpointFolder, TheOwnerKeepsTheViewsAlive) {
  write_config();
  write_shard("model.safetensors", {"a"});
  TensorView view;
  std::shared_ptr<const void> owner;
  {
    const Checkpoint checkpoint = Checkpoint::open(dir_.path());
    view = checkpoint.find("a")->view;
    owner = checkpoint.owner();
  }
  EXPECT_EQ(view.as<uint8_t>()[0], 7);
}

TEST_F(CheckpointFolder, SeveralShardsAreJoined) {
  write_config();
  write_shard("s1.safetensors", {"c", "a"});
  write_shard("s2.safetensors", {"b"});
  write_index("{\"a\": \"s1.safetensors\", \"b\": \"s2.safetensors\", \"c\": \"s1.safetensors\"}");
  const Checkpoint checkpoint = Checkpoint::open(dir_.path());
  ASSERT_EQ(checkpoint.tensors().size(), 3u);
  EXPECT_EQ(checkpoint.find("b")->file, "s2.safetensors");
}

TEST_F(CheckpointFolder, ATensorThatTheIndexDoesNotListIsTaken) {
  write_config();
  write_shard("s1.safetensors", {"a", "unlisted"});
  write_index("{\"a\": \"s1.safetensors\"}");
  EXPECT_NE(Checkpoint::open(dir_.path()).find("unlisted"), nullptr);
}

TEST_F(CheckpointFolder, AMissingFolderOrAFileIsNamed) {
  expect_error<CheckpointError>([&] { Checkpoint::open(dir_ / "none"); },
                                {"none", "expected a folder", "nothing there"});
  const auto file = dir_.write("f", "x");
  expect_error<CheckpointError>([&] { Checkpoint::open(file); }, {"expected a folder", "a file"});
}

TEST_F(CheckpointFolder, WithoutConfig) {
  write_shard("model.safetensors", {"a"});
  expect_refused({"config.json", "No such file"});
}

TEST_F(CheckpointFolder, ADamagedGenerationConfigIsNotIgnored) {
  write_config();
  write_shard("model.safetensors", {"a"});
  dir_.write("generation_config.json", "{");
  expect_refused({"generation_config.json", "malformed"});
}

TEST_F(CheckpointFolder, ALinkToNothingIsNotAnAbsentFile) {
  write_config();
  write_shard("s1.safetensors", {"a"});
  write_index("{\"a\": \"s1.safetensors\"}");
  for (const char* name : {"generation_config.json", "model.safetensors",
                           "model.safetensors.index.json", "s1.safetensors", "config.json"}) {
    const std::string file = (dir_ / name).string();
    if (fs::exists(file)) fs::rename(file, file + ".kept");
    fs::create_symlink("../blobs/gone", file);
    expect_refused({file, "link to \"../blobs/gone\"", "No such file", "fetch"});
    fs::remove(file);
    if (fs::exists(file + ".kept")) fs::rename(file + ".kept", file);
  }
  fs::create_symlink("model.safetensors", dir_ / "model.safetensors");
  expect_refused({"link to \"model.safetensors\"", "symbolic links"});
}

TEST_F(CheckpointFolder, LinksToFilesAreFollowed) {
  dir_.write("blobs/1", "{\"model_type\": \"x\"}");
  write_shard("blobs/2", {"a"});
  fs::create_symlink("blobs/1", dir_ / "config.json");
  fs::create_symlink("blobs/2", dir_ / "model.safetensors");
  EXPECT_NE(Checkpoint::open(dir_.path()).find("a"), nullptr);
}

TEST_F(CheckpointFolder, WithoutWeightsSaysWhatWasLookedFor) {
  write_config();
  expect_refused({"no weights", "model.safetensors", "model.safetensors.index.json", "fetch"});
  dir_.write("pytorch_model.bin", "x");
  expect_refused({"no weights", "pytorch_model.bin", "convert"});
}

TEST_F(CheckpointFolder, AMissingShardIsNamedWithWhatItHolds) {
  write_config();
  write_shard("s1.safetensors", {"a"});
  write_index("{\"a\": \"s1.safetensors\", \"b\": \"s2.safetensors\", \"c\": \"s2.safetensors\"}");
  expect_refused({"s2.safetensors", "missing", "2 tensors", "\"b\""});
}

TEST_F(CheckpointFolder, ADamagedShardIsNamed) {
  write_config();
  dir_.write("s1.safetensors", "1234");
  write_index("{\"a\": \"s1.safetensors\"}");
  expect_refused({"s1.safetensors", "not a safetensors file"});
}

TEST_F(CheckpointFolder, ATensorInNoShardIsNamed) {
  write_config();
  write_shard("s1.safetensors", {"a"});
  write_index("{\"a\": \"s1.safetensors\", \"gone\": \"s1.safetensors\"}");
  expect_refused({"s1.safetensors", "\"gone\"", "missing"});
}

TEST_F(CheckpointFolder, ATensorThatTheIndexPlacesElsewhereIsNamed) {
  write_config();
  write_shard("s1.safetensors", {"a", "b"});
  write_shard("s2.safetensors", {"c"});
  write_index("{\"a\": \"s1.safetensors\", \"b\": \"s2.safetensors\", \"c\": \"s2.safetensors\"}");
  expect_refused({"\"b\"", "is in \"s1.safetensors\"", "places it in \"s2.safetensors\""});
}

TEST_F(CheckpointFolder, ATensorInTwoShardsIsNamed) {
  write_config();
  write_shard("s1.safetensors", {"a", "b"});
  write_shard("s2.safetensors", {"b"});
  write_index("{\"a\": \"s1.safetensors\", \"b\": \"s2.safetensors\"}");
  expect_refused({"\"b\"", "in two files", "\"s1.safetensors\" and \"s2.safetensors\""});
}

TEST_F(CheckpointFolder, ShardNamesThatLeaveTheFolderAreRefused) {
  write_config();
  for (const char* name : {"../s", "/etc/passwd", "a/b", "..", ".", "", "a\\\\b", "a\\u0000b",
                           "x\\n\\u001b[31mFAKE"}) {
    write_index("{\"t\": \"" + std::string(name) + "\"}");
    expect_refused({"index.json", "\"t\"", "a file in the same folder"});
  }
}

TEST_F(CheckpointFolder, AnIndexOfTheWrongForm) {
  write_config();
  write_index("[]");
  expect_refused({"index.json", "weight_map", "an object"});
  write_index("{}");
  expect_refused({"index.json", "expected tensors"});
  write_index("{\"t\": 1}");
  expect_refused({"\"t\"", "number"});
  write_index("{\"t\": \"a\", \"t\": \"a\"}");
  expect_refused({"\"t\" occurs twice"});
  dir_.write("model.safetensors.index.json", "{}");
  expect_refused({"weight_map", "missing"});
}

// --- resolve_model_path ---

class HubCache : public ::testing::Test {
 protected:
  HubCache() {
    for (const char* name : kVariables) {
      const char* value = std::getenv(name);
      before_.push_back(value == nullptr ? std::nullopt : std::optional<std::string>(value));
      unsetenv(name);
    }
    setenv("HF_HUB_CACHE", dir_.path().c_str(), 1);
  }
  ~HubCache() override {
    for (size_t i = 0; i < before_.size(); ++i) {
      if (before_[i]) {
        setenv(kVariables[i], before_[i]->c_str(), 1);
      } else {
        unsetenv(kVariables[i]);
      }
    }
  }
  fs::path add(const fs::path& cache, const std::string& ref = "main") {
    const fs::path repository = cache / "models--owner--name";
    dir_.write(fs::relative(repository / "refs" / ref, dir_.path()), "abc123\n");
    fs::create_directories(repository / "snapshots" / "abc123");
    return repository / "snapshots" / "abc123";
  }

  static constexpr const char* kVariables[] = {"HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME", "HOME"};
  TempDir dir_;
  std::vector<std::optional<std::string>> before_;
};

TEST_F(HubCache, AFolderIsTakenAsItIs) {
  EXPECT_EQ(resolve_model_path(dir_.path().string()), dir_.path());
}

TEST_F(HubCache, AnIdIsLookedUpAtMain) {
  const fs::path snapshot = add(dir_.path());
  EXPECT_EQ(resolve_model_path("owner/name"), snapshot);
}

TEST_F(HubCache, ARevisionIsABranchATagOrACommit) {
  const fs::path snapshot = add(dir_.path(), "v1.0");
  EXPECT_EQ(resolve_model_path("owner/name", "v1.0"), snapshot);
  EXPECT_EQ(resolve_model_path("owner/name", "abc123"), snapshot);
  add(dir_.path(), "refs/pr/1");
  EXPECT_EQ(resolve_model_path("owner/name", "refs/pr/1"), snapshot);
}

TEST_F(HubCache, IdsWithoutOwnerAreLookedUpToo) {
  fs::create_directories(dir_ / "models--gpt2/snapshots/main");
  EXPECT_EQ(resolve_model_path("gpt2"), dir_ / "models--gpt2/snapshots/main");
}

TEST_F(HubCache, TheFirstVariableThatIsSetNamesTheCache) {
  setenv("HOME", (dir_ / "home").c_str(), 1);
  unsetenv("HF_HUB_CACHE");
  const fs::path in_home = add(dir_ / "home/.cache/huggingface/hub");
  EXPECT_EQ(resolve_model_path("owner/name"), in_home);
  setenv("XDG_CACHE_HOME", (dir_ / "xdg").c_str(), 1);
  const fs::path in_xdg = add(dir_ / "xdg/huggingface/hub");
  EXPECT_EQ(resolve_model_path("owner/name"), in_xdg);
  setenv("HF_HOME", (dir_ / "hf").c_str(), 1);
  const fs::path in_hf = add(dir_ / "hf/hub");
  EXPECT_EQ(resolve_model_path("owner/name"), in_hf);
  setenv("HF_HUB_CACHE", (dir_ / "cache").c_str(), 1);
  const fs::path in_cache = add(dir_ / "cache");
  EXPECT_EQ(resolve_model_path("owner/name"), in_cache);
}

TEST_F(HubCache, AModelThatIsNotThereSaysWhereAndHowToGetIt) {
  expect_error<CheckpointError>(
      [] { resolve_model_path("owner/other"); },
      {"\"owner/other\"", (dir_ / "models--owner--other").string(), "hf download owner/other"});
}

TEST_F(HubCache, ARevisionThatIsNotThereListsThoseThereAre) {
  add(dir_.path());
  expect_error<CheckpointError>([] { resolve_model_path("owner/name", "v9"); },
                                {"\"v9\"", "there are: abc123, main", "--revision v9"});
}

TEST_F(HubCache, ASnapshotThatIsGoneIsNamed) {
  fs::remove(add(dir_.path()));
  expect_error<CheckpointError>([] { resolve_model_path("owner/name"); },
                                {"snapshots/abc123", "there are: none", "hf download"});
}

TEST_F(HubCache, RefsAreListedByTheirWholeNameAndOnlyWithASnapshot) {
  add(dir_.path(), "refs/pr/1");
  dir_.write("models--owner--name/refs/gone", "def456");
  dir_.write("models--owner--name/refs/damaged", "../x");
  expect_error<CheckpointError>([] { resolve_model_path("owner/name", "v9"); },
                                {"there are: abc123, refs/pr/1;"});
}

TEST_F(HubCache, WithoutHomeTheUserDatabaseNamesIt) {
  unsetenv("HF_HUB_CACHE");
  const passwd* entry = getpwuid(getuid());
  if (entry == nullptr) GTEST_SKIP() << "this user is in no database";
  const std::string there = (fs::path(entry->pw_dir) / ".cache/huggingface/hub").string();
  for (const bool is_empty : {false, true}) {
    if (is_empty) setenv("HOME", "", 1);
    expect_error<CheckpointError>([] { resolve_model_path("no-such-owner/no-such-name"); },
                                  {there + "/models--no-such-owner--no-such-name"});
  }
}

TEST_F(HubCache, IdsThatWouldLeaveTheCacheAreRefused) {
  fs::create_directories(dir_ / "outside");
  for (const char* id : {"../outside/none", "/none/at/all", "..", "a/../b", "a/b/c", "", "~/x",
                         "a/", "/a", "a//b", "owner/na me", ".hidden/x", "owner--name"}) {
    if (std::string(id) == "..") continue;  // a folder, taken as it is
    expect_error<CheckpointError>([&] { resolve_model_path(id); },
                                  {"no such folder", "owner/name"});
  }
}

TEST_F(HubCache, RevisionsThatWouldLeaveTheCacheAreRefused) {
  add(dir_.path());
  for (const char* revision :
       {"../refs/main", "..", ".", "/etc", "a/../../b", "a//b", "a/", "x y"}) {
    expect_error<CheckpointError>([&] { resolve_model_path("owner/name", revision); },
                                  {"branch, tag or commit", revision});
  }
}

TEST_F(HubCache, ARefThatHoldsNoCommitIsRefused) {
  add(dir_.path());
  dir_.write("models--owner--name/refs/main", "../../../etc");
  expect_error<CheckpointError>([] { resolve_model_path("owner/name"); },
                                {"refs/main", "expected a commit", "../../../etc"});
  dir_.write("models--owner--name/refs/main", "");
  expect_error<CheckpointError>([] { resolve_model_path("owner/name"); }, {"expected a commit"});
}

TEST_F(HubCache, AFileIsNoModel) {
  const auto file = dir_.write("config.json", "{}");
  expect_error<CheckpointError>([&] { resolve_model_path(file.string()); },
                                {"expected a folder", "give the folder"});
}

}  // namespace
}  // namespace cadre

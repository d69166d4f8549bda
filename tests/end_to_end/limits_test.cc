// What the system does to a running command - file size limits, files that shrink - and models
// whose parts do not fit each other or whose numbers are no numbers.
#include <sys/resource.h>

#include <cstring>

#include "end_to_end/fixtures.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

const fs::path kTinyMoe = fs::path(CADRE_ASSETS) / "tiny-moe";

/// A copy of the bundled model, with its tokenizer, that a test may damage.
class Limits : public testing::Test {
 protected:
  Limits() : model_(folder_ / "model") { fs::copy(kTinyMoe, model_); }

  /// Every shard's values of layer 0's first norm become `bits`, a bfloat16.
  void damage_weights(uint16_t bits) {
    for (const auto& entry : fs::directory_iterator(model_)) {
      if (entry.path().extension() != ".safetensors") continue;
      std::string bytes = read_file(entry.path());
      uint64_t length = 0;
      std::memcpy(&length, bytes.data(), sizeof length);
      const auto header = nlohmann::json::parse(bytes.substr(sizeof length, length));
      const char* kName = "model.layers.0.input_layernorm.weight";
      if (!header.contains(kName)) continue;
      const auto range = header[kName]["data_offsets"].get<std::vector<size_t>>();
      for (size_t i = range[0]; i < range[1]; i += 2) {
        std::memcpy(bytes.data() + sizeof length + length + i, &bits, sizeof bits);
      }
      write_file(entry.path(), bytes);
      return;
    }
    FAIL() << "no such tensor";
  }

  TempDir folder_;
  fs::path model_;
};

/// While it lives, files that this process and its children write end after `bytes`.
class FileSizeLimit {
 public:
  explicit FileSizeLimit(rlim_t bytes) {
    getrlimit(RLIMIT_FSIZE, &before_);
    const rlimit small{bytes, before_.rlim_max};
    setrlimit(RLIMIT_FSIZE, &small);
  }
  ~FileSizeLimit() { setrlimit(RLIMIT_FSIZE, &before_); }
  FileSizeLimit(const FileSizeLimit&) = delete;
  FileSizeLimit& operator=(const FileSizeLimit&) = delete;

 private:
  rlimit before_{};
};

TEST_F(Limits, AFileSizeLimitIsAFailedWriteThatLeavesNothingBehind) {
  const fs::path input = write_input_ids(folder_ / "in.safetensors", {1, 20}, {1});
  const fs::path out = folder_ / "out" / "big.safetensors";
  fs::create_directory(out.parent_path());
  const FileSizeLimit limit(1024);
  const Result result = run_cadre({"forward", "--model", model_, "--inputs", input, "--out", out});
  expect_failure(result, 1, {"cannot write", out, "File too large", "ulimit -f"});
  EXPECT_TRUE(fs::is_empty(out.parent_path()));
}

TEST_F(Limits, AFileSizeLimitOnStandardOutputIsAFailedWrite) {
  RunOptions options;
  options.stdout_file = folder_ / "text";
  write_file(options.stdout_file, "");
  const FileSizeLimit limit(0);
  const Result result =
      run_cadre({"generate", "ab", "--model", model_, "--max-new-tokens", "2"}, options);
  expect_failure(result, 1, {"standard output", "File too large"});
}

TEST_F(Limits, AShardThatShrinksWhileItIsUsedEndsWithOneLine) {
  Process process({"generate", "Once", "--model", model_, "--max-new-tokens", "2000",
                   "--ignore-eos", "--quiet"});
  process.wait_for_output(1);
  for (const auto& entry : fs::directory_iterator(model_)) {
    if (entry.path().extension() == ".safetensors") fs::resize_file(entry.path(), 4096);
  }
  const Result result = process.wait();
  EXPECT_EQ(result.signal, 0);
  EXPECT_EQ(result.exit_code, 3);
  EXPECT_EQ(result.err.rfind("cadre: expected the model's files to stay", 0), 0u) << result.err;
  EXPECT_EQ(result.err.find("fetch the model again\n") + 22, result.err.size()) << result.err;
}

TEST_F(Limits, ATokenizerWithIdsBeyondTheModelsIsTheCheckpointsFault) {
  const fs::path file = model_ / "tokenizer.json";
  auto tokenizer = nlohmann::json::parse(read_file(file));
  tokenizer["model"]["vocab"]["ab"] = 5000;
  write_file(file, tokenizer.dump());
  const auto generate = [&](const char* prompt) {
    return run_cadre({"generate", prompt, "--model", model_, "--max-new-tokens", "1"});
  };
  expect_failure(generate("ab"), 3, {file, "id 5000", "\"ab\"", "vocab_size"});
  EXPECT_EQ(generate("Once").exit_code, 0);
}

TEST_F(Limits, ATokenizerLinkToNothingIsNotAnAbsentTokenizer) {
  fs::remove(model_ / "tokenizer.json");
  fs::create_symlink("../blobs/gone", model_ / "tokenizer.json");
  expect_failure(run_cadre({"generate", "ab", "--model", model_}), 3,
                 {model_ / "tokenizer.json", "link to \"../blobs/gone\"", "fetch"});
}

TEST_F(Limits, WeightsThatAreNoNumbersFailWithTheModelsName) {
  const fs::path text = folder_ / "text";
  write_file(text, "a b c d e f g h i j k");
  const uint16_t kNan = 0x7fc0;
  const uint16_t kInfinity = 0x7f80;
  for (const uint16_t bits : {kNan, kInfinity}) {
    damage_weights(bits);
    for (const char* dtype : {"float32", "bfloat16"}) {
      for (const bool json : {false, true}) {
        std::vector<std::string> eval = {"eval",
                                         "--model",
                                         model_,
                                         "--text",
                                         text,
                                         "--window",
                                         "4",
                                         "--dtype",
                                         dtype,
                                         "--out",
                                         folder_ / "nll.safetensors"};
        if (json) eval.push_back("--json");
        expect_failure(run_cadre(eval), 3, {"finite perplexity", model_, "weights or config.json"});
        EXPECT_FALSE(fs::exists(folder_ / "nll.safetensors"));
      }
      expect_failure(run_cadre({"generate", "ab", "--model", model_, "--dtype", dtype,
                                "--max-new-tokens", "1"}),
                     3, {"NaN", model_, "weights or config.json"});
    }
  }
}

}  // namespace
}  // namespace cadre::test

// Peak memory of `generate` on a checkpoint of more than 2 GB: what is mapped, plus the KV cache
// and workspaces that it reports, plus 64 MiB. With packed experts: these, in place of the mapped
// ones.
#include <fcntl.h>
#include <sys/statvfs.h>
#include <unistd.h>

#include <cstring>
#include <iostream>
#include <random>

#include "cadre/float16.h"
#include "core/str_cat.h"
#include "end_to_end/fixtures.h"
#include "models/host_memory.h"

namespace cadre::test {
namespace {

namespace fs = std::filesystem;

constexpr size_t kSlack = size_t{64} << 20;
constexpr size_t kNeeded = size_t{6} << 30;  // of disk and of memory

constexpr int64_t kHidden = 1024;
constexpr int64_t kIntermediate = 1024;
constexpr int64_t kExperts = 64;
constexpr int64_t kLayers = 6;
constexpr int64_t kVocab = 2048;
constexpr int64_t kHeads = 8;
constexpr int64_t kKvHeads = 2;
constexpr int64_t kHeadDim = 128;

struct Entry {
  std::string name;
  std::vector<int64_t> shape;
};

/// Values small enough that activations stay finite; their order does not matter.
std::string random_bfloat16(size_t count) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> uniform(-0.04f, 0.04f);
  std::string bytes(count * sizeof(BFloat16), '\0');
  for (size_t i = 0; i < count; ++i) {
    const BFloat16 value(uniform(random));
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

void write_all(int file, std::string_view bytes) {
  while (!bytes.empty()) {
    const ssize_t count = write(file, bytes.data(), bytes.size());
    if (count <= 0) throw std::runtime_error("cannot write the synthetic checkpoint");
    bytes.remove_prefix(static_cast<size_t>(count));
  }
}

/// One shard of bfloat16 tensors; its data is `pattern` over and over, or a hole that takes no disk
/// when it is empty.
void write_shard(const fs::path& path, const std::vector<Entry>& entries,
                 std::string_view pattern) {
  nlohmann::json header = nlohmann::json::object();
  size_t bytes = 0;
  for (const Entry& entry : entries) {
    size_t size = sizeof(BFloat16);
    for (const int64_t dim : entry.shape) size *= static_cast<size_t>(dim);
    header[entry.name] = {
        {"dtype", "BF16"}, {"shape", entry.shape}, {"data_offsets", {bytes, bytes + size}}};
    bytes += size;
  }
  const std::string text = header.dump();
  const uint64_t length = text.size();
  std::string start(sizeof length, '\0');
  std::memcpy(start.data(), &length, sizeof length);
  const int file = open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
  write_all(file, start + text);
  if (pattern.empty()) {
    const size_t size = sizeof length + text.size() + bytes;
    const int failed = ftruncate(file, static_cast<off_t>(size));
    close(file);
    if (failed != 0) throw std::runtime_error("cannot make the file with a hole");
    return;
  }
  for (; bytes > pattern.size(); bytes -= pattern.size()) write_all(file, pattern);
  write_all(file, pattern.substr(0, bytes));
  close(file);
}

std::vector<Entry> layer_entries(int64_t layer, int64_t intermediate) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const std::string attention = prefix + "self_attn.";
  std::vector<Entry> entries = {{prefix + "input_layernorm.weight", {kHidden}},
                                {prefix + "post_attention_layernorm.weight", {kHidden}},
                                {attention + "q_proj.weight", {kHeads * kHeadDim, kHidden}},
                                {attention + "k_proj.weight", {kKvHeads * kHeadDim, kHidden}},
                                {attention + "v_proj.weight", {kKvHeads * kHeadDim, kHidden}},
                                {attention + "o_proj.weight", {kHidden, kHeads * kHeadDim}},
                                {attention + "q_norm.weight", {kHeadDim}},
                                {attention + "k_norm.weight", {kHeadDim}},
                                {prefix + "mlp.gate.weight", {kExperts, kHidden}}};
  for (int64_t e = 0; e < kExperts; ++e) {
    const std::string expert = prefix + "mlp.experts." + std::to_string(e) + ".";
    entries.push_back({expert + "gate_proj.weight", {intermediate, kHidden}});
    entries.push_back({expert + "up_proj.weight", {intermediate, kHidden}});
    entries.push_back({expert + "down_proj.weight", {kHidden, intermediate}});
  }
  return entries;
}

/// Six layers; random values, or holes.
void write_checkpoint(const fs::path& folder, int64_t intermediate = kIntermediate,
                      bool holes = false) {
  const std::string pattern = holes ? "" : random_bfloat16(size_t{8} << 20);
  nlohmann::json weight_map = nlohmann::json::object();
  for (int64_t i = 0; i <= kLayers; ++i) {
    const std::vector<Entry> entries =
        i < kLayers ? layer_entries(i, intermediate)
                    : std::vector<Entry>{{"model.embed_tokens.weight", {kVocab, kHidden}},
                                         {"model.norm.weight", {kHidden}},
                                         {"lm_head.weight", {kVocab, kHidden}}};
    const std::string file = "model-0000" + std::to_string(i + 1) + "-of-00007.safetensors";
    write_shard(folder / file, entries, pattern);
    for (const Entry& entry : entries) weight_map[entry.name] = file;
  }
  write_file(folder / "model.safetensors.index.json",
             nlohmann::json{{"weight_map", weight_map}}.dump());
  write_file(folder / "config.json", nlohmann::json{{"architectures", {"Qwen3MoeForCausalLM"}},
                                                    {"model_type", "qwen3_moe"},
                                                    {"dtype", "bfloat16"},
                                                    {"vocab_size", kVocab},
                                                    {"hidden_size", kHidden},
                                                    {"intermediate_size", 2 * intermediate},
                                                    {"moe_intermediate_size", intermediate},
                                                    {"num_hidden_layers", kLayers},
                                                    {"num_attention_heads", kHeads},
                                                    {"num_key_value_heads", kKvHeads},
                                                    {"head_dim", kHeadDim},
                                                    {"num_experts", kExperts},
                                                    {"num_experts_per_tok", 8},
                                                    {"norm_topk_prob", true},
                                                    {"decoder_sparse_step", 1},
                                                    {"mlp_only_layers", nlohmann::json::array()},
                                                    {"hidden_act", "silu"},
                                                    {"rms_norm_eps", 1e-6},
                                                    {"rope_theta", 10000.0},
                                                    {"max_position_embeddings", 1024},
                                                    {"tie_word_embeddings", false}}
                                         .dump());
}

std::string reason_to_skip(const fs::path& folder) {
  if (std::string_view(CADRE_SANITIZERS) != "") return "sanitizers keep memory of their own";
  struct statvfs disk {};
  if (statvfs(folder.c_str(), &disk) != 0 || disk.f_bavail * disk.f_frsize < kNeeded) {
    return "less than 6 GiB of disk in " + folder.string();
  }
  if (available_host_memory().value_or(0) < kNeeded) return "less than 6 GiB of memory";
  return "";
}

class Memory : public testing::Test {
 protected:
  void SetUp() override {
    if (const std::string reason = reason_to_skip(folder_.path()); !reason.empty()) {
      GTEST_SKIP() << reason;
    }
  }
  Result generate(const std::vector<std::string>& options) const {
    std::vector<int64_t> ids(128);
    for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 977 % kVocab);
    const auto input = write_input_ids(folder_ / "ids.safetensors", {1, 128}, ids);
    std::vector<std::string> call = {
        "generate",         "--model", folder_.path(), "--input-ids", input,
        "--max-new-tokens", "8",       "--ignore-eos", "--stats",     "--json"};
    call.insert(call.end(), options.begin(), options.end());
    return run_cadre(call);
  }

  const TempDir folder_;
};

/// Runs that report their memory: peak and the parts of the report.
struct Report {
  explicit Report(const Result& result) : peak(result.peak_bytes) {
    expect_success(result);
    const nlohmann::json json = json_of(result);
    const nlohmann::json& stats = json["stats"];
    mapped = stats["mapped_bytes"].get<size_t>();
    added = stats["added_bytes"].get<size_t>();
    others = stats["kv_cache_bytes"].get<size_t>() + stats["workspace_bytes"].get<size_t>();
    ids = json["output_ids"];
    std::cout << "peak " << format_bytes(peak) << ", mapped " << format_bytes(mapped) << ", added "
              << format_bytes(added) << ", cache and workspaces " << format_bytes(others) << "\n";
  }
  size_t peak, mapped, added, others;
  nlohmann::json ids;
};

TEST_F(Memory, GenerateStaysWithinItsMappedWeightsCacheAndWorkspaces) {
  write_checkpoint(folder_.path());
  const Report in_place(generate({"--prepack", "off"}));
  EXPECT_GE(in_place.mapped, size_t{2} << 30);
  EXPECT_EQ(in_place.added, 0u);
  EXPECT_LE(in_place.peak, in_place.mapped + in_place.others + kSlack);
  // The prompt reaches most experts, so a second copy of the weights would not go unseen.
  EXPECT_GE(in_place.peak, in_place.mapped / 2);

  const Report packed(generate({"--prepack", "on"}));
  constexpr size_t kExpertBytes = size_t{3} * kHidden * kIntermediate * sizeof(BFloat16);
  constexpr size_t kExpertsBytes = kExpertBytes * kExperts * kLayers;
  EXPECT_EQ(packed.ids, in_place.ids);
  EXPECT_EQ(packed.added, kExpertsBytes);  // sizes without padding
  EXPECT_LE(packed.peak,
            packed.added + kExpertBytes + (packed.mapped - kExpertsBytes) + packed.others + kSlack);
  EXPECT_GE(packed.peak, packed.added);

  // What reads no weights stays small beside the same checkpoint.
  for (const std::vector<std::string>& call : {std::vector<std::string>{"inspect", folder_.path()},
                                               {"backends", "--model", folder_.path()}}) {
    const Result answer = run_cadre(call);
    expect_success(answer);
    EXPECT_LE(answer.peak_bytes, kSlack) << call.front();
  }
}

// Experts of more bytes than there is memory, in a file that takes no disk.
TEST_F(Memory, PackingMoreThanThereIsIsRefusedBeforeItBegins) {
  const size_t available = available_host_memory().value_or(0);
  constexpr size_t kColumnBytes = size_t{3} * kHidden * sizeof(BFloat16) * kExperts * kLayers;
  const auto intermediate = static_cast<int64_t>(available / kColumnBytes * 2);
  write_checkpoint(folder_.path(), intermediate, /*holes=*/true);
  const Result result = generate({"--prepack", "on"});
  expect_failure(result, 5, {"prepack", "packed experts need", "GiB", "is available", "use off"});
  EXPECT_LE(result.peak_bytes, kSlack);
}

}  // namespace
}  // namespace cadre::test

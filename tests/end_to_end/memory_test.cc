// Peak memory of `generate` on a checkpoint of more than 2 GB: what is mapped, plus the KV cache
// and workspaces that it reports, plus 64 MiB.
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
constexpr size_t kNeeded = size_t{5} << 30;  // of disk and of memory

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

/// One shard of bfloat16 tensors; its data is `pattern` over and over.
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
  for (; bytes > pattern.size(); bytes -= pattern.size()) write_all(file, pattern);
  write_all(file, pattern.substr(0, bytes));
  close(file);
}

std::vector<Entry> layer_entries(int64_t layer) {
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
    entries.push_back({expert + "gate_proj.weight", {kIntermediate, kHidden}});
    entries.push_back({expert + "up_proj.weight", {kIntermediate, kHidden}});
    entries.push_back({expert + "down_proj.weight", {kHidden, kIntermediate}});
  }
  return entries;
}

void write_checkpoint(const fs::path& folder) {
  const std::string pattern = random_bfloat16(size_t{8} << 20);
  nlohmann::json weight_map = nlohmann::json::object();
  for (int64_t i = 0; i <= kLayers; ++i) {
    const std::vector<Entry> entries =
        i < kLayers ? layer_entries(i)
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
                                                    {"intermediate_size", 2 * kIntermediate},
                                                    {"moe_intermediate_size", kIntermediate},
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
    return "less than 5 GiB of disk in " + folder.string();
  }
  if (available_host_memory().value_or(0) < kNeeded) return "less than 5 GiB of memory";
  return "";
}

TEST(Memory, GenerateStaysWithinItsMappedWeightsCacheAndWorkspaces) {
  const TempDir folder;
  if (const std::string reason = reason_to_skip(folder.path()); !reason.empty()) {
    GTEST_SKIP() << reason;
  }
  write_checkpoint(folder.path());
  std::vector<int64_t> ids(128);
  for (size_t i = 0; i < ids.size(); ++i) ids[i] = static_cast<int64_t>(i * 977 % kVocab);
  const auto input = write_input_ids(folder / "ids.safetensors", {1, 128}, ids);
  const Result result = run_cadre({"generate", "--model", folder.path(), "--input-ids", input,
                                   "--max-new-tokens", "8", "--ignore-eos", "--stats", "--json"});
  expect_success(result);
  const nlohmann::json stats = json_of(result)["stats"];
  const auto mapped = stats["mapped_bytes"].get<size_t>();
  const size_t reported =
      mapped + stats["kv_cache_bytes"].get<size_t>() + stats["workspace_bytes"].get<size_t>();
  std::cout << "peak " << format_bytes(result.peak_bytes) << ", reported " << format_bytes(reported)
            << ", mapped " << format_bytes(mapped) << "\n";
  EXPECT_GE(mapped, size_t{2} << 30);
  EXPECT_LE(result.peak_bytes, reported + kSlack);
  // The prompt reaches most experts, so a second copy of the weights would not go unseen.
  EXPECT_GE(result.peak_bytes, mapped / 2);

  // What reads no weights stays small beside the same checkpoint.
  for (const std::vector<std::string>& call : {std::vector<std::string>{"inspect", folder.path()},
                                               {"backends", "--model", folder.path()}}) {
    const Result answer = run_cadre(call);
    expect_success(answer);
    EXPECT_LE(answer.peak_bytes, kSlack) << call.front();
  }
}

}  // namespace
}  // namespace cadre::test

#include "synthetic_model.h"

#include <stdlib.h>

#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <nlohmann/json.hpp>
#include <random>
#include <span>
#include <system_error>
#include <vector>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "core/str_cat.h"
#include "io/file_handle.h"
#include "io/file_writer.h"
#include "io/json.h"
#include "table.h"

namespace cadre::cli {

namespace {

struct Entry {
  std::string name;
  std::vector<int64_t> shape;
};

/// A double: the largest shapes overflow 64 bits.
double bytes_of(const Entry& entry) {
  double bytes = sizeof(BFloat16);
  for (const int64_t dim : entry.shape) bytes *= static_cast<double>(dim);
  return bytes;
}

std::vector<Entry> layer_entries(const SyntheticModel& m, int64_t layer) {
  const ExpertsConfig& c = m.experts;
  const std::string prefix = str_cat("model.layers.", layer, ".");
  const std::string attention = prefix + "self_attn.";
  std::vector<Entry> entries = {
      {prefix + "input_layernorm.weight", {c.hidden_size}},
      {prefix + "post_attention_layernorm.weight", {c.hidden_size}},
      {attention + "q_proj.weight", {m.num_heads * m.head_dim, c.hidden_size}},
      {attention + "k_proj.weight", {m.num_kv_heads * m.head_dim, c.hidden_size}},
      {attention + "v_proj.weight", {m.num_kv_heads * m.head_dim, c.hidden_size}},
      {attention + "o_proj.weight", {c.hidden_size, m.num_heads * m.head_dim}},
      {attention + "q_norm.weight", {m.head_dim}},
      {attention + "k_norm.weight", {m.head_dim}},
      {prefix + "mlp.gate.weight", {c.num_experts, c.hidden_size}}};
  for (int64_t e = 0; e < c.num_experts; ++e) {
    const std::string expert = str_cat(prefix, "mlp.experts.", e, ".");
    entries.push_back({expert + "gate_proj.weight", {c.intermediate_size, c.hidden_size}});
    entries.push_back({expert + "up_proj.weight", {c.intermediate_size, c.hidden_size}});
    entries.push_back({expert + "down_proj.weight", {c.hidden_size, c.intermediate_size}});
  }
  return entries;
}

/// The tensors of shard i: a layer each, then what stands around the layers.
std::vector<Entry> shard_entries(const SyntheticModel& m, int64_t i) {
  if (i < m.num_layers) return layer_entries(m, i);
  return {{"model.embed_tokens.weight", {m.vocab_size, m.experts.hidden_size}},
          {"model.norm.weight", {m.experts.hidden_size}},
          {"lm_head.weight", {m.vocab_size, m.experts.hidden_size}}};
}

/// Small enough that activations stay finite. A prime number of values, so that no two experts are
/// equal.
std::vector<char> random_pattern() {
  constexpr size_t kValues = 1048573;
  std::mt19937 random(1);
  std::normal_distribution<float> normal(0, 0.02f);
  std::vector<char> bytes(kValues * sizeof(BFloat16));
  for (size_t i = 0; i < kValues; ++i) {
    const BFloat16 value(normal(random));
    std::memcpy(bytes.data() + i * sizeof value, &value, sizeof value);
  }
  return bytes;
}

void write_shard(const std::filesystem::path& path, const std::vector<Entry>& entries,
                 std::span<const char> pattern) {
  Json header = Json::object();
  size_t bytes = 0;
  for (const Entry& entry : entries) {
    const size_t end = bytes + static_cast<size_t>(bytes_of(entry));
    header[entry.name] = {
        {"dtype", "BF16"}, {"shape", entry.shape}, {"data_offsets", {bytes, end}}};
    bytes = end;
  }
  std::string text = header.dump();
  text.resize((text.size() + 7) / 8 * 8, ' ');  // as safetensors' own writer does
  const uint64_t length = text.size();
  FileWriter writer(path, sizeof length + text.size() + bytes);
  writer.write(std::as_bytes(std::span(&length, 1)));
  writer.write(std::as_bytes(std::span(text)));
  for (; bytes > pattern.size(); bytes -= pattern.size()) writer.write(std::as_bytes(pattern));
  writer.write(std::as_bytes(pattern.first(bytes)));
  writer.commit();
}

void write_text(const std::filesystem::path& path, const std::string& text) {
  FileWriter writer(path, text.size());
  writer.write(std::as_bytes(std::span(text)));
  writer.commit();
}

Json config_of(const SyntheticModel& m) {
  const ExpertsConfig& c = m.experts;
  return Json{{"architectures", {"Qwen3MoeForCausalLM"}},
              {"model_type", "qwen3_moe"},
              {"dtype", "bfloat16"},
              {"vocab_size", m.vocab_size},
              {"hidden_size", c.hidden_size},
              {"intermediate_size", 4 * c.hidden_size},
              {"moe_intermediate_size", c.intermediate_size},
              {"num_hidden_layers", m.num_layers},
              {"num_attention_heads", m.num_heads},
              {"num_key_value_heads", m.num_kv_heads},
              {"head_dim", m.head_dim},
              {"num_experts", c.num_experts},
              {"num_experts_per_tok", c.top_k},
              {"norm_topk_prob", true},
              {"decoder_sparse_step", 1},
              {"mlp_only_layers", Json::array()},
              {"hidden_act", "silu"},
              {"rms_norm_eps", 1e-6},
              {"rope_theta", 1e6},
              {"max_position_embeddings", 40960},
              {"tie_word_embeddings", false}};
}

}  // namespace

double weight_bytes(const SyntheticModel& model) {
  const auto sum = [&](int64_t shard) {
    double bytes = 0;
    for (const Entry& entry : shard_entries(model, shard)) bytes += bytes_of(entry);
    return bytes;
  };
  return static_cast<double>(model.num_layers) * sum(0) + sum(model.num_layers);
}

void require_space(const SyntheticModel& model, const std::filesystem::path& folder) {
  std::error_code error;
  const std::filesystem::space_info space = std::filesystem::space(folder, error);
  const double bytes = weight_bytes(model);
  if (error || bytes <= static_cast<double>(space.available)) return;
  throw Error(str_cat("the synthetic model needs ", format_number("%.1f", bytes / (1 << 30)),
                      " GiB, ", folder.string(), " has ", format_bytes(space.available),
                      " free; use fewer layers or experts, or set TMPDIR to a folder on another "
                      "disk"));
}

void write_synthetic_model(const SyntheticModel& model, const std::filesystem::path& folder,
                           const ProgressCallback& progress) {
  const std::vector<char> pattern = random_pattern();
  Json weight_map = Json::object();
  for (int64_t i = 0; i <= model.num_layers; ++i) {
    const std::vector<Entry> entries = shard_entries(model, i);
    const std::string file = str_cat("model-", i, ".safetensors");
    write_shard(folder / file, entries, pattern);
    for (const Entry& entry : entries) weight_map[entry.name] = file;
    if (progress) progress("writing weights", i + 1, model.num_layers + 1);
  }
  write_text(folder / "model.safetensors.index.json", Json{{"weight_map", weight_map}}.dump());
  write_text(folder / "config.json", config_of(model).dump(2));
}

TemporaryFolder::TemporaryFolder() {
  std::error_code error;
  const std::filesystem::path parent = std::filesystem::temp_directory_path(error);
  std::string name = (parent / "cadre-XXXXXX").string();
  if (error || mkdtemp(name.data()) == nullptr) {
    const char* set = std::getenv("TMPDIR");
    throw Error(str_cat("temporary folder: cannot make one in ",
                        error && set != nullptr ? set : parent.string(), ": ",
                        error ? error.message() : errno_text(errno),
                        "; set TMPDIR to a folder that can be written"));
  }
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

}  // namespace cadre::cli

// Runs of a model that the golden tests share: prefill in one go, greedy decoding, capture and
// replay of the routing.
#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "cadre/model.h"

namespace cadre::test {

/// What a MoE layer saw and gave, as floats.
struct MoeCapture {
  std::vector<double> hidden_states;  // [num_tokens, hidden_size]
  std::vector<int64_t> top_k_index;   // [num_tokens, top_k]
  std::vector<double> top_k_weights;  // [num_tokens, top_k]
  std::vector<double> output;         // [num_tokens, hidden_size]
};

/// What a vision model's processor gave for all images of a batch; empty for others.
struct Images {
  std::vector<float> pixel_values;
  std::vector<ImageGrid> grids;
};

/// A fixture's expected.safetensors.
struct Expected {
  int64_t batch = 0;
  int64_t length = 0;
  std::vector<TokenId> input_ids;  // [batch, length]
  std::vector<double> logits;      // [batch, length, vocab_size]
  int64_t num_greedy = 0;
  std::vector<TokenId> greedy_ids;  // [batch, num_greedy]
  std::map<int64_t, MoeCapture> moe;
  Images images;

  std::span<const TokenId> row(int64_t b) const {
    return std::span(input_ids).subspan(static_cast<size_t>(b * length),
                                        static_cast<size_t>(length));
  }
};

Expected read_expected(const std::filesystem::path& file);

/// Folders under tests/data/models that hold a model and its expected values, by name: those with
/// plain weights, and the quantised ones.
std::vector<std::string> fixture_names();
std::vector<std::string> quantized_fixture_names();
std::filesystem::path fixture(const std::string& name);

/// A fixture of DeepSeek-V4, and the device of the tests has none of its operations.
bool lacks_compressed_ops(const std::string& name);

/// Logits of all tokens of equally long sequences in one forward over a fresh cache.
std::vector<float> all_logits(Model& model, std::span<const TokenId> ids, int64_t batch,
                              const MoeHooks* hooks = nullptr, const Images& images = {});

/// The greedy continuation of each of `batch` equally long prompts, decoded together.
std::vector<TokenId> greedy(Model& model, std::span<const TokenId> ids, int64_t batch,
                            int64_t num_new, const Images& images = {});

/// top_k of the model's (text part's) experts.
int64_t top_k_of(const Model& model);

/// Hooks that fill `captures`, which must outlive them.
MoeHooks capture_into(std::map<int64_t, MoeCapture>& captures);

/// Hooks that overwrite each layer's routing by the stored one.
MoeHooks replay_of(const std::map<int64_t, MoeCapture>& stored);

/// Rows in which the sets of picked experts differ.
int64_t differing_rows(const MoeCapture& a, const MoeCapture& b, int64_t top_k);

}  // namespace cadre::test

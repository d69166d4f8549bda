// config.json of a text decoder, in the older and the newer spelling of each key.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/activation.h"
#include "cadre/dtype.h"
#include "cadre/token_id.h"
#include "io/json.h"
#include "layers/rope.h"

namespace cadre {

/// What a family assumes when its config leaves a key out.
struct TextDefaults {
  double norm_eps = 1e-6;
  double rope_theta = 10000;
  std::optional<double> partial_rotary_factor = {};  // empty: the family always rotates whole heads
  std::string_view head_dim_key = "head_dim";
};

struct TextConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
  int64_t max_position_embeddings = 0;  // the context, with dynamic NTK the stretched one
  float norm_eps = 0;
  Activation activation = Activation::kSilu;
  bool tie_word_embeddings = false;
  RopeConfig rope = {};
  float embedding_scale = 1;
  float logits_scale = 1;
};

/// Throws CheckpointError for values that contradict each other, Unsupported for a rope type or an
/// activation that is not served.
TextConfig read_text_config(const ConfigReader& config, const TextDefaults& defaults);

/// A positive integer that products of a few sizes cannot overflow with.
int64_t read_size(const ConfigReader& config, std::string_view key);

/// Of the Qwen families: 0 (no window) unless use_sliding_window; then sliding_window, where null
/// is no window and a missing key is 4096, as in Transformers.
int64_t read_qwen_sliding_window(const ConfigReader& config);

/// The window of each layer by `layer_types`: `window` for sliding_attention, 0 for full_attention.
std::vector<int64_t> read_layer_windows(const ConfigReader& config, int64_t num_layers,
                                        int64_t window);

/// num_experts, num_local_experts or n_routed_experts.
int64_t read_num_experts(const ConfigReader& config);

/// num_experts_per_tok; CheckpointError when it is larger than num_experts.
int64_t read_top_k(const ConfigReader& config, int64_t num_experts);

/// How many layers for multi-token prediction follow the model's own: num_nextn_predict_layers or
/// num_mtp_layers.
int64_t read_num_mtp_layers(const ConfigReader& config, int64_t fallback);

/// `dtype` or the older `torch_dtype`; empty when the config has neither.
std::optional<DType> read_dtype(const ConfigReader& config);

/// `eos_token_id`: a number, a list, or nothing.
std::vector<TokenId> read_eos_token_ids(const ConfigReader& config);

/// Throws CheckpointError: "<file>: <what>".
[[noreturn]] void config_error(const ConfigReader& config, const std::string& what);

}  // namespace cadre

// Causal self-attention with grouped KV heads: projections, q/k norms, rotation, cache, output.
#pragma once

#include <optional>

#include "layers/attention_block.h"

namespace cadre {

struct AttentionConfig {
  int64_t hidden_size = 0;
  AttentionShape shape = {};
  float scale = 1;
  int64_t sliding_window = 0;  // 0 = all
  QkNorm qk_norm = QkNorm::kNone;
  float norm_eps = 1e-6f;
  std::optional<float> clip_qkv = {};  // |q|, |k|, |v| <= this, after the norms
  size_t rope = 0;                     // which of the decoder's
  bool has_sinks = false;
};

struct AttentionWeights {
  LinearWeights q;  // [num_heads * head_dim, hidden_size]
  LinearWeights k;  // [num_kv_heads * head_dim, hidden_size]
  LinearWeights v;  // [num_kv_heads * head_dim, hidden_size]
  LinearWeights o;  // [hidden_size, num_heads * head_dim]
  TensorView q_norm;
  TensorView k_norm;
  TensorView sinks;  // [num_heads] f32, with has_sinks
};

class Attention final : public AttentionBlock {
 public:
  Attention(const AttentionConfig& config, const AttentionWeights& weights)
      : config_(config), weights_(weights) {}

  const AttentionConfig& config() const { return config_; }
  size_t workspace_bytes(const WorkspaceQuery& query) const override;
  /// Keys and values.
  CacheLayout cache_layout(DType compute_dtype) const override;
  void forward(const TensorView& x, MutableTensorView residual, int64_t layer,
               const ForwardContext& context) const override;

 private:
  struct Projections {
    MutableTensorView q, k, v;  // [num_tokens, heads, head_dim]
  };
  Projections project(const TensorView& x, const ForwardContext& context) const;

  AttentionConfig config_;
  AttentionWeights weights_;
};

}  // namespace cadre

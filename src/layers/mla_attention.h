// Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434): the cache keeps one compressed
// row a token instead of keys and values of every head. Queries are always brought into the latent
// space ("absorbed"), in prefill too: docs/decisions/0009 says why.
#pragma once

#include "layers/attention_block.h"

namespace cadre {

struct MlaConfig {
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t q_rank = 0;     // 0: queries come straight from x
  int64_t rank = 0;       // of the latent vector that keys and values are made from
  int64_t nope_dim = 0;   // of a head's query and key, not rotated
  int64_t rope_dim = 0;   // rotated; of the key, shared by all heads
  int64_t value_dim = 0;  // of a head
  float scale = 1;
  float norm_eps = 1e-6f;
  bool interleaved_rope = true;  // see LatentRowArgs
  size_t rope = 0;               // which of the decoder's
};

struct MlaWeights {
  LinearWeights q_a;   // [q_rank, hidden_size]; with q_rank
  TensorView q_norm;   // [q_rank]
  LinearWeights q;     // [num_heads * (nope_dim + rope_dim), q_rank or hidden_size]
  LinearWeights kv_a;  // [rank + rope_dim, hidden_size]
  TensorView kv_norm;  // [rank]
  TensorView kv_b;     // [num_heads * (nope_dim + value_dim), rank]: a head's keys, then values
  LinearWeights o;     // [hidden_size, num_heads * value_dim]
};

class MlaAttention final : public AttentionBlock {
 public:
  MlaAttention(const MlaConfig& config, const MlaWeights& weights)
      : config_(config), weights_(weights) {}

  const MlaConfig& config() const { return config_; }
  size_t workspace_bytes(const WorkspaceQuery& query) const override;
  /// One row of rank + rope_dim a token.
  CacheLayout cache_layout(DType compute_dtype) const override;
  void forward(const TensorView& x, MutableTensorView residual, int64_t layer,
               const ForwardContext& context) const override;

 private:
  // q and the fresh row of every token.
  void project(const TensorView& x, MutableTensorView q, MutableTensorView fresh,
               const ForwardContext& context) const;
  // out [num_tokens, num_heads, value_dim] of heads [begin, end).
  void attend(const TensorView& q, int64_t begin, int64_t end, MutableTensorView out, int64_t layer,
              const ForwardContext& context) const;

  MlaConfig config_;
  MlaWeights weights_;
};

}  // namespace cadre

// DeepSeek-V4's attention. One row per token is key and value of all heads; a token sees the rows
// of a window and, in most layers, entries that stand for `rate` tokens each: all of those that are
// complete (heavily compressed), or the few that an indexer picks (compressed sparse). What a layer
// keeps of a sequence is a window of rows, the entries, and the projections of the tokens whose
// entry is not complete. Per token that is (head_dim + indexer width) / rate elements of the
// compute dtype; of DeepSeek-V4-Flash in 16 bit 320 bytes in a sparse layer and 8 in a heavy one.
// Source: the DeepSeek-V4 report, section 2.3.
#pragma once

#include <optional>

#include "layers/attention_block.h"

namespace cadre {

/// Turns `rate` tokens into an entry of `width` elements; see CompressArgs.
struct CompressorWeights {
  LinearWeights values;      // [series * width, hidden_size]
  LinearWeights gates;       // the same
  TensorView position_bias;  // [rate, series * width]
  TensorView norm;           // [width]

  int64_t rate() const { return position_bias.dim(0); }
  int64_t width() const { return norm.dim(0); }
  int64_t series() const { return position_bias.dim(1) / width(); }
};

/// Picks `top_k` entries for each token; see PickEntriesArgs.
struct IndexerWeights {
  int64_t num_heads = 0;
  int64_t top_k = 0;
  LinearWeights q;             // [num_heads * width, q_rank]
  LinearWeights head_weights;  // [num_heads, hidden_size]
  CompressorWeights compressor;
};

struct CompressedAttentionConfig {
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t head_dim = 0;
  int64_t q_rank = 0;
  int64_t rotary_dim = 0;  // the last elements of a row, rotated in neighbouring pairs
  int64_t sliding_window = 1;
  int64_t o_groups = 1;
  int64_t o_rank = 0;  // of a group
  float norm_eps = 1e-6f;
  size_t rope = 0;  // which of the decoder's
};

struct CompressedAttentionWeights {
  LinearWeights q_a;   // [q_rank, hidden_size]
  TensorView q_norm;   // [q_rank]
  LinearWeights q_b;   // [num_heads * head_dim, q_rank]
  LinearWeights kv;    // [head_dim, hidden_size]
  TensorView kv_norm;  // [head_dim]
  TensorView o_a;      // [o_groups * o_rank, num_heads * head_dim / o_groups]
  LinearWeights o_b;   // [hidden_size, o_groups * o_rank]
  TensorView sinks;    // [num_heads]
  std::optional<CompressorWeights> compressor = {};
  std::optional<IndexerWeights> indexer = {};  // only with a compressor of the same rate
};

class CompressedAttention final : public AttentionBlock {
 public:
  CompressedAttention(const CompressedAttentionConfig& config,
                      const CompressedAttentionWeights& weights)
      : config_(config), weights_(weights) {}

  size_t workspace_bytes(const WorkspaceQuery& query) const override;
  /// The window's ring; with a compressor entries and two rings of projections; with an indexer
  /// the same three of its own.
  CacheLayout cache_layout(DType compute_dtype) const override;
  void forward(const TensorView& x, MutableTensorView residual, int64_t layer,
               const ForwardContext& context) const override;

 private:
  MutableTensorView queries(const TensorView& latent, const ForwardContext& context) const;
  MutableTensorView rows(const TensorView& x, const ForwardContext& context) const;
  // Completes entries and keeps the projections; `first`: of the compressor's tensors in the cache.
  void compress(const CompressorWeights& weights, size_t first, const TensorView& x, int64_t layer,
                const ForwardContext& context) const;
  TensorView pick(const TensorView& x, const TensorView& latent, int64_t layer,
                  const ForwardContext& context) const;
  void project(const MutableTensorView& mixed, MutableTensorView residual,
               const ForwardContext& context) const;
  size_t compress_bytes(const CompressorWeights& weights, const WorkspaceQuery& query) const;

  CompressedAttentionConfig config_;
  CompressedAttentionWeights weights_;
};

}  // namespace cadre

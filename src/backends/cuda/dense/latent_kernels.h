// The kernels of latent attention (LatentShape in dense_ops.h). Rows are as in attention_kernels.h
// with one KV head: row t * heads + h is head h of new token t of a sequence.
#pragma once

#include "backends/cuda/dense/attention_kernels.h"

namespace cadre::cuda {

struct LatentCall {
  // q and out: the latent parts; keys: the cache's rows; head_dim: the rank; partials: sums of each
  // row of a tile, then its maximum and divisor, for every tile and split.
  AttentionCall base;
  const void* q_rope = nullptr;  // element (token, head, i) at token * token_stride + head *
  int64_t token_stride = 0;      // head_stride + i
  int64_t head_stride = 0;
  int32_t rope_dim = 0;
};

inline constexpr int kLatentAnyRows = 8;  // rows of a tile
inline constexpr int kLatentTileRows = 64;
inline constexpr int kLatentRank = 512;  // what the tensor cores' kernel is made for
inline constexpr int kLatentRope = 64;
inline constexpr int kMaxLatentRank = 512;  // of any
inline constexpr int kMaxLatentRope = 128;
inline constexpr int64_t kMaxLatentParts = 132 * kLatentTileRows;  // rows times splits, when split

/// Floats of the partial results of a row.
inline int64_t latent_partial_floats(int64_t rank) { return rank + 2; }

/// Whether the GPU has the shared memory that latent_tiles() takes (sm_80, sm_90 and the like).
bool has_room_for_latent_tiles(const Stream& stream);
/// Tensor cores: 16-bit elements, kLatentRank and kLatentRope, all aligned to 16 bytes.
void latent_tiles(const LatentCall& call, const Stream& stream);
/// Any dtype, rank and rope_dim up to the limits, any alignment.
void latent_any(const LatentCall& call, const Stream& stream);
/// Brings the splits of tiles of so many rows together.
void join_latent(const LatentCall& call, int32_t rows_per_tile, const Stream& stream);

/// What linear_heads() computes; strides in elements.
struct HeadsProduct {
  DType dtype = DType::kBF16;  // of x, weight and out
  const void* x = nullptr;
  const void* weight = nullptr;
  void* out = nullptr;
  int64_t num_tokens = 0;
  int64_t num_heads = 0;
  int64_t n = 0;
  int64_t k = 0;
  int64_t x_token = 0, x_head = 0;
  int64_t out_token = 0, out_head = 0;
  int64_t w_head = 0, w_n = 0, w_k = 0;  // one of w_n and w_k is 1
};

void heads_product(const HeadsProduct& args, const Stream& stream);

}  // namespace cadre::cuda

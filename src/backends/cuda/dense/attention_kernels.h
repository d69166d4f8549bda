// The kernels of attention. Query heads that share a KV head are rows of one matrix: row
// t * group + h is head h of the group of new token t of a sequence, so keys and values are read
// once for the whole group. A tile is some rows of one sequence for one KV head.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "backends/cuda/dense/finish.h"
#include "cadre/dtype.h"
#include "cadre/stream.h"

namespace cadre::cuda {

struct AttentionCall {
  DType dtype = DType::kBF16;
  const void* q = nullptr;  // [num_tokens, num_heads, head_dim]
  const void* keys = nullptr;
  const void* values = nullptr;
  void* out = nullptr;
  const int32_t* spans = nullptr;  // [num_sequences, 4]: slot, first_row, num_tokens, past
  int32_t num_sequences = 0;
  int64_t num_tokens = 0;
  int32_t num_kv_heads = 0;
  int32_t group = 1;  // query heads that share a KV head
  int32_t head_dim = 0;
  int64_t max_tokens = 0;  // of the caches
  int32_t window = 0;      // 0: all
  bool is_causal = true;   // else a token sees all of its sequence
  float scale = 1;
  const float* sinks = nullptr;  // [num_heads]; null: none
  int32_t num_splits = 1;        // blocks that share the keys of a tile
  float* partials = nullptr;     // with splits: see partial_floats(); null: they are one cluster
  bool is_fresh = false;  // q, keys and values of the step are still to be finished by `fresh`
  FinishArgs fresh = {};  // only for attend_few(): takes_fresh()
};

inline constexpr int kFewRows = 16;           // rows of a tile of attend_few() and attend_any()
inline constexpr int kManyRows = 128;         // of attend_many()
inline constexpr int kMinSplitKeys = 128;     // keys that are worth a block
inline constexpr int kMaxCluster = 16;        // splits that may be one cluster
inline constexpr int64_t kMaxPartials = 528;  // tiles times splits, when there are splits

/// Floats of what a split leaves behind: sums of a tile's rows, then their maxima and divisors.
inline int64_t partial_floats(int64_t head_dim) { return kFewRows * (head_dim + 2); }

/// Upper bound of the tiles of a step, KV heads apart.
inline int64_t max_tiles(const AttentionCall& call, int64_t rows) {
  const int64_t of_one_token = (call.group + rows - 1) / rows;
  return std::min(call.num_tokens * of_one_token,
                  call.num_tokens * call.group / rows + call.num_sequences);
}

/// Few rows a sequence (decoding): keys split over warps and blocks. Tensor cores; head_dim a
/// multiple of 8 up to 256, 16-bit, aligned. Where the GPU has clusters of kMaxCluster blocks, the
/// splits of a tile are one and need no partials. Keys and values of tokens before the step's own
/// may be read before the kernel ahead has ended, as weights are.
void attend_few(const AttentionCall& call, const Stream& stream);
/// Whether attend_few() can finish what is fresh itself: one token for each sequence.
bool takes_fresh(const AttentionCall& call);
/// Many rows a sequence; no splits. The same conditions.
void attend_many(const AttentionCall& call, const Stream& stream);
inline constexpr int kMaxHeadDim = 256;

/// Whatever the others do not take: float32, any head_dim up to kMaxHeadDim, any alignment.
void attend_any(const AttentionCall& call, const Stream& stream);
/// Brings the splits of attend_few() or attend_any() together.
void join_splits(const AttentionCall& call, const Stream& stream);

}  // namespace cadre::cuda

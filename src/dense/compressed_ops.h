// Arguments of the operations behind DeepSeek-V4: attention over a window and over compressed
// blocks of tokens, the indexer that picks blocks, and hyper-connections. Sources: the DeepSeek-V4
// report, sections 2.2 and 2.3; "Hyper-Connections", arXiv 2409.19606.
//
// A ring keeps the latest rows of every sequence: [num_slots, 1, rows, width], position p at row
// p % rows. The new tokens of a step are not in it before store_ring() puts them there, so that the
// first of them still find what the last of them replace.
#pragma once

#include <cstdint>

#include "cadre/tensor.h"
#include "dense/step_tokens.h"

namespace cadre {

/// Every `rate` tokens become one entry. For each channel c, entry w is the sum of values weighted
/// by the softmax of gates + position_bias over its rows: tokens [w * rate, (w + 1) * rate) with
/// channel c of the last series and, with two series, also the `rate` tokens before them with
/// channel c of the first (none before entry 0). The sum is RMS-normalised, and its last
/// 2 * half elements are rotated in neighbouring pairs by position w * rate.
struct CompressArgs {
  TensorView values;         // [num_tokens, series * width] f32, new tokens; series 1 or 2
  TensorView gates;          // the same
  TensorView value_ring;     // of the tokens before, series * rate rows or more, f32
  TensorView gate_ring;      // the same
  TensorView position_bias;  // [rate, series * width]
  TensorView norm;           // [width]
  float norm_eps = 1e-6f;
  TensorView inverse_frequencies;  // [half] f32
  float rope_scale = 1;            // of cos and sin
  StepTokens tokens;
  MutableTensorView entries;  // cache [num_slots, 1, rows, width]; entry w of a sequence at row w

  int64_t rate() const { return position_bias.dim(0); }
  int64_t width() const { return norm.dim(0); }
};

/// The entries that each token attends to: the k best by
///   score(w) = sum over heads of weights[h] * max(0, queries[h] . keys[w])
/// among those closed at its position (w < (position + 1) / rate); ties go to the lower entry, NaN
/// counts as minus infinity.
struct PickEntriesArgs {
  TensorView queries;      // [num_tokens, num_heads, width]
  TensorView weights;      // [num_tokens, num_heads] f32
  float weight_scale = 1;  // factor of all weights
  TensorView keys;         // cache [num_slots, 1, rows, width], same dtype as queries
  int64_t rate = 1;
  StepTokens tokens;
  MutableTensorView picks;  // [num_tokens, k] i32, ascending, then -1
};

/// Attention of all heads over rows that are key and value at once: the window (the token itself
/// and sliding_window - 1 before it), and of the compressed entries those closed at its position,
/// or the picked ones. A head's sink takes part in its softmax and adds nothing.
struct SharedKvAttentionArgs {
  TensorView q;        // [num_tokens, num_heads, head_dim]
  TensorView kv;       // [num_tokens, head_dim], new tokens
  TensorView kv_ring;  // of the tokens before, sliding_window - 1 rows or more
  int64_t sliding_window = 1;
  TensorView entries;  // cache [num_slots, 1, rows, head_dim]; absent: window only
  int64_t rate = 1;    // tokens of an entry
  TensorView picks;    // as of PickEntriesArgs; absent: all closed entries
  TensorView sinks;    // [num_heads]
  float scale = 1;
  StepTokens tokens;
  MutableTensorView out;  // [num_tokens, num_heads, head_dim]
};

/// The most residual streams that hyper-connections may have.
inline constexpr int64_t kMaxHyperStreams = 16;

/// Reads what a sublayer sees from n residual streams. With m = logits / rms(streams), cut into
/// n, n and n x n values and each part times its scale plus its base:
///   pre = sigmoid + eps, post = 2 * sigmoid, mix = Sinkhorn(softmax of rows + eps)
/// where Sinkhorn divides columns by (their sum + eps), then `sinkhorn_iterations` - 1 times rows
/// and columns; collapsed = sum_i pre[i] * streams[i]. The head has `pre` alone: logits and base
/// of n, scale of 1, post and mix absent.
struct HyperCollapseArgs {
  TensorView streams;  // [num_tokens, n, width] f32
  TensorView logits;   // [num_tokens, (2 + n) * n] f32: the flat streams times the mixing weights
  TensorView base;     // [(2 + n) * n]
  TensorView scale;    // [3]
  float norm_eps = 1e-6f;
  float eps = 1e-6f;
  int64_t sinkhorn_iterations = 1;
  MutableTensorView collapsed;  // [num_tokens, width] f32
  MutableTensorView post;       // [num_tokens, n] f32
  MutableTensorView mix;        // [num_tokens, n, n] f32
};

/// streams[k] = post[k] * x + sum_j mix[j][k] * streams[j], in place. Without post and mix:
/// streams[k] = x.
struct HyperExpandArgs {
  MutableTensorView streams;  // [num_tokens, n, width] f32
  TensorView x;               // [num_tokens, width] f32
  TensorView post;            // [num_tokens, n] f32
  TensorView mix;             // [num_tokens, n, n] f32
};

}  // namespace cadre

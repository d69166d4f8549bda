// The dense operations around the experts, one implementation per kind of device. Layers are
// written on this interface alone. All tensors lie on the ops' device, spans lie on the host. On a
// GPU an op returns when its work is in the stream, and may be recorded into a graph; a graph is
// replayed with other token ids, slots, positions and lengths in the same tensors, so nothing but
// the number of tokens and sequences may be taken from spans there.
// Activations are [num_tokens, ...], float32, bfloat16 or float16, rows contiguous; every op
// computes in float32 and rounds once. On the CPU a row's result has the same bits whatever rows
// are computed with it and whatever the number of threads. No op allocates.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>

#include "cadre/activation.h"
#include "cadre/dtype.h"
#include "cadre/storage_format.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/workspace.h"
#include "dense/compressed_ops.h"
#include "dense/step_tokens.h"

namespace cadre {

/// y = x W^T + b with W [N, K] as stored. A quantised W is float8_e4m3 [N, K], or int8 [N, K / 2]
/// of two e2m1 each, with its scales; x is then quantised as `activations` says.
struct LinearWeights {
  TensorView weight;       // [N, K] float32, bfloat16 or float16; or quantised
  TensorView bias;         // [N]; absent = none
  TensorView scales = {};  // [ceil(N / block_rows), ceil(K / block_cols)]; absent = plain
  ScaleLayout scale_layout = {};
  ActivationScheme activations = ActivationScheme::kNone;
  float input_scale = 0;  // kStatic
};

/// How the weight is stored.
StorageFormat format_of(const LinearWeights& weights);

/// How router logits become scores. The method is always explicit: what a checkpoint means cannot
/// be guessed from its shapes.
enum class RouterScore : uint8_t {
  kSoftmaxThenTopK,  // probabilities over all experts, then the k largest
  kTopKThenSoftmax,  // the k largest logits, softmax over these
  kSigmoid,          // sigmoid scores; a correction bias helps to pick but does not weigh
  kSqrtSoftplus,     // sqrt(softplus(x)), same use of the bias
};

/// What a group of experts is worth in group-limited routing.
enum class GroupScore : uint8_t { kMax, kSumOfTopTwo };

struct RouterOptions {
  RouterScore score = RouterScore::kSoftmaxThenTopK;
  bool normalize = false;    // divide the k weights by their sum
  float scaling_factor = 1;  // multiplied in last; this is its only owner
  int64_t num_groups = 1;    // E is cut into equal groups, only the best topk_groups take part
  int64_t topk_groups = 1;
  GroupScore group_score = GroupScore::kMax;
};

/// Throws InvalidArgument when the groups do not divide E or hold fewer than k experts.
void validate(const RouterOptions& options, int64_t num_experts, int64_t top_k);

struct AttentionShape {
  int64_t num_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t head_dim = 0;
};

struct AttentionArgs {
  TensorView q;       // [num_tokens, num_heads, head_dim]
  TensorView keys;    // [num_slots, num_kv_heads, max_tokens, head_dim] new tokens included
  TensorView values;  // the same
  StepTokens tokens;
  float scale = 1;
  int64_t sliding_window = 0;  // a token sees itself and window - 1 before it; 0 = all
  MutableTensorView out;       // [num_tokens, num_heads, head_dim]
  /// [num_heads] f32 or absent: a score of each head that takes part in the softmax and has no
  /// value (attention sinks).
  TensorView sinks = {};
  bool is_causal = true;  // false: a token sees all of its sequence; only with vision ops
};

/// Over what queries and keys are normalised before the rotation.
enum class QkNorm : uint8_t { kNone, kPerHead, kWholeProjection };

/// What happens to fresh projections before attention.
struct QkvArgs {
  MutableTensorView q;  // [num_tokens, num_heads, head_dim]
  MutableTensorView k;  // [num_tokens, num_kv_heads, head_dim]
  MutableTensorView v;  // the same
  QkNorm qk_norm = QkNorm::kNone;
  TensorView q_norm;  // [head_dim], or [num_heads * head_dim] for kWholeProjection
  TensorView k_norm;
  float norm_eps = 1e-6f;
  std::optional<float> clip = {};  // |q|, |k|, |v| <= this, after the norms
  TensorView cos;                  // [num_tokens, half] f32
  TensorView sin;
  StepTokens tokens;
  MutableTensorView keys;  // cache [num_slots, num_kv_heads, max_tokens, head_dim]
  MutableTensorView values;
};

/// Everything between a block's attention and its experts.
struct NormRouteArgs {
  TensorView residual;  // [num_tokens, width] f32
  TensorView norm;      // [width]
  float eps = 1e-6f;
  MutableTensorView x;         // [num_tokens, width] = rms_norm(residual)
  LinearWeights gate;          // [E, width]: logits = gate(x), in float32
  TensorView correction_bias;  // as route() takes them
  RouterOptions options = {};
  MutableTensorView top_k_index;
  MutableTensorView top_k_weights;
};

/// What a draw leaves for a step that goes on from it: the same sequences in the same order, one
/// token each, which is the drawn one.
struct NextStep {
  MutableTensorView token_ids;  // [n] i32: what was drawn; 0 in place of -1
  MutableTensorView positions;  // [n] i32: one further
  MutableTensorView spans;      // [n, 4] i32: `past` is what the position was, and one further
  // Pinned host memory [2, n]: what was drawn, in row position % 2 (of this step), so that it can
  // be read while the next step runs.
  int32_t* host_ids = nullptr;
};

/// Multi-head latent attention (MLA, DeepSeek-V2, arXiv 2405.04434) in its absorbed form. The cache
/// keeps one row a token, for all heads: a latent vector, from which keys and values could be made,
/// and the part of the keys that rotates. Queries are brought into the latent space, so that the
/// row serves as key of every head and its latent part as value.
struct LatentShape {
  int64_t num_heads = 0;
  int64_t rank = 0;      // of the latent vector
  int64_t rope_dim = 0;  // a row has rank + rope_dim elements
};

/// What happens to fresh projections before that attention: the latent vectors are normalised, what
/// rotates is rotated, rows go into the cache.
struct LatentRowArgs {
  TensorView fresh;  // [num_tokens, rank + rope_dim] f32
  TensorView norm;   // [rank]
  float norm_eps = 1e-6f;
  MutableTensorView q_rope;  // [num_tokens, num_heads, rope_dim], rotated in place; any strides but
                             // the last
  bool interleaved = true;   // pairs (x[2 i], x[2 i + 1]); else (x[i], x[i + rope_dim / 2])
  TensorView cos;            // [num_tokens, rope_dim / 2] f32
  TensorView sin;
  StepTokens tokens;
  MutableTensorView rows;  // cache [num_slots, 1, max_tokens, rank + rope_dim]
};

struct LatentAttentionArgs {
  TensorView q_latent;  // [num_tokens, num_heads, rank]
  TensorView q_rope;    // [num_tokens, num_heads, rope_dim], any strides but the last
  TensorView rows;      // cache [num_slots, 1, max_tokens, rank + rope_dim] new tokens included
  StepTokens tokens;
  float scale = 1;
  MutableTensorView out;  // [num_tokens, num_heads, rank]
};

/// Whether a result replaces what is there or is added to it.
enum class Accumulate : uint8_t { kOverwrite, kAdd };

/// Positions on several axes (a picture's rows and columns, say), and the axis that turns each
/// pair of elements.
struct AxisPositions {
  TensorView positions;  // [num_axes, num_tokens] i32
  TensorView axes;       // [half] i32, each inside [0, num_axes)
};

/// One next token for each row of logits, by the rules of Sampler (cadre/generation.h): penalty,
/// temperature, top-k, top-p, min-p, then a draw over what is left in the order of ids. All rows
/// share the options, which the caller has validated.
struct SampleArgs {
  TensorView logits;             // [n, vocab_size] f32, rows contiguous; stays as it is
  float temperature = 0;         // 0 = greedy; the cuts then do nothing
  int32_t top_k = 0;             // 0 = off
  float top_p = 1;               // 1 = off
  float min_p = 0;               // 0 = off
  float repetition_penalty = 1;  // 1 = off
  TensorView history;            // [n, any] i32, the ids so far; only with a penalty. Ids outside
  TensorView history_lengths;    // [n] i32        the vocabulary are passed over
  TensorView uniform;            // [n] f64 in [0, 1), one for each row; only when not greedy
  MutableTensorView ids;         // [n] i32; -1 for a row where all is NaN
  NextStep next = {};            // optional
};

/// See DenseOps::dynamic_rope_angles().
struct DynamicNtk {
  float factor = 1;
  int64_t context = 0;
};

class DenseOps {
 public:
  virtual ~DenseOps() = default;

  /// What products of this device run on, "avx512_bf16" for example. Throws what choosing it throws
  /// (on the CPU: for a wrong CADRE_CPU_ISA).
  virtual std::string_view instruction_set() const = 0;

  /// out may be float32 whatever the dtype of x.
  virtual void linear(const TensorView& x, const LinearWeights& weights, MutableTensorView out,
                      Workspace& workspace, const Stream& stream) = 0;
  virtual size_t linear_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                        int num_threads) const = 0;

  /// out_i = x W_i^T + b_i for several weights.
  virtual void linear_group(const TensorView& x, std::span<const LinearWeights* const> weights,
                            std::span<const MutableTensorView> outs, Workspace& workspace,
                            const Stream& stream);

  /// y [num_tokens, N] f32 += x W^T + b.
  virtual void linear_add(const TensorView& x, const LinearWeights& weights, MutableTensorView y,
                          Workspace& workspace, const Stream& stream);
  virtual size_t linear_add_workspace_bytes(int64_t num_tokens, int64_t n, int64_t k,
                                            DType compute_dtype, int num_threads) const;

  /// out[t] = table[ids[t]] with ids [num_tokens] i32 inside the table (the caller has checked).
  virtual void embedding(const TensorView& ids, const TensorView& table, MutableTensorView out,
                         const Stream& stream) = 0;

  /// out[i] = x[rows[i]] with rows [n] i32 inside x
  virtual void gather_rows(const TensorView& x, const TensorView& rows, MutableTensorView out,
                           const Stream& stream) = 0;

  /// out = x / rms(x) * weight over the last dimension; in place (out == x) is fine. Without a
  /// weight (CPU): out = x / rms(x).
  virtual void rms_norm(const TensorView& x, const TensorView& weight, float eps,
                        MutableTensorView out, const Stream& stream) = 0;

  /// y += x
  virtual void add(MutableTensorView y, const TensorView& x, const Stream& stream) = 0;

  /// x *= factor
  virtual void scale(MutableTensorView x, float factor, const Stream& stream) = 0;

  /// residual [num_tokens, width] f32 += x, then out = rms_norm(residual).
  virtual void add_rms_norm(MutableTensorView residual, const TensorView& x,
                            const TensorView& weight, float eps, MutableTensorView out,
                            const Stream& stream);

  /// y += x * sigmoid(gate[t]) with gate [num_tokens, 1] f32
  virtual void add_sigmoid_gated(MutableTensorView y, const TensorView& x, const TensorView& gate,
                                 const Stream& stream) = 0;

  /// x = clamp(x, -limit, limit)
  virtual void clamp(MutableTensorView x, float limit, const Stream& stream) = 0;

  /// out = act(gate) * up
  virtual void gated_activation(const TensorView& gate, const TensorView& up, Activation activation,
                                MutableTensorView out, const Stream& stream) = 0;

  /// cos and sin [num_tokens, half] f32 of positions[t] * inverse_frequencies[i] (i32 and f32), the
  /// angle rounded to float32 as in training, times `scale`.
  virtual void rope_angles(const TensorView& positions, const TensorView& inverse_frequencies,
                           float scale, MutableTensorView cos, MutableTensorView sin,
                           const Stream& stream) = 0;

  /// The same with frequencies that fall as the sequence grows beyond `ntk.context` tokens (dynamic
  /// NTK): with growth = factor * (position + 1) / context - (factor - 1), frequency i is divided
  /// by growth ^ (i / (half - 1)). half is at least 2.
  virtual void dynamic_rope_angles(const TensorView& positions,
                                   const TensorView& inverse_frequencies, const DynamicNtk& ntk,
                                   MutableTensorView cos, MutableTensorView sin,
                                   const Stream& stream) = 0;

  /// Rotates the first 2 * half elements of every head in place, halves paired (x[i], x[i + half]).
  /// x [num_tokens, num_heads, head_dim], cos and sin [num_tokens, half] f32.
  virtual void rope(MutableTensorView x, const TensorView& cos, const TensorView& sin,
                    const Stream& stream) = 0;

  /// Writes x [num_tokens, num_kv_heads, head_dim] into cache [num_slots, num_kv_heads, max_tokens,
  /// head_dim] of the same dtype.
  virtual void store_kv(const TensorView& x, const StepTokens& tokens, MutableTensorView cache,
                        const Stream& stream) = 0;

  /// Norms of q and k, clip, rotation, and k and v into the cache, q in place; k and v may be
  /// changed.
  virtual void finish_qkv(const QkvArgs& args, const Stream& stream);

  /// Whether attention() takes heads of this shape.
  virtual bool serves(const AttentionShape& /*shape*/) const { return true; }

  /// Causal attention of the new tokens over the cache; query heads share KV heads in equal groups.
  virtual void attention(const AttentionArgs& args, Workspace& workspace, const Stream& stream) = 0;
  /// finish_qkv() and then attention() of the same step, whose q is finished in place or not at
  /// all: only the cache and `out` tell. A step recorded with one token for each sequence is
  /// replayed with such alone.
  virtual void finish_and_attend(const QkvArgs& qkv, const AttentionArgs& attention,
                                 Workspace& workspace, const Stream& stream);
  /// `max_tokens`: new tokens of a step. Caches may be of any length.
  virtual size_t attention_workspace_bytes(const AttentionShape& shape, int64_t max_tokens,
                                           int num_threads) const = 0;

  /// out[t, h] = W_h x[t, h] for every head: x [num_tokens, num_heads, K] and out [num_tokens,
  /// num_heads, N] with any strides but the last, weight [num_heads, N, K] with any strides.
  virtual void linear_heads(const TensorView& x, const TensorView& weight, MutableTensorView out,
                            Workspace& workspace, const Stream& stream) = 0;
  virtual size_t linear_heads_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                              int num_threads) const = 0;

  virtual void finish_latent(const LatentRowArgs& args, const Stream& stream) = 0;

  /// Whether latent_attention() takes rows of this shape.
  virtual bool serves(const LatentShape& /*shape*/) const { return true; }

  /// Causal attention of the new tokens over latent rows, see LatentShape.
  virtual void latent_attention(const LatentAttentionArgs& args, Workspace& workspace,
                                const Stream& stream) = 0;
  /// `max_rows`: tokens of a step times heads of a call.
  virtual size_t latent_attention_workspace_bytes(const LatentShape& shape, int64_t max_rows,
                                                  int num_threads) const = 0;

  /// logits [num_tokens, E] f32 -> top_k_index [num_tokens, k] i32 (distinct, in range, best first;
  /// ties to the lower id; NaN logits count as minus infinity, so a row with some NaN still routes
  /// to its finite experts), top_k_weights [num_tokens, k] f32. correction_bias [E] f32 or absent.
  virtual void route(const TensorView& logits, const TensorView& correction_bias,
                     const RouterOptions& options, MutableTensorView top_k_index,
                     MutableTensorView top_k_weights, Workspace& workspace,
                     const Stream& stream) = 0;
  /// rms_norm(), linear() and route(), with the logits in the workspace.
  virtual void norm_and_route(const NormRouteArgs& args, Workspace& workspace,
                              const Stream& stream);
  virtual size_t route_workspace_bytes(int64_t num_experts, int num_threads) const = 0;

  // What models with images need besides. On a device where has_vision_ops() is false, calling one
  // of these is a bug.
  virtual bool has_vision_ops() const { return false; }

  /// out = (x - mean(x)) / sqrt(variance(x) + eps) * weight + bias over the last dimension
  virtual void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                          float eps, MutableTensorView out, const Stream& stream);

  /// out = act(x)
  virtual void plain_activation(const TensorView& x, Activation activation, MutableTensorView out,
                                const Stream& stream);

  /// rope_angles() where element i of token t turns with positions[axes[i], t].
  virtual void rope_angles_on_axes(const AxisPositions& where,
                                   const TensorView& inverse_frequencies, float scale,
                                   MutableTensorView cos, MutableTensorView sin,
                                   const Stream& stream);

  /// y[t] += the sum over j of weights[t, j] * table[rows[t, j]], with rows i32 inside the table
  /// and weights f32, both [num_tokens, any].
  virtual void add_weighted_rows(const TensorView& table, const TensorView& rows,
                                 const TensorView& weights, MutableTensorView y,
                                 const Stream& stream);

  /// y[rows[i]] = x[i] or += x[i], with rows [n] i32 inside y, each once
  virtual void scatter_rows(const TensorView& x, const TensorView& rows, Accumulate accumulate,
                            MutableTensorView y, const Stream& stream);

  // What DeepSeek-V4 needs besides. On a device where has_compressed_ops() is false, calling one
  // of these is a bug.
  virtual bool has_compressed_ops() const { return false; }

  /// Rotates neighbouring pairs (x[first + 2i], x[first + 2i + 1]), i < half, of every head in
  /// place; `inverse`: by the negative angles. Shapes as of rope().
  virtual void rope_pairs(MutableTensorView x, int64_t first, const TensorView& cos,
                          const TensorView& sin, bool inverse, const Stream& stream);
  /// route() with the experts of token t given: table[token_ids[t]], table [vocab_size, k] i32 or
  /// i64, all in [0, E). Scores weigh, groups and bias have no part.
  virtual void route_by_table(const TensorView& logits, const TensorView& token_ids,
                              const TensorView& table, const RouterOptions& options,
                              MutableTensorView top_k_index, MutableTensorView top_k_weights,
                              Workspace& workspace, const Stream& stream);
  /// gate = min(gate, limit) and up = clamp(up, -limit, limit); NaN stays.
  virtual void clamp_gated(MutableTensorView gate, MutableTensorView up, float limit,
                           const Stream& stream);
  /// x [num_tokens, ...] into a ring [num_slots, 1, rows, elements of a row of x] of the same
  /// dtype.
  virtual void store_ring(const TensorView& x, const StepTokens& tokens, MutableTensorView ring,
                          const Stream& stream);
  /// Stores the entries that the new tokens close.
  virtual void compress(const CompressArgs& args, Workspace& workspace, const Stream& stream);
  virtual size_t compress_workspace_bytes(int64_t width, int num_threads) const;
  virtual void pick_entries(const PickEntriesArgs& args, Workspace& workspace,
                            const Stream& stream);
  virtual size_t pick_entries_workspace_bytes(int64_t num_heads, int64_t width, int64_t k,
                                              int num_threads) const;
  virtual void shared_kv_attention(const SharedKvAttentionArgs& args, Workspace& workspace,
                                   const Stream& stream);
  virtual size_t shared_kv_attention_workspace_bytes(int64_t num_heads, int64_t head_dim,
                                                     int num_threads) const;
  virtual void hyper_collapse(const HyperCollapseArgs& args, const Stream& stream);
  virtual void hyper_expand(const HyperExpandArgs& args, const Stream& stream);

  /// Draws the next tokens where the logits are. A GPU's op: on the CPU there is Sampler, and this
  /// throws std::logic_error. Greedy (temperature 0 and no penalty) gives what Sampler gives; a
  /// draw takes what Sampler takes for the same uniform number, but for weights that the two round
  /// differently (about 1e-12 of them).
  virtual void sample(const SampleArgs& args, Workspace& workspace, const Stream& stream);
  virtual size_t sample_workspace_bytes(int64_t num_rows, int64_t vocab_size) const;
};

/// The ops of a kind of device. Throws Unsupported when this build has none for it.
DenseOps& dense_ops(DeviceType device);

/// The same, null where this build has none.
DenseOps* find_dense_ops(DeviceType device);

}  // namespace cadre

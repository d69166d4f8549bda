// Attention: which kernel takes a step, and how far the keys are split.
#include <algorithm>

#include "backends/cuda/dense/attention_kernels.h"
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kEnoughBlocks = 66;  // half an H200: more blocks than that need no splits

AttentionCall call_of(const AttentionArgs& args) {
  CADRE_ASSERT(args.q.dim(1) % args.keys.dim(1) == 0 && args.q.dim(2) == args.keys.dim(3));
  CADRE_ASSERT(args.q.dtype() == args.keys.dtype() && args.keys.dtype() == args.values.dtype() &&
               args.out.dtype() == args.q.dtype());
  AttentionCall call;
  call.dtype = args.q.dtype();
  call.q = args.q.data();
  call.keys = args.keys.data();
  call.values = args.values.data();
  call.out = args.out.mutable_data();
  call.spans = args.tokens.spans.as<int32_t>();
  call.num_sequences = static_cast<int32_t>(args.tokens.spans.dim(0));
  call.num_tokens = args.q.dim(0);
  call.num_kv_heads = static_cast<int32_t>(args.keys.dim(1));
  call.group = static_cast<int32_t>(args.q.dim(1) / args.keys.dim(1));
  call.head_dim = static_cast<int32_t>(args.q.dim(2));
  call.max_tokens = args.keys.dim(2);
  call.window = static_cast<int32_t>(std::min<int64_t>(args.sliding_window, INT32_MAX));
  call.scale = args.scale;
  if (args.sinks) call.sinks = args.sinks.as<float>();
  CADRE_ASSERT(!args.sinks || args.sinks.numel() == args.q.dim(1));
  call.is_causal = args.is_causal;
  return call;
}

bool fits_tensor_cores(const AttentionCall& call) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return call.dtype != DType::kF32 && call.head_dim % 8 == 0 && call.head_dim <= kMaxHeadDim &&
         aligned(call.q) && aligned(call.keys) && aligned(call.values) && aligned(call.out);
}

// How many blocks share a tile's keys. Only numbers that a recorded graph keeps say so: of tokens
// and sequences, and the caches' length.
int32_t splits_of(const AttentionCall& call, bool cluster) {
  const int64_t blocks = max_tiles(call, kFewRows) * call.num_kv_heads;
  const int64_t keys =
      call.window > 0 ? std::min<int64_t>(call.window, call.max_tokens) : call.max_tokens;
  if (!cluster) {
    const int64_t useful = (keys + kMinSplitKeys - 1) / kMinSplitKeys;
    return static_cast<int32_t>(std::clamp<int64_t>(kMaxPartials / blocks, 1, useful));
  }
  // A block fills a multiprocessor, and clusters fill only some of these: measured on an H200.
  int32_t splits = 1;
  while (2 * splits <= kMaxCluster && 2 * splits * blocks <= 64 &&
         2 * splits * kMinSplitKeys < keys) {
    splits *= 2;
  }
  return splits;
}

bool is_for_many(const AttentionCall& call) {
  return call.num_tokens * call.group > 64 * call.num_sequences &&
         max_tiles(call, kManyRows) * call.num_kv_heads >= kEnoughBlocks;
}

void attend(AttentionCall call, Workspace& workspace, const Stream& stream) {
  if (call.num_tokens == 0) return;
  const bool fits = fits_tensor_cores(call);
  if (fits && is_for_many(call)) return attend_many(call, stream);
  const Workspace::Scope scope(workspace);
  const bool cluster = fits && has_large_clusters(stream);
  call.num_splits = splits_of(call, cluster);
  if (call.num_splits > 1 && !cluster) {
    const int64_t blocks = max_tiles(call, kFewRows) * call.num_kv_heads;
    call.partials =
        workspace.allocate<float>(blocks * call.num_splits * partial_floats(call.head_dim));
  }
  if (fits) {
    attend_few(call, stream);
  } else {
    attend_any(call, stream);
  }
  if (call.partials != nullptr) join_splits(call, stream);
}

}  // namespace

bool CudaDenseOps::serves(const AttentionShape& shape) const {
  return shape.head_dim <= kMaxHeadDim;
}

void CudaDenseOps::attention(const AttentionArgs& args, Workspace& workspace,
                             const Stream& stream) {
  attend(call_of(args), workspace, stream);
}

void CudaDenseOps::finish_and_attend(const QkvArgs& qkv, const AttentionArgs& args,
                                     Workspace& workspace, const Stream& stream) {
  AttentionCall call = call_of(args);
  const std::span<const SequenceSpan> sequences = args.tokens.sequences;
  const bool one_each = std::all_of(sequences.begin(), sequences.end(),
                                    [](const SequenceSpan& s) { return s.num_tokens == 1; });
  if (one_each && qkv.qk_norm != QkNorm::kWholeProjection && fits_tensor_cores(call) &&
      !is_for_many(call)) {
    call.fresh = finish_args(qkv);
    call.is_fresh = takes_fresh(call);
  }
  if (!call.is_fresh) finish_qkv(qkv, stream);
  attend(call, workspace, stream);
}

size_t CudaDenseOps::attention_workspace_bytes(const AttentionShape& shape, int64_t /*max_tokens*/,
                                               int /*num_threads*/) const {
  return Workspace::padded(static_cast<size_t>(kMaxPartials * partial_floats(shape.head_dim)) *
                           sizeof(float));
}

}  // namespace cadre::cuda

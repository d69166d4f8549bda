// Latent attention: which kernel takes a step, and how far the rows of the cache are split.
#include <algorithm>

#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/latent_kernels.h"
#include "core/check.h"

namespace cadre::cuda {
namespace {

LatentCall call_of(const LatentAttentionArgs& args) {
  LatentCall call;
  AttentionCall& base = call.base;
  base.dtype = args.q_latent.dtype();
  base.q = args.q_latent.data();
  base.keys = args.rows.data();
  base.out = args.out.mutable_data();
  base.spans = args.tokens.spans.as<int32_t>();
  base.num_sequences = static_cast<int32_t>(args.tokens.spans.dim(0));
  base.num_tokens = args.q_latent.dim(0);
  base.num_kv_heads = 1;
  base.group = static_cast<int32_t>(args.q_latent.dim(1));
  base.head_dim = static_cast<int32_t>(args.q_latent.dim(2));
  base.max_tokens = args.rows.dim(2);
  base.scale = args.scale;
  call.q_rope = args.q_rope.data();
  call.token_stride = args.q_rope.stride(0);
  call.head_stride = args.q_rope.stride(1);
  call.rope_dim = static_cast<int32_t>(args.q_rope.dim(2));
  return call;
}

bool fits_tensor_cores(const LatentCall& call, const Stream& stream) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return call.base.dtype != DType::kF32 && call.base.head_dim == kLatentRank &&
         call.rope_dim == kLatentRope && call.token_stride % 8 == 0 && call.head_stride % 8 == 0 &&
         aligned(call.base.q) && aligned(call.base.keys) && aligned(call.base.out) &&
         aligned(call.q_rope) && has_room_for_latent_tiles(stream);
}

// How many blocks share a tile's keys. Only numbers that a recorded graph keeps say so.
int32_t splits_of(const AttentionCall& call, int32_t rows_per_tile) {
  const int64_t useful = (call.max_tokens + kMinSplitKeys - 1) / kMinSplitKeys;
  const int64_t parts = kMaxLatentParts / rows_per_tile / max_tiles(call, rows_per_tile);
  return static_cast<int32_t>(std::clamp<int64_t>(parts, 1, useful));
}

}  // namespace

bool CudaDenseOps::serves(const LatentShape& shape) const {
  return shape.rank <= kMaxLatentRank && shape.rope_dim <= kMaxLatentRope;
}

void CudaDenseOps::latent_attention(const LatentAttentionArgs& args, Workspace& workspace,
                                    const Stream& stream) {
  const DType dtype = args.rows.dtype();
  CADRE_ASSERT(args.rows.dim(1) == 1 && args.out.shape() == args.q_latent.shape() &&
               args.q_latent.dim(2) + args.q_rope.dim(2) == args.rows.dim(3) &&
               args.q_rope.dim(1) == args.q_latent.dim(1));
  CADRE_ASSERT(args.q_latent.dtype() == dtype && args.q_rope.dtype() == dtype &&
               args.out.dtype() == dtype);
  LatentCall call = call_of(args);
  CADRE_ASSERT(serves(LatentShape{call.base.group, call.base.head_dim, call.rope_dim}));
  if (call.base.num_tokens == 0) return;
  const bool fits = fits_tensor_cores(call, stream);
  const int32_t rows = fits ? kLatentTileRows : kLatentAnyRows;
  const Workspace::Scope scope(workspace);
  call.base.num_splits = splits_of(call.base, rows);
  if (call.base.num_splits > 1) {
    const int64_t parts = max_tiles(call.base, rows) * call.base.num_splits * rows;
    call.base.partials =
        workspace.allocate<float>(parts * latent_partial_floats(call.base.head_dim));
  }
  if (fits) {
    latent_tiles(call, stream);
  } else {
    latent_any(call, stream);
  }
  if (call.base.partials != nullptr) join_latent(call, rows, stream);
}

size_t CudaDenseOps::latent_attention_workspace_bytes(const LatentShape& shape,
                                                      int64_t /*max_rows*/,
                                                      int /*num_threads*/) const {
  return Workspace::padded(
      static_cast<size_t>(kMaxLatentParts * latent_partial_floats(shape.rank)) * sizeof(float));
}

void CudaDenseOps::linear_heads(const TensorView& x, const TensorView& weight,
                                MutableTensorView out, Workspace& /*workspace*/,
                                const Stream& stream) {
  HeadsProduct args;
  args.dtype = x.dtype();
  args.x = x.data();
  args.weight = weight.data();
  args.out = out.mutable_data();
  args.num_tokens = x.dim(0);
  args.num_heads = x.dim(1);
  args.n = weight.dim(1);
  args.k = weight.dim(2);
  args.x_token = x.stride(0);
  args.x_head = x.stride(1);
  args.out_token = out.stride(0);
  args.out_head = out.stride(1);
  args.w_head = weight.stride(0);
  args.w_n = weight.stride(1);
  args.w_k = weight.stride(2);
  CADRE_ASSERT(weight.dtype() == x.dtype() && out.dtype() == x.dtype() &&
               weight.dim(0) == x.dim(1) && x.dim(2) == args.k && out.dim(2) == args.n &&
               out.dim(1) == x.dim(1) && (args.w_n == 1 || args.w_k == 1));
  if (args.num_tokens > 0) heads_product(args, stream);
}

}  // namespace cadre::cuda

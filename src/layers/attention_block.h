// What a decoder layer needs of its attention, whatever the family: room, memory between steps, and
// the forward.
#pragma once

#include "layers/forward_context.h"
#include "layers/kv_store.h"

namespace cadre {

class AttentionBlock {
 public:
  virtual ~AttentionBlock() = default;

  virtual size_t workspace_bytes(const WorkspaceQuery& query) const = 0;
  /// What it keeps of every sequence, found again in context.cache under its layer.
  virtual CacheLayout cache_layout(DType compute_dtype) const = 0;
  /// residual += attention(x); stores what later steps need of the new tokens under `layer`.
  virtual void forward(const TensorView& x, MutableTensorView residual, int64_t layer,
                       const ForwardContext& context) const = 0;
};

}  // namespace cadre

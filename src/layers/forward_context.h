// What all blocks of a forward share.
#pragma once

#include <span>

#include "cadre/stream.h"
#include "cadre/tensor.h"
#include "cadre/workspace.h"
#include "dense/dense_ops.h"

namespace cadre {

class KvStore;

/// An RMS norm.
struct Norm {
  TensorView weight;  // [width]
  float eps = 1e-6f;
};

/// What a MoE layer saw and gave. Views are valid during the call only.
struct MoeLayerView {
  int64_t layer = 0;
  TensorView hidden_states;         // [num_tokens, hidden_size] compute dtype
  MutableTensorView top_k_index;    // [num_tokens, top_k] i32
  MutableTensorView top_k_weights;  // [num_tokens, top_k] f32
  TensorView output;                // [num_tokens, hidden_size]; absent in on_routing
};

/// Watches the MoE layers of a forward, in order.
class MoeObserver {
 public:
  virtual ~MoeObserver() = default;
  /// May overwrite ids and weights in place.
  virtual void on_routing(const MoeLayerView& view) = 0;
  virtual void on_output(const MoeLayerView& view) = 0;
};

/// Of a step's positions.
struct RopeAngles {
  MutableTensorView cos;  // [num_tokens, rotary_dim / 2] f32
  MutableTensorView sin;
  TensorView inverse_frequencies = {};  // [rotary_dim / 2] f32, for other positions
  float scale = 1;                      // of cos and sin
};

struct ForwardContext {
  DenseOps& ops;
  Workspace& workspace;
  const Stream& stream;
  DType compute_dtype;
  StepTokens tokens;
  std::span<const RopeAngles> ropes;  // as in DecoderConfig
  KvStore& cache;
  MoeObserver* observer;      // may be null
  TensorView token_ids = {};  // [num_tokens] i32

  /// Scratch of the device; give it back with a Workspace::Scope.
  MutableTensorView take(DType dtype, const Dims& shape) const {
    const size_t bytes = static_cast<size_t>(num_elements(shape)) * size_of(dtype);
    return {workspace.allocate(bytes), dtype, shape, stream.device};
  }
};

/// The question behind every workspace_bytes(): how much a forward of up to max_tokens takes.
struct WorkspaceQuery {
  const DenseOps& ops;
  int64_t max_tokens;
  DType compute_dtype;
  int num_threads;

  size_t tensor(DType dtype, int64_t width) const {
    return Workspace::padded(static_cast<size_t>(max_tokens * width) * size_of(dtype));
  }
  size_t linear(int64_t k) const {
    return ops.linear_workspace_bytes(max_tokens, k, compute_dtype, num_threads);
  }
  size_t linear_heads(int64_t k) const {
    return ops.linear_heads_workspace_bytes(max_tokens, k, compute_dtype, num_threads);
  }
  size_t linear_add(int64_t n, int64_t k) const {
    return ops.linear_add_workspace_bytes(max_tokens, n, k, compute_dtype, num_threads);
  }
};

}  // namespace cadre

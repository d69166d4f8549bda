// Router: logits in float32, then the k experts of every token and their weights.
#pragma once

#include "layers/forward_context.h"

namespace cadre {

class Router {
 public:
  /// `gate` [num_experts, hidden_size]; `correction_bias` [num_experts] f32 or absent. With a
  /// `table` [vocab_size, top_k] a token's id names its experts, and logits only weigh.
  Router(int64_t top_k, const LinearWeights& gate, const TensorView& correction_bias,
         const RouterOptions& options, const TensorView& table = {});

  int64_t top_k() const { return top_k_; }
  size_t workspace_bytes(const WorkspaceQuery& query) const;
  /// x = norm(residual), then its experts: top_k_index [num_tokens, top_k] i32, top_k_weights
  /// [num_tokens, top_k] f32.
  void forward(const Norm& norm, const TensorView& residual, MutableTensorView x,
               MutableTensorView top_k_index, MutableTensorView top_k_weights,
               const ForwardContext& context) const;

 private:
  int64_t top_k_;
  LinearWeights gate_;
  TensorView correction_bias_;
  RouterOptions options_;
  TensorView table_;
};

}  // namespace cadre

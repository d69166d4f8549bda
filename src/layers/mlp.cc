#include "layers/mlp.h"

#include <algorithm>

namespace cadre {

size_t Mlp::workspace_bytes(const WorkspaceQuery& query) const {
  return 2 * query.tensor(DType::kF32, intermediate_size_) +
         query.tensor(query.compute_dtype, intermediate_size_) +
         std::max(query.linear(hidden_size_), query.linear(intermediate_size_));
}

void Mlp::forward(const TensorView& x, MutableTensorView out, const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  const Dims shape{x.dim(0), intermediate_size_};
  const MutableTensorView gate = context.take(DType::kF32, shape);
  const MutableTensorView up = context.take(DType::kF32, shape);
  const MutableTensorView hidden = context.take(context.compute_dtype, shape);
  const LinearWeights* const weights[] = {&weights_.gate, &weights_.up};
  const MutableTensorView outs[] = {gate, up};
  context.ops.linear_group(x, weights, outs, context.workspace, context.stream);
  if (limit_) context.ops.clamp_gated(gate, up, *limit_, context.stream);
  context.ops.gated_activation(gate, up, activation_, hidden, context.stream);
  context.ops.linear(hidden, weights_.down, out, context.workspace, context.stream);
}

}  // namespace cadre

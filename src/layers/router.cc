#include "layers/router.h"

#include <algorithm>

namespace cadre {

Router::Router(int64_t top_k, const LinearWeights& gate, const TensorView& correction_bias,
               const RouterOptions& options, const TensorView& table)
    : top_k_(top_k),
      gate_(gate),
      correction_bias_(correction_bias),
      options_(options),
      table_(table) {
  validate(options, gate.weight.dim(0), top_k);
}

size_t Router::workspace_bytes(const WorkspaceQuery& query) const {
  const int64_t num_experts = gate_.weight.dim(0);
  return query.tensor(DType::kF32, num_experts) +
         std::max(query.linear(gate_.weight.dim(1)),
                  query.ops.route_workspace_bytes(num_experts, query.num_threads));
}

void Router::forward(const Norm& norm, const TensorView& residual, MutableTensorView x,
                     MutableTensorView top_k_index, MutableTensorView top_k_weights,
                     const ForwardContext& context) const {
  DenseOps& ops = context.ops;
  if (!table_) {
    return ops.norm_and_route({residual, norm.weight, norm.eps, x, gate_, correction_bias_,
                               options_, top_k_index, top_k_weights},
                              context.workspace, context.stream);
  }
  const Workspace::Scope scope(context.workspace);
  ops.rms_norm(residual, norm.weight, norm.eps, x, context.stream);
  const MutableTensorView logits = context.take(DType::kF32, {x.dim(0), gate_.weight.dim(0)});
  ops.linear(x, gate_, logits, context.workspace, context.stream);
  ops.route_by_table(logits, context.token_ids, table_, options_, top_k_index, top_k_weights,
                     context.workspace, context.stream);
}

}  // namespace cadre

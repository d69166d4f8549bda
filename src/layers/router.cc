#include "layers/router.h"

#include <algorithm>

namespace cadre {

Router::Router(int64_t top_k, const LinearWeights& gate, const TensorView& correction_bias,
               const RouterOptions& options)
    : top_k_(top_k), gate_(gate), correction_bias_(correction_bias), options_(options) {
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
  context.ops.norm_and_route({residual, norm.weight, norm.eps, x, gate_, correction_bias_, options_,
                              top_k_index, top_k_weights},
                             context.workspace, context.stream);
}

}  // namespace cadre

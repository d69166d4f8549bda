#include "layers/moe_block.h"

#include <algorithm>

namespace cadre {

size_t MoeBlock::workspace_bytes(const WorkspaceQuery& query) const {
  const int64_t hidden = group_->query().config.hidden_size;
  const int64_t top_k = router_.top_k();
  const size_t routed = query.tensor(DType::kI32, top_k) + query.tensor(DType::kF32, top_k) +
                        std::max(router_.workspace_bytes(query),
                                 group_->workspace_bytes(query.max_tokens, query.num_threads));
  size_t shared = 0;
  if (shared_expert_) {
    shared = query.tensor(DType::kF32, hidden) + query.tensor(DType::kF32, 1) +
             std::max(shared_expert_->mlp.workspace_bytes(query), query.linear(hidden));
  }
  return std::max(routed, shared);
}

void MoeBlock::run_experts(const Norm& norm, const TensorView& residual, MutableTensorView x,
                           MutableTensorView out, int64_t layer,
                           const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  const Dims shape{x.dim(0), router_.top_k()};
  const MutableTensorView index = context.take(DType::kI32, shape);
  const MutableTensorView weights = context.take(DType::kF32, shape);
  router_.forward(norm, residual, x, index, weights, context);
  if (context.observer) context.observer->on_routing({layer, x, index, weights, {}});
  const ExpertsGroup::Choice& choice = group_->choice_for(x.dim(0));
  choice.backend->forward(*choice.layers[static_cast<size_t>(index_)], {x, index, weights, out},
                          context.workspace, context.stream);
  if (context.observer) context.observer->on_output({layer, x, index, weights, out});
}

void MoeBlock::add_shared(const TensorView& x, MutableTensorView residual,
                          const ForwardContext& context) const {
  const Workspace::Scope scope(context.workspace);
  const MutableTensorView out = context.take(DType::kF32, x.shape());
  shared_expert_->mlp.forward(x, out, context);
  if (!shared_expert_->gate.weight) return context.ops.add(residual, out, context.stream);
  const MutableTensorView gate = context.take(DType::kF32, {x.dim(0), 1});
  context.ops.linear(x, shared_expert_->gate, gate, context.workspace, context.stream);
  context.ops.add_sigmoid_gated(residual, out, gate, context.stream);
}

}  // namespace cadre

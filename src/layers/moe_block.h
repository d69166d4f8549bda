// A Mixture-of-Experts layer: router, experts through the group's current backend, and where the
// family has one, a shared expert.
#pragma once

#include <optional>

#include "layers/experts_group.h"
#include "layers/mlp.h"
#include "layers/router.h"

namespace cadre {

/// An expert that every token passes; with a gate [1, hidden_size], scaled by its sigmoid.
struct SharedExpert {
  Mlp mlp;
  LinearWeights gate = {};
};

class MoeBlock {
 public:
  /// `group` must outlive the block; `index`: what add_layer() returned.
  MoeBlock(const Router& router, const ExpertsGroup& group, int64_t index,
           std::optional<SharedExpert> shared_expert = {})
      : router_(router), group_(&group), index_(index), shared_expert_(std::move(shared_expert)) {}

  const ExpertsGroup& group() const { return *group_; }
  int64_t index() const { return index_; }  // in the group

  size_t workspace_bytes(const WorkspaceQuery& query) const;
  /// x = norm(residual), out = routed experts(x), both [num_tokens, hidden_size] in the compute
  /// dtype.
  void run_experts(const Norm& norm, const TensorView& residual, MutableTensorView x,
                   MutableTensorView out, int64_t layer, const ForwardContext& context) const;
  bool has_shared_expert() const { return shared_expert_.has_value(); }
  /// residual += shared expert(x)
  void add_shared(const TensorView& x, MutableTensorView residual,
                  const ForwardContext& context) const;

 private:
  Router router_;
  const ExpertsGroup* group_;
  int64_t index_;
  std::optional<SharedExpert> shared_expert_;
};

}  // namespace cadre

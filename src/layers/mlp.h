// A dense gated MLP: down(act(gate(x)) * up(x)). Gate and up stay in float32 through the
// activation, as inside experts.
#pragma once

#include <optional>

#include "cadre/activation.h"
#include "layers/forward_context.h"

namespace cadre {

struct MlpWeights {
  LinearWeights gate;  // [intermediate_size, hidden_size]
  LinearWeights up;    // [intermediate_size, hidden_size]
  LinearWeights down;  // [hidden_size, intermediate_size]
};

class Mlp {
 public:
  /// `limit`: of gate and up before the activation, as ExpertsConfig::swiglu_limit.
  Mlp(int64_t hidden_size, int64_t intermediate_size, Activation activation,
      const MlpWeights& weights, std::optional<float> limit = {})
      : hidden_size_(hidden_size),
        intermediate_size_(intermediate_size),
        activation_(activation),
        weights_(weights),
        limit_(limit) {}

  size_t workspace_bytes(const WorkspaceQuery& query) const;
  /// out [num_tokens, hidden_size] f32
  void forward(const TensorView& x, MutableTensorView out, const ForwardContext& context) const;

 private:
  int64_t hidden_size_;
  int64_t intermediate_size_;
  Activation activation_;
  MlpWeights weights_;
  std::optional<float> limit_;
};

}  // namespace cadre

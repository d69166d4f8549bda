// Some experts of a layer as the host can read them, for the reference: in place on the CPU, copied
// from a GPU.
#pragma once

#include <vector>

#include "cadre/experts.h"

namespace cadre {

class HostExperts {
 public:
  /// The experts that `top_k_index` ([num_tokens, top_k] i32 or i64 on the host) names; all others
  /// are null on a GPU. Waits for the stream.
  HostExperts(const ExpertsConfig& config, const ExpertsWeights& weights,
              const TensorView& top_k_index, const Stream& stream);

  const ExpertsWeights& get() const { return weights_; }

 private:
  ExpertsWeights weights_;
  std::vector<Tensor> copies_;
};

}  // namespace cadre

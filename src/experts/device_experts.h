// Experts copied from the host to a GPU, in the compute dtype as its backends take them.
#pragma once

#include <memory>

#include "cadre/experts.h"

namespace cadre {

/// `weights` lie on the host in any plain format. The copies are contiguous [N, K] matrices of
/// query.compute_dtype on query.device, experts one after the other; biases are float32. On the CPU
/// the weights themselves.
std::shared_ptr<const ExpertsWeights> copy_to_device(const ExpertsQuery& query,
                                                     std::shared_ptr<const ExpertsWeights> weights,
                                                     const Stream& stream);

}  // namespace cadre

// Experts copied from the host to a GPU, as its backends take them.
#pragma once

#include <memory>

#include "cadre/experts.h"

namespace cadre {

/// `weights` lie on the host. The copies are [N, K] matrices on query.device, experts one after the
/// other: plain formats as contiguous matrices of query.compute_dtype, quantised ones as they are,
/// with rows of whole 16 bytes and contiguous scales. Biases are float32. On the CPU the weights
/// themselves.
std::shared_ptr<const ExpertsWeights> copy_to_device(const ExpertsQuery& query,
                                                     std::shared_ptr<const ExpertsWeights> weights,
                                                     const Stream& stream);

}  // namespace cadre

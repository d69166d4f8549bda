// Which backend a step of few tokens takes on a GPU: decoding reads every active expert once
// however few tokens there are, and kernels made for that are faster than grouped products up to
// some number of tokens.
#pragma once

#include <cstdint>

#include "cadre/experts.h"

namespace cadre {

/// Tokens of a step up to which "batched_mm" takes the place of "grouped_mm" on a GPU: the measured
/// crossover of the two (docs/performance_gpu.md). 0 on the CPU, where grouped_mm is fastest at
/// every size, and for quantised weights that batched_mm has only plain kernels for.
int64_t decode_threshold(const ExpertsQuery& query);

}  // namespace cadre

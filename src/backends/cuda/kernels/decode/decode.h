// A forward of few tokens, from routed ids to the combined output, for any backend of this device:
// two kernels that read each active expert once, in place, however many tokens share it.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cuda/kernels/device_weights.h"
#include "cadre/experts.h"

namespace cadre::cuda {

/// Adds the reasons why a layer is too large for the kernels. Device, dtype and format are asked
/// elsewhere (supports_on_gpu).
void add_decode_limits(const ExpertsConfig& config, Support& support);

/// Whether the fast kernels take these weights; all others go through the plain ones, at any
/// layout.
bool suits_fast_decode(const ExpertsQuery& query, const ExpertsWeights& weights);

size_t decode_workspace_bytes(const ExpertsQuery& query, int64_t max_tokens);

/// `is_fast` as suits_fast_decode() said; any number of tokens. Queues work and returns.
void decode(const CudaPrepared& prepared, bool is_fast, const RoutedTokens& tokens,
            Workspace& workspace, const Stream& stream);

}  // namespace cadre::cuda

// The checks of one call that the reference and all backends share.
#pragma once

#include <string_view>

#include "cadre/experts.h"

namespace cadre {

/// Shapes, id and weight dtypes, strides and memory of the inputs against the config. Throws
/// InvalidArgument naming `where` and the tensor.
void check_inputs(std::string_view where, const ExpertsConfig& config, const RoutedTokens& tokens);

/// The weights against the query that they are prepared for.
void check_weights(std::string_view where, const ExpertsQuery& query,
                   const ExpertsWeights& weights);

}  // namespace cadre

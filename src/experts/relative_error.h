// How far a backend's output lies from the reference: the measure that stated_bound() speaks of.
#pragma once

#include <span>

#include "cadre/tensor.h"

namespace cadre {

/// |out - truth| / |truth| over all elements. `out`: contiguous, in a compute dtype, as many
/// elements as `truth`. Infinite when the truth is all zero and `out` is not, NaN when either holds
/// a NaN.
double relative_error(const TensorView& out, std::span<const double> truth);

}  // namespace cadre

// Weights from one floating-point dtype to another on the host, as they stream to a GPU.
#pragma once

#include <cstdint>

#include "cadre/dtype.h"

namespace cadre::cuda {

/// Whether convert() serves: equal dtypes (any), or two of float32, bfloat16 and float16.
bool can_convert(DType from, DType to);

/// `count` elements; rounds to nearest, ties to even (cadre/float16.h). The addresses need not be
/// aligned and must not overlap.
void convert(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count);

}  // namespace cadre::cuda

// The bias of a product whose epilogue cannot add it.
#pragma once

#include <cstdint>

#include "cadre/dtype.h"
#include "cadre/stream.h"

namespace cadre::cuda {

/// out[r, c] = bias[c] (+ out[r, c]). out [m, n] f32 with out_stride elements between rows, bias
/// [n] f32, bf16 or fp16.
void add_bias(float* out, int64_t out_stride, int64_t m, int64_t n, const void* bias,
              DType bias_dtype, bool accumulate, const Stream& stream);

}  // namespace cadre::cuda

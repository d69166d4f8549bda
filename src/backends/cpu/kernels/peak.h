// Loops that do nothing but multiply registers. Only the ceilings use them.
#pragma once

#include "backends/cpu/kernels/isa.h"

namespace cadre::cpu {

/// Multiplies ones with ones in registers for some ten microseconds and returns the sum of all
/// products: as many as were done, so 2 * the result is the number of floating-point operations.
using PeakLoop = double (*)();

/// The products that `compute_dtype` runs on with these instructions: the dot products of bfloat16
/// where they exist, else float32 fused multiply-adds (portable: a product and a sum). The
/// instruction set must be available.
PeakLoop peak_loop(Isa isa, DType compute_dtype);

}  // namespace cadre::cpu

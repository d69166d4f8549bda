// AVX-512 with its byte permutations (VBMI): what is faster with them, the products of e4m3 codes.
#define CADRE_LANES 16
#define CADRE_VBMI
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/products_of_codes.inl.h"

namespace cadre::cpu {

const CodeKernels kAvx512VbmiCodes = {decode_floats<32>, multiply_codes<FloatCodes>};

}  // namespace cadre::cpu

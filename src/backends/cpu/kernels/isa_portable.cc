// The kernels in plain C++: any CPU that the compiler targets.
#define CADRE_LANES 4
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"
#include "backends/cpu/kernels/products_direct.inl.h"
#include "backends/cpu/kernels/products_of_codes.inl.h"
#include "backends/cpu/kernels/quantize.inl.h"

namespace cadre::cpu {

const KernelTable kPortableKernels = {
    .name = "portable",
    .row_type = Element::kF32,
    .row_tile = 4,
    .pack = pack_floats<8>,
    .multiply = multiply_floats<4, 8>,
    .widen = widen_rows,
    .gate = gate_function,
    .finish = finish_rows,
    .combine = combine_parts,
    .pack_stored = pack_stored,
    .unpack = unpack_floats<8>,
    .multiply_packed_chunk = multiply_packed_chunk<FloatRows>,
    .multiply_stored_chunk = multiply_stored_chunk<FloatRows>,
    .max_code_rows = kMaxCodeRows,
    .decode = decode_floats<8>,
    .multiply_codes = multiply_codes<FloatCodes>,
    .expand_scales = expand_scales,
    .quantize = quantize_row,
};

}  // namespace cadre::cpu

// The kernels in AVX-512 (F, BW, VL, DQ).
#define CADRE_LANES 16
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

const KernelTable kAvx512Kernels = {
    .name = "avx512",
    .row_type = Element::kF32,
    .row_tile = 12,
    .pack = pack_floats<32>,
    .multiply = multiply_floats<12, 32>,
    .widen = widen_rows,
    .gate = gate_function,
    .finish = finish_rows,
    .combine = combine_parts,
    .pack_stored = pack_stored,
    .unpack = unpack_floats<32>,
    .multiply_packed_chunk = multiply_packed_chunk<FloatRows>,
    .multiply_stored_chunk = multiply_stored_chunk<FloatRows>,
    .max_code_rows = kMaxCodeRows,
    .decode = decode_floats<32>,
    .multiply_codes = multiply_codes<FloatCodes>,
    .expand_scales = expand_scales,
    .quantize = quantize_row,
};

}  // namespace cadre::cpu

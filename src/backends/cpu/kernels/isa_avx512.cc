// The kernels in AVX-512 (F, BW, VL, DQ).
#define CADRE_LANES 16
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"
#include "backends/cpu/kernels/products_direct.inl.h"

namespace cadre::cpu {

const KernelTable kAvx512Kernels = {"avx512",
                                    Element::kF32,
                                    12,
                                    pack_floats<32>,
                                    multiply_floats<12, 32>,
                                    widen_rows,
                                    gate_function,
                                    finish_rows,
                                    combine_parts,
                                    nullptr,
                                    nullptr,
                                    pack_stored,
                                    unpack_floats<32>,
                                    nullptr,
                                    nullptr,
                                    multiply_packed_chunk<FloatRows>,
                                    multiply_stored_chunk<FloatRows>};

}  // namespace cadre::cpu

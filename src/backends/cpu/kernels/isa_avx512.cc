// The kernels in AVX-512 (F, BW, VL, DQ).
#define CADRE_LANES 16
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"

namespace cadre::cpu {

const KernelTable kAvx512Kernels = {"avx512",
                                    Element::kF32,
                                    6,
                                    pack_floats<64>,
                                    multiply_floats<6, 64>,
                                    widen_rows,
                                    gate_function,
                                    finish_rows,
                                    combine_parts,
                                    nullptr,
                                    nullptr,
                                    pack_stored,
                                    unpack_floats<64>,
                                    nullptr,
                                    nullptr};

}  // namespace cadre::cpu

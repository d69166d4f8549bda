// The kernels in AVX2 with FMA and F16C.
#define CADRE_LANES 8
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"
#include "backends/cpu/kernels/products_direct.inl.h"

namespace cadre::cpu {

const KernelTable kAvx2Kernels = {"avx2",
                                  Element::kF32,
                                  6,
                                  pack_floats<16>,
                                  multiply_floats<6, 16>,
                                  widen_rows,
                                  gate_function,
                                  finish_rows,
                                  combine_parts,
                                  nullptr,
                                  nullptr,
                                  pack_stored,
                                  unpack_floats<16>,
                                  nullptr,
                                  nullptr,
                                  multiply_packed_chunk<FloatRows>,
                                  multiply_stored_chunk<FloatRows>};

}  // namespace cadre::cpu

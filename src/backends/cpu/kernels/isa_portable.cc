// The kernels in plain C++: any CPU that the compiler targets.
#define CADRE_LANES 4
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"
#include "backends/cpu/kernels/products_direct.inl.h"

namespace cadre::cpu {

const KernelTable kPortableKernels = {"portable",
                                      Element::kF32,
                                      4,
                                      pack_floats<8>,
                                      multiply_floats<4, 8>,
                                      widen_rows,
                                      gate_function,
                                      finish_rows,
                                      combine_parts,
                                      nullptr,
                                      nullptr,
                                      pack_stored,
                                      unpack_floats<8>,
                                      nullptr,
                                      nullptr,
                                      multiply_packed_chunk<FloatRows>,
                                      multiply_stored_chunk<FloatRows>};

}  // namespace cadre::cpu

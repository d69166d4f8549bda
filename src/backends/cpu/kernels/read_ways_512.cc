// Reading with the vectors that AVX-512 brings.
#include "backends/cpu/kernels/read_ways.h"

#define CADRE_READ_VECTOR "512-bit loads"
static constexpr int kVectorBytes = 64;
#include "backends/cpu/kernels/read_ways.inl.h"

namespace cadre::cpu {

ReadWays read_ways_512() { return kAllWays; }

}  // namespace cadre::cpu

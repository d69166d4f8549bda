// Reading with the vectors that every processor has.
#include "backends/cpu/kernels/read_ways.h"

#define CADRE_READ_VECTOR "128-bit loads"
static constexpr int kVectorBytes = 16;
#include "backends/cpu/kernels/read_ways.inl.h"

namespace cadre::cpu {

ReadWays read_ways_128() { return kAllWays; }

}  // namespace cadre::cpu

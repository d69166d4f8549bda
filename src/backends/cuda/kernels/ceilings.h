// The ceilings of a GPU: the fastest of several kernels that only read, and a square product
// through the library that serves (matmul.h).
#pragma once

#include "dense/ceilings.h"

namespace cadre::cuda {

const Ceilings& ceilings();

}  // namespace cadre::cuda

// The ceilings of the CPU, with the instruction set that its kernels use.
#pragma once

#include "dense/ceilings.h"

namespace cadre::cpu {

const Ceilings& ceilings();

}  // namespace cadre::cpu

// The table of dense implementations that src/backends/CMakeLists.txt writes. Only dense_ops() and
// ceilings_of() read it.
#pragma once

#include <span>

#include "cadre/device.h"
#include "dense/ceilings.h"
#include "dense/dense_ops.h"

namespace cadre {

struct CompiledDenseOps {
  DeviceType device;
  DenseOps& (*get)();
  const Ceilings& (*ceilings)();
};

std::span<const CompiledDenseOps> compiled_dense_ops();

}  // namespace cadre

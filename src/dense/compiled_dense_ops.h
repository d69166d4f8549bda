// The table of dense implementations that src/backends/CMakeLists.txt writes. Only dense_ops()
// reads it.
#pragma once

#include <span>

#include "cadre/device.h"
#include "dense/dense_ops.h"

namespace cadre {

struct CompiledDenseOps {
  DeviceType device;
  DenseOps& (*get)();
};

std::span<const CompiledDenseOps> compiled_dense_ops();

}  // namespace cadre

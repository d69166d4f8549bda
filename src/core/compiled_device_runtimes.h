// The table of device runtimes that src/backends/CMakeLists.txt writes. Only find_device_runtime()
// reads it.
#pragma once

#include <span>

#include "core/device_runtime.h"

namespace cadre {

struct CompiledDeviceRuntime {
  DeviceType type;
  DeviceRuntime& (*get)();
};

std::span<const CompiledDeviceRuntime> compiled_device_runtimes();

}  // namespace cadre

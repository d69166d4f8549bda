// The table of backends that src/backends/CMakeLists.txt writes. Only the registry reads it.
#pragma once

#include <memory>
#include <span>

#include "cadre/experts.h"

namespace cadre {

struct CompiledBackend {
  const char* name;
  DeviceType device;
  std::unique_ptr<ExpertsBackend> (*make)();  // null: listed, but not part of this build
  const char* not_built_reason;
};

/// In the order of the specification.
std::span<const CompiledBackend> compiled_backends();

}  // namespace cadre

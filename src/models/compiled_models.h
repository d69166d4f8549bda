// The table of model families that CMakeLists.txt writes. Only the registry reads it.
#pragma once

#include <span>

#include "models/model_builder.h"

namespace cadre {

struct CompiledModel {
  const char* architecture;
  const char* model_type;
  BuiltModel (*build)(ModelBuilder& builder);
};

std::span<const CompiledModel> compiled_models();

}  // namespace cadre

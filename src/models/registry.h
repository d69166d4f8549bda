// The table of model families: architecture name -> the function that builds it.
#pragma once

#include <string>
#include <vector>

#include "models/model_builder.h"

namespace cadre {

struct Architecture {
  std::string name;        // "Qwen3MoeForCausalLM"
  std::string model_type;  // "qwen3_moe"
  BuiltModel (*build)(ModelBuilder& builder) = nullptr;
};

/// By `architectures`, or where the config has none by `model_type`. Throws Unsupported listing the
/// known ones.
Architecture find_architecture(const ConfigReader& config);

/// Lets a test load a model of its own; not part of known_architectures().
void add_architecture_for_testing(const Architecture& architecture);

}  // namespace cadre

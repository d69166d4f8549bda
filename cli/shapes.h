// Shapes of experts layers, by the names of the models that have them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cadre/experts.h"

namespace cadre::cli {

struct NamedShape {
  std::string name;
  ExpertsConfig config;  // a plain gated layer
};

const std::vector<NamedShape>& named_shapes();

/// `text` is a known name or "E,k,H,I". Throws InvalidArgument naming `option`, what it takes and
/// what came.
NamedShape parse_shape(std::string_view option, const std::string& text);

}  // namespace cadre::cli

// Which name an ExpertsImplementation gives to a sub-config.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/model.h"
#include "layers/experts_group.h"

namespace cadre {

/// The name for `sub_config`: its own entry, else that of the model as a whole (""), else empty.
std::string_view implementation_for(const ExpertsImplementation& map, std::string_view sub_config);

/// Throws InvalidArgument listing the valid keys when one is neither "" nor one of `sub_configs`,
/// and listing the valid names when one is unknown.
void check_implementation(const ExpertsImplementation& map,
                          const std::vector<std::string>& sub_configs,
                          const std::vector<std::unique_ptr<ExpertsGroup>>& groups);

/// The same for one name.
void check_backend_name(std::string_view name);

}  // namespace cadre

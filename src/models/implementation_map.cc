#include "models/implementation_map.h"

#include <algorithm>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {

std::string_view implementation_for(const ExpertsImplementation& map, std::string_view sub_config) {
  auto entry = map.find(sub_config);
  if (entry == map.end()) entry = map.find("");
  return entry == map.end() ? std::string_view{} : std::string_view{entry->second};
}

void check_implementation(const ExpertsImplementation& map,
                          const std::vector<std::string>& sub_configs,
                          const std::vector<std::unique_ptr<ExpertsGroup>>& groups) {
  for (const auto& entry : map) {
    const std::string_view wanted = entry.first;
    const std::string_view map_name = entry.second;
    const bool known = wanted.empty() || std::find(sub_configs.begin(), sub_configs.end(),
                                                   wanted) != sub_configs.end();
    if (!known) {
      std::vector<std::string> keys{"\"\" (the model as a whole)"};
      for (const std::string& name : sub_configs) keys.push_back(str_cat('"', name, '"'));
      throw InvalidArgument(str_cat("experts implementation: unknown sub-config \"", wanted,
                                    "\"; this model has: ", join(keys)));
    }
    // A prepared name needs no look-up, which would take memory.
    const bool prepared = std::any_of(groups.begin(), groups.end(), [&](const auto& group) {
      return group->is_prepared(map_name);
    });
    if (!prepared) check_backend_name(map_name);
  }
}

void check_backend_name(std::string_view name) {
  const std::vector<std::string> names = backend_names();
  if (std::find(names.begin(), names.end(), name) != names.end()) return;
  throw InvalidArgument(
      str_cat("experts implementation: unknown name \"", name, "\"; the names are: ", join(names)));
}

}  // namespace cadre

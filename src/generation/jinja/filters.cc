#include "generation/jinja/filters.h"

#include <algorithm>
#include <string>
#include <vector>

namespace cadre::jinja {

Function find_filter(std::string_view name) {
  for (const FilterRow& row : kScalarFilters) {
    if (row.name == name) return row.function;
  }
  for (const FilterRow& row : kListFilters) {
    if (row.name == name) return row.function;
  }
  return nullptr;
}

std::string filter_names() {
  std::vector<std::string_view> names;
  for (const FilterRow& row : kScalarFilters) names.push_back(row.name);
  for (const FilterRow& row : kListFilters) names.push_back(row.name);
  std::sort(names.begin(), names.end());
  return join(names);
}

}  // namespace cadre::jinja

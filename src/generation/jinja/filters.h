// The filters, by what they work on. find_filter() in filters.cc has the table.
#pragma once

#include <array>
#include <string_view>

#include "generation/jinja/callable.h"

namespace cadre::jinja {

struct FilterRow {
  std::string_view name;
  Function function;
};

/// Of texts and numbers.
extern const std::array<FilterRow, 20> kScalarFilters;
/// Of lists and dicts.
extern const std::array<FilterRow, 21> kListFilters;

}  // namespace cadre::jinja

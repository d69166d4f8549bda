// Split patterns are written for Oniguruma; we match with PCRE2. This checks that a pattern means
// the same in both.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace cadre::text {

/// The first construct that the two engines read differently (or that is beyond the subset checked
/// here), with its place; empty when there is none.
std::optional<std::string> find_foreign_syntax(std::string_view pattern);

/// `literal` as a pattern that matches just it.
std::string quote_pattern(std::string_view literal);

}  // namespace cadre::text

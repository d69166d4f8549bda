// "Did you mean ...?" for names that nobody knows.
#pragma once

#include <span>
#include <string>
#include <string_view>

namespace cadre::cli {

/// The candidate with the fewest changed, missing, added or swapped characters; empty when none is
/// near.
std::string nearest_name(std::string_view name, std::span<const std::string> candidates);

/// "; did you mean X?" or nothing.
std::string did_you_mean(std::string_view name, std::span<const std::string> candidates);

}  // namespace cadre::cli

// Strings as templates write them.
#pragma once

#include <string>
#include <string_view>

namespace cadre::jinja {

/// Resolves the escapes of a string literal as Jinja does: Python's, and unknown ones stay as they
/// are. Throws Fault for a damaged escape, a name (\N{...}) and a code point that is no character.
std::string unescape(std::string_view literal);

}  // namespace cadre::jinja

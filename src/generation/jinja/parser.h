// Template text to a tree.
#pragma once

#include <string_view>

#include "generation/jinja/lexer.h"
#include "generation/jinja/tree.h"

namespace cadre::jinja {

/// `source`: valid UTF-8. Throws SyntaxFault.
Block parse(std::string_view source);

}  // namespace cadre::jinja

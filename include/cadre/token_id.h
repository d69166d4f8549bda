// The number of a token in a vocabulary: all that a model knows of text.
#pragma once

#include <cstdint>

namespace cadre {

using TokenId = int32_t;

}  // namespace cadre

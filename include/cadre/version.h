#pragma once

namespace cadre {

/// The library's version, "major.minor.patch".
const char* version();

}  // namespace cadre

#include "cadre/version.h"

namespace cadre {

const char* version() { return CADRE_VERSION; }

}  // namespace cadre

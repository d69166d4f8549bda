#include "core/check.h"

#include <stdexcept>

#include "core/str_cat.h"

namespace cadre {

void check_failed(const char* expression, const char* file, int line, const char* function) {
  throw std::logic_error(str_cat("internal error (please report it): ", expression,
                                 " does not hold at ", file, ":", line, " in ", function));
}

}  // namespace cadre

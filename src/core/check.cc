#include "core/check.h"

#include <stdexcept>

#include "core/str_cat.h"

namespace cadre {

void check_failed(const char* expression, std::source_location where) {
  throw std::logic_error(str_cat("internal error (please report it): ", expression,
                                 " does not hold at ", where.file_name(), ":", where.line(), " in ",
                                 where.function_name()));
}

}  // namespace cadre

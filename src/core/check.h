// Checks of our own logic. A failed check is a bug in Cadre, not bad input (which gets an Error
// with five answers).
#pragma once

#include <source_location>

namespace cadre {

/// Throws std::logic_error with expression and place.
[[noreturn]] void check_failed(const char* expression,
                               std::source_location where = std::source_location::current());

}  // namespace cadre

/// Always on.
#define CADRE_ASSERT(condition)                          \
  do {                                                   \
    if (!(condition)) ::cadre::check_failed(#condition); \
  } while (false)

/// On in debug and sanitizer builds: for inner loops.
#ifdef NDEBUG
#define CADRE_DCHECK(condition) static_cast<void>(0)
#else
#define CADRE_DCHECK(condition) CADRE_ASSERT(condition)
#endif

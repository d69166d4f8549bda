// Checks of our own logic. A failed check is a bug in Cadre, not bad input (which gets an Error
// with five answers).
#pragma once

namespace cadre {

/// Throws std::logic_error with expression and place.
[[noreturn]] void check_failed(const char* expression, const char* file, int line,
                               const char* function);

}  // namespace cadre

/// Always on. (clang 14 has no std::source_location: hence the macros.)
#define CADRE_ASSERT(condition)                                                        \
  do {                                                                                 \
    if (!(condition)) ::cadre::check_failed(#condition, __FILE__, __LINE__, __func__); \
  } while (false)

/// On in debug and sanitizer builds: for inner loops.
#ifdef NDEBUG
#define CADRE_DCHECK(condition) static_cast<void>(0)
#else
#define CADRE_DCHECK(condition) CADRE_ASSERT(condition)
#endif

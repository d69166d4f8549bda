// Integer arithmetic on numbers from outside: no silent overflow.
#pragma once

#include <cstdint>
#include <optional>

namespace cadre {

/// Empty on overflow.
inline std::optional<int64_t> checked_multiply(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_mul_overflow(a, b, &result)) return std::nullopt;
  return result;
}

/// Empty on overflow.
inline std::optional<int64_t> checked_add(int64_t a, int64_t b) {
  int64_t result;
  if (__builtin_add_overflow(a, b, &result)) return std::nullopt;
  return result;
}

}  // namespace cadre

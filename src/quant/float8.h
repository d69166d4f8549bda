// The small floats of quantised weights and their scales, bit by bit: the truth that tables and
// instructions of all devices are held to.
//   e4m3 (OCP FP8, "fn": no infinity, 0x7f and 0xff are NaN, largest 448)
//   e2m1 (OCP MX FP4: 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives)
//   e8m0 (OCP MX scale: byte b is 2^(b - 127), 255 is NaN)
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

namespace cadre {

inline constexpr float kMaxE4m3 = 448;
inline constexpr float kMaxE2m1 = 6;

/// Exact.
inline float e4m3_to_float(uint8_t code) {
  const uint32_t sign = uint32_t{code & 0x80u} << 24;
  const uint32_t magnitude = code & 0x7fu;
  if (magnitude == 0x7f) return std::numeric_limits<float>::quiet_NaN();
  // Bits of a float 2^120 times too small; the product is exact, subnormals included.
  return std::bit_cast<float>(sign | (magnitude << 20)) * 0x1p120f;
}

/// Nearest, ties to even; beyond the largest the largest (infinity too), NaN stays NaN.
inline uint8_t float_to_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
  const float magnitude = std::fabs(value);
  if (std::isnan(value)) return sign | 0x7f;
  if (magnitude >= kMaxE4m3) return sign | 0x7e;
  uint32_t code;
  if (magnitude < 0x1p-6f) {
    // Multiples of 2^-9: adding 2^14 leaves them in the last bits of the mantissa, rounded.
    code = std::bit_cast<uint32_t>(magnitude + 0x1p14f) - std::bit_cast<uint32_t>(0x1p14f);
  } else {
    const auto u = std::bit_cast<uint32_t>(magnitude);
    code = (u + 0x7ffffu + (u >> 20 & 1u) - (120u << 23)) >> 20;
  }
  return static_cast<uint8_t>(sign | code);
}

/// Of the low four bits. Exact.
inline float e2m1_to_float(uint8_t nibble) {
  constexpr std::array<float, 8> kValues = {0, 0.5f, 1, 1.5f, 2, 3, 4, 6};
  const float magnitude = kValues[nibble & 7u];
  return (nibble & 8u) != 0 ? -magnitude : magnitude;
}

/// Nearest, ties to even; beyond 6 it is 6, and NaN becomes 0x7 (there is no NaN).
inline uint8_t float_to_e2m1(float value) {
  // How many middles between neighbours lie below it; a tie counts where the code above is even.
  const float m = std::fabs(value);
  const int code = !(m <= 0.25f) + !(m < 0.75f) + !(m <= 1.25f) + !(m < 1.75f) + !(m <= 2.5f) +
                   !(m < 3.5f) + !(m <= 5);
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

// Exact; 0 is 2^-127, a float32 subnormal.
inline float e8m0_to_float(uint8_t code) {
  if (code == 255) return std::numeric_limits<float>::quiet_NaN();
  return code == 0 ? 0x1p-127f : std::bit_cast<float>(uint32_t{code} << 23);
}

}  // namespace cadre

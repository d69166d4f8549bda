// The two 16-bit floating-point types as storage: conversions only, arithmetic happens in float.
#pragma once

#include <bit>
#include <cstdint>

namespace cadre {

/// bfloat16: the upper half of an IEEE float32.
struct BFloat16 {
  uint16_t bits = 0;

  BFloat16() = default;
  /// Rounds to nearest, ties to even; NaN stays NaN, overflow becomes infinity.
  explicit BFloat16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    if ((u & 0x7fffffffu) > 0x7f800000u) {
      bits = static_cast<uint16_t>((u >> 16) |
                                   0x0040u);  // keep it a NaN when the payload sits in the low half
    } else {
      bits = static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
    }
  }
  explicit operator float() const {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
};

/// IEEE binary16.
struct Float16 {
  uint16_t bits = 0;

  Float16() = default;
  /// Rounds to nearest, ties to even, subnormals included; overflow becomes infinity, NaN stays
  /// NaN.
  explicit Float16(float value) {
    const uint32_t u = std::bit_cast<uint32_t>(value);
    const uint32_t sign = (u >> 16) & 0x8000u;
    const uint32_t magnitude = u & 0x7fffffffu;
    uint32_t result;
    if (magnitude > 0x7f800000u) {
      result =
          0x7e00u | ((magnitude >> 13) & 0x1ffu);  // the payload's upper part, as F16C keeps it
    } else if (magnitude >= 0x477ff000u) {         // 65520 and above round to infinity
      result = 0x7c00u;
    } else if (magnitude < 0x38800000u) {  // below 2^-14: a subnormal, in units of 2^-24
      // Adding 0.5 aligns the value so that the float adder itself rounds to units of 2^-24.
      const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
      result = std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0.5f);
    } else {
      const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
      result = (rounded - 0x38000000u) >> 13;
    }
    bits = static_cast<uint16_t>(sign | result);
  }
  explicit operator float() const {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1fu;
    const uint32_t mantissa = bits & 0x3ffu;
    if (exponent == 0) {  // zero and subnormals: mantissa units of 2^-24
      const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
      return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
    }
    const uint32_t wide = exponent == 0x1fu ? 0x7f800000u : (exponent + 112u) << 23;
    return std::bit_cast<float>(sign | wide | (mantissa << 13));
  }
};

static_assert(sizeof(BFloat16) == 2 && sizeof(Float16) == 2);

}  // namespace cadre

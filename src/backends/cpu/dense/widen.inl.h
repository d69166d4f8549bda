// Sixteen-bit floats to float in branch-free loops that vectorise for whatever instruction set the
// caller is compiled for. Sources may be unaligned.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace cadre::cpu {

inline __attribute__((always_inline)) void widen_bfloat16(const void* source, int64_t count,
                                                          float* out) {
  const auto* bytes = static_cast<const std::byte*>(source);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, 2);
    out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  }
}

// The half's exponent is rebased by a multiplication that is exact for subnormals too; infinities
// and NaNs are patched by a select.
inline __attribute__((always_inline)) void widen_float16(const void* source, int64_t count,
                                                         float* out) {
  const auto* bytes = static_cast<const std::byte*>(source);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, 2);
    const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
    const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
    const uint32_t value = magnitude >= 0x0f800000u ? magnitude | 0x7f800000u : finite;
    out[i] = std::bit_cast<float>(value | (static_cast<uint32_t>(bits & 0x8000u) << 16));
  }
}

}  // namespace cadre::cpu

// Scalar reads of kernel element types, for the few values (biases, routing weights) that need no
// vectors.
#pragma once

#include <cstdint>
#include <cstring>

#include "backends/cpu/kernels/kernel_table.h"
#include "cadre/float16.h"

namespace cadre::cpu {

/// Two e2m1 make a byte: whoever reads them counts bytes.
constexpr int64_t bytes_of(Element type) {
  return type == Element::kF32 ? 4 : is_code(type) ? 1 : 2;
}

/// Any alignment.
inline float read_float(const void* at, Element type) {
  if (type == Element::kF32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, at, sizeof(bits));
  if (type == Element::kBF16) {
    BFloat16 value;
    value.bits = bits;
    return static_cast<float>(value);
  }
  Float16 value;
  value.bits = bits;
  return static_cast<float>(value);
}

/// out[i] = element first + i of a strided vector.
inline void read_floats(const void* data, int64_t stride, Element type, int64_t first, int count,
                        float* out) {
  const char* at = static_cast<const char*>(data) + first * stride * bytes_of(type);
  for (int i = 0; i < count; ++i) out[i] = read_float(at + i * stride * bytes_of(type), type);
}

}  // namespace cadre::cpu

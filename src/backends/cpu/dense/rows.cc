#include "backends/cpu/dense/rows.h"

#include <bit>
#include <cstring>

#include "cadre/float16.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

// Below this many operations a fork and join costs more than it saves.
constexpr int64_t kMinParallelCost = 32 * 1024;

// Branch-free, so that the loop vectorises: the half's exponent is rebased by a multiplication that
// is exact for subnormals too; infinities and NaNs are patched by a select.
float half_to_float(uint16_t bits) {
  const uint32_t magnitude = static_cast<uint32_t>(bits & 0x7fffu) << 13;
  const float scaled = std::bit_cast<float>(magnitude) * 0x1p112f;
  const uint32_t finite = std::bit_cast<uint32_t>(scaled);
  const uint32_t special = magnitude | 0x7f800000u;
  const uint32_t value = magnitude >= 0x0f800000u ? special : finite;
  return std::bit_cast<float>(value | (static_cast<uint32_t>(bits & 0x8000u) << 16));
}

}  // namespace

void load_floats(const void* source, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  const auto* bytes = static_cast<const std::byte*>(source);
  if (dtype == DType::kBF16) {
    for (int64_t i = 0; i < count; ++i) {
      uint16_t bits;
      std::memcpy(&bits, bytes + 2 * i, 2);
      out[i] = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
    }
    return;
  }
  CADRE_ASSERT(dtype == DType::kF16);
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, 2);
    out[i] = half_to_float(bits);
  }
}

void store_floats(const float* source, int64_t count, DType dtype, void* out) {
  if (dtype == DType::kF32) {
    std::memmove(out, source, static_cast<size_t>(count) * sizeof(float));
  } else if (dtype == DType::kBF16) {
    auto* values = static_cast<BFloat16*>(out);
    for (int64_t i = 0; i < count; ++i) values[i] = BFloat16(source[i]);
  } else {
    CADRE_ASSERT(dtype == DType::kF16);
    auto* values = static_cast<Float16*>(out);
    for (int64_t i = 0; i < count; ++i) values[i] = Float16(source[i]);
  }
}

void for_row_ranges(const Stream& stream, int64_t rows, int64_t row_cost,
                    FunctionRef<void(int64_t begin, int64_t end, int thread)> fn) {
  if (rows == 0) return;
  if (rows == 1 || rows * row_cost < kMinParallelCost) return fn(0, rows, 0);
  stream.threads->parallel_ranges(rows, 1, fn);
}

}  // namespace cadre::cpu

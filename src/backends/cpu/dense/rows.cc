#include "backends/cpu/dense/rows.h"

#include <cstring>

#include "backends/cpu/dense/widen.inl.h"
#include "cadre/float16.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

// Below this many operations a fork and join costs more than it saves.
constexpr int64_t kMinParallelCost = 32 * 1024;

}  // namespace

void load_floats(const void* source, DType dtype, int64_t count, float* out) {
  if (dtype == DType::kF32) {
    std::memcpy(out, source, static_cast<size_t>(count) * sizeof(float));
    return;
  }
  if (dtype == DType::kBF16) return widen_bfloat16(source, count, out);
  CADRE_ASSERT(dtype == DType::kF16);
  widen_float16(source, count, out);
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

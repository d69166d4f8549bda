#include "backends/cuda/device/convert.h"

#include <cstring>

#include "cadre/float16.h"
#include "core/check.h"

namespace cadre::cuda {
namespace {

// Through memcpy: a tensor in a file may begin at any byte. Compilers make plain loads of it.
template <typename From, typename To>
void convert_all(const char* from, char* to, int64_t count) {
  for (int64_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * static_cast<int64_t>(sizeof(From)), sizeof(From));
    const To result(static_cast<float>(value));
    std::memcpy(to + i * static_cast<int64_t>(sizeof(To)), &result, sizeof(To));
  }
}

using Function = void (*)(const char*, char*, int64_t);

template <typename From>
Function from(DType to) {
  if (to == DType::kBF16) return convert_all<From, BFloat16>;
  if (to == DType::kF16) return convert_all<From, Float16>;
  return convert_all<From, float>;
}

Function find(DType from_dtype, DType to) {
  if (from_dtype == DType::kBF16) return from<BFloat16>(to);
  if (from_dtype == DType::kF16) return from<Float16>(to);
  return from<float>(to);
}

}  // namespace

bool can_convert(DType from, DType to) {
  return from == to || (is_compute_dtype(from) && is_compute_dtype(to));
}

void convert(const void* from, DType from_dtype, void* to, DType to_dtype, int64_t count) {
  CADRE_ASSERT(can_convert(from_dtype, to_dtype));
  if (from_dtype == to_dtype) {
    std::memcpy(to, from, static_cast<size_t>(count) * size_of(to_dtype));
  } else {
    find(from_dtype, to_dtype)(static_cast<const char*>(from), static_cast<char*>(to), count);
  }
}

}  // namespace cadre::cuda

#include "backends/cuda/device/convert.h"

#include <cstring>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

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

// The two conversions that most checkpoints need, with wider registers where the processor has
// them: the same bits, but as fast as memory.
#if defined(__x86_64__)

bool has_wide_registers() {
  static const bool kHas = __builtin_cpu_supports("avx2") != 0;  // F16C came before AVX2
  return kHas;
}

// Eight floats at a time, the rest as everywhere.
#define CADRE_WIDE __attribute__((target("avx2,f16c")))

CADRE_WIDE void float_to_bf16(const char* from, char* to, int64_t count) {
  const __m256i half = _mm256_set1_epi32(0x7fff);
  const __m256i one = _mm256_set1_epi32(1);
  const __m256i infinity = _mm256_set1_epi32(0x7f800000);
  const __m256i no_sign = _mm256_set1_epi32(0x7fffffff);
  const __m256i quiet = _mm256_set1_epi32(0x0040);
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256i u = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 4));
    const __m256i upper = _mm256_srli_epi32(u, 16);
    const __m256i even = _mm256_add_epi32(half, _mm256_and_si256(upper, one));
    const __m256i rounded = _mm256_srli_epi32(_mm256_add_epi32(u, even), 16);
    const __m256i is_nan = _mm256_cmpgt_epi32(_mm256_and_si256(u, no_sign), infinity);
    const __m256i bits = _mm256_blendv_epi8(rounded, _mm256_or_si256(upper, quiet), is_nan);
    const __m128i packed =
        _mm_packus_epi32(_mm256_castsi256_si128(bits), _mm256_extracti128_si256(bits, 1));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * 2), packed);
  }
  convert_all<float, BFloat16>(from + i * 4, to + i * 2, count - i);
}

CADRE_WIDE void float_to_f16(const char* from, char* to, int64_t count) {
  int64_t i = 0;
  for (; i + 8 <= count; i += 8) {
    const __m256 values =
        _mm256_castsi256_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from + i * 4)));
    const __m128i bits = _mm256_cvtps_ph(values, _MM_FROUND_TO_NEAREST_INT);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i * 2), bits);
  }
  convert_all<float, Float16>(from + i * 4, to + i * 2, count - i);
}

Function find_wide(DType from, DType to) {
  if (from != DType::kF32 || !has_wide_registers()) return nullptr;
  return to == DType::kBF16 ? float_to_bf16 : to == DType::kF16 ? float_to_f16 : nullptr;
}

#else

Function find_wide(DType, DType) { return nullptr; }

#endif

template <typename From>
Function from(DType to) {
  if (to == DType::kBF16) return convert_all<From, BFloat16>;
  if (to == DType::kF16) return convert_all<From, Float16>;
  return convert_all<From, float>;
}

Function find(DType from_dtype, DType to) {
  if (const Function wide = find_wide(from_dtype, to)) return wide;
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

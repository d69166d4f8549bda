// The vector of one instruction set: kLanes floats and the operations the kernels need. Included by
// the isa_*.cc files only, after they define CADRE_LANES; everything has internal linkage.
#include <stdint.h>
#if CADRE_LANES > 4
#include <immintrin.h>
#endif

#include "backends/cpu/kernels/kernel_table.h"

namespace cadre::cpu {
namespace {

constexpr int kLanes = CADRE_LANES;
typedef float Floats __attribute__((vector_size(kLanes * 4)));
typedef int32_t Ints __attribute__((vector_size(kLanes * 4)));
typedef uint32_t Words __attribute__((vector_size(kLanes * 4)));
typedef uint16_t Halfs __attribute__((vector_size(kLanes * 2)));
typedef uint8_t Bytes __attribute__((vector_size(kLanes)));

template <typename V>
inline V load(const void* from) {
  V v;
  __builtin_memcpy(&v, from, sizeof(V));
  return v;
}

template <typename V>
inline void store(void* to, V v) {
  __builtin_memcpy(to, &v, sizeof(V));
}

// x - 0 is x for every x, -0 included, so compilers make a plain broadcast of it.
inline Floats broadcast(float x) { return x - Floats{}; }
inline Words broadcast_word(uint32_t x) { return Words{} + x; }

// When either is NaN the result is b, as minps does; so min(limit, x) keeps a NaN x.
inline Floats min(Floats a, Floats b) { return a < b ? a : b; }
inline Floats max(Floats a, Floats b) { return a > b ? a : b; }

// a * b + c, rounded once where the instruction set can.
inline Floats multiply_add(Floats a, Floats b, Floats c) {
#if CADRE_LANES == 16
  return _mm512_fmadd_ps(a, b, c);
#elif CADRE_LANES == 8
  return _mm256_fmadd_ps(a, b, c);
#else
  return a * b + c;
#endif
}

inline Words widen_halfs(Halfs h) { return __builtin_convertvector(h, Words); }
inline Halfs narrow_words(Words w) { return __builtin_convertvector(w, Halfs); }

inline Words select(Ints mask, Words a, Words b) { return ((Words)mask & a) | (~(Words)mask & b); }

// The float whose bfloat16 bits are the low (high) half of each word.
inline Floats bf16_low(Words w) { return (Floats)(w << 16); }
inline Floats bf16_high(Words w) { return (Floats)(w & 0xffff0000u); }

// Rounded to bfloat16, ties to even; the result's low 16 bits are zero.
inline Words round_bf16(Floats x) {
  const Words u = (Words)x;
  const Words rounded = u + 0x7fffu + ((u >> 16) & 1u);
  return select((u & 0x7fffffffu) > 0x7f800000u, u | 0x00400000u, rounded) & 0xffff0000u;
}

// binary16 in the low half of each word -> float.
inline Floats f16_to_float(Words h) {
#if CADRE_LANES == 16
  return _mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)h));
#elif CADRE_LANES == 8
  return _mm256_cvtph_ps((__m128i)narrow_words(h));
#else
  const Words magnitude = h & 0x7fffu;
  const Words sign = (h & 0x8000u) << 16;
  const Floats finite = (Floats)(magnitude << 13) * 0x1p112f;  // exact, subnormals included
  const Words special = (magnitude << 13) | 0x7f800000u;
  return (Floats)(select(magnitude >= 0x7c00u, special, (Words)finite) | sign);
#endif
}

// float -> binary16 in the low half of each word, ties to even.
inline Words float_to_f16(Floats x) {
#if CADRE_LANES == 16
  return (Words)_mm512_cvtepu16_epi32(_mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#elif CADRE_LANES == 8
  return widen_halfs((Halfs)_mm256_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT));
#else
  // The algorithm of cadre::Float16, lane by lane.
  const Words u = (Words)x;
  const Words magnitude = u & 0x7fffffffu;
  const Floats shifted = (Floats)magnitude + 0.5f;
  const Words subnormal = (Words)shifted - 0x3f000000u;
  const Words normal = (magnitude + 0xfffu + ((magnitude >> 13) & 1u) - 0x38000000u) >> 13;
  Words result = select(magnitude < 0x38800000u, subnormal, normal);
  result = select(magnitude >= 0x477ff000u, broadcast_word(0x7c00u), result);
  result = select(magnitude > 0x7f800000u, broadcast_word(0x7e00u), result);
  return result | ((u >> 16) & 0x8000u);
#endif
}

template <Element kType>
inline Floats round_to(Floats x) {
  if constexpr (kType == Element::kBF16) return (Floats)round_bf16(x);
  if constexpr (kType == Element::kF16) return f16_to_float(float_to_f16(x));
  return x;
}

// kLanes consecutive elements.
template <Element kType>
inline Floats load_as_float(const void* from) {
  if constexpr (kType == Element::kF32) return load<Floats>(from);
  const Words words = widen_halfs(load<Halfs>(from));
  if constexpr (kType == Element::kBF16) return bf16_low(words);
  return f16_to_float(words);
}

template <Element kType>
inline void store_rounded(void* to, Floats x) {
  if constexpr (kType == Element::kF32) store(to, x);
  if constexpr (kType == Element::kBF16) store(to, narrow_words(round_bf16(x) >> 16));
  if constexpr (kType == Element::kF16) store(to, narrow_words(float_to_f16(x)));
}

constexpr int size_of(Element type) { return type == Element::kF32 ? 4 : 2; }

// The first `count` lanes only.
template <Element kType>
inline void store_rounded(void* to, Floats x, int count) {
  if (count >= kLanes) return store_rounded<kType>(to, x);
  unsigned char bytes[kLanes * 4];
  store_rounded<kType>(bytes, x);
  __builtin_memcpy(to, bytes, static_cast<unsigned>(count * size_of(kType)));
}

inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// Calls f.template operator()<Element>() for the type.
template <typename F>
inline void with_type(Element type, F f) {
  if (type == Element::kF32) return f.template operator()<Element::kF32>();
  if (type == Element::kF16) return f.template operator()<Element::kF16>();
  f.template operator()<Element::kBF16>();
}

}  // namespace
}  // namespace cadre::cpu

// Each function names its instructions itself (target attributes) and calls nothing that another
// part of the program could share, so one translation unit serves all instruction sets.
#include "backends/cpu/kernels/peak.h"

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace cadre::cpu {
namespace {

// Enough chains to cover the latency of a product (4 to 8 cycles, 2 in a cycle), few enough for the
// registers.
constexpr int kWideChains = 16;
constexpr int kNarrowChains = 12;
constexpr int kSteps = 8192;

volatile float one = 1.0f;  // the compiler must not know the operands

double sum_of(const float* values, int count) {
  double sum = 0;
  for (int i = 0; i < count; ++i) sum += static_cast<double>(values[i]);
  return sum;
}

double portable_products() {
  typedef float Floats __attribute__((vector_size(16)));
  const float x = one;
  const Floats factor = {x, x, x, x};
  Floats sums[kNarrowChains] = {};
  for (int i = 0; i < kSteps; ++i) {
    // The sum is a factor as well: a product of constants would be taken out of the loop.
#pragma GCC unroll 12
    for (Floats& sum : sums) sum = sum * factor + factor;
  }
  double total = 0;
  for (const Floats& sum : sums) {
    for (int lane = 0; lane < 4; ++lane) total += static_cast<double>(sum[lane]);
  }
  return total;
}

#if defined(__x86_64__)

// A function for one instruction set. Written by a macro, since a template would be compiled
// without these instructions.
#define CADRE_PRODUCTS(name, isa, Vector, chains, operand, zero, product, store) \
  __attribute__((target(isa))) double name() {                                   \
    constexpr int kLanes = sizeof(Vector) / sizeof(float);                       \
    const auto factor = operand;                                                 \
    Vector sums[chains];                                                         \
    for (Vector & sum : sums) sum = zero;                                        \
    for (int i = 0; i < kSteps; ++i) {                                           \
      _Pragma("GCC unroll 16") for (Vector & sum : sums) sum = product;          \
    }                                                                            \
    float lanes[chains * kLanes];                                                \
    for (int c = 0; c < chains; ++c) store(lanes + c * kLanes, sums[c]);         \
    return sum_of(lanes, chains * kLanes);                                       \
  }

CADRE_PRODUCTS(avx2_products, "avx2,fma", __m256, kNarrowChains, _mm256_set1_ps(one),
               _mm256_setzero_ps(), _mm256_fmadd_ps(factor, factor, sum), _mm256_storeu_ps)
CADRE_PRODUCTS(avx512_products, "avx512f", __m512, kWideChains, _mm512_set1_ps(one),
               _mm512_setzero_ps(), _mm512_fmadd_ps(factor, factor, sum), _mm512_storeu_ps)
CADRE_PRODUCTS(avx512_bf16_products, "avx512f,avx512bw,avx512vl,avx512bf16", __m512, kWideChains,
               _mm512_cvtne2ps_pbh(_mm512_set1_ps(one), _mm512_set1_ps(one)), _mm512_setzero_ps(),
               _mm512_dpbf16_ps(sum, factor, factor), _mm512_storeu_ps)

struct alignas(64) TileConfig {
  uint8_t palette = 1;
  uint8_t start_row = 0;
  uint8_t reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};  // the other eight do not exist
};

// Six sums and two operands: a product takes 16 cycles to issue and 52 to finish.
__attribute__((target("amx-tile,amx-bf16"))) double amx_products() {
  constexpr int kTileSteps = 512;
  const TileConfig config;
  alignas(64) uint16_t ones[16 * 32];
  alignas(64) float sums[16 * 16];
  const uint16_t bits = one == 1.0f ? 0x3f80 : 0;  // 1 as bfloat16
  for (uint16_t& value : ones) value = bits;
  // Tile instructions are opaque to GCC: it must believe that they read what was stored.
  asm volatile("" : : "r"(&config), "r"(ones) : "memory");
  _tile_loadconfig(&config);
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_loadd(6, ones, 64);
  _tile_loadd(7, ones, 64);
  for (int i = 0; i < kTileSteps; ++i) {
    _tile_dpbf16ps(0, 6, 7);
    _tile_dpbf16ps(1, 6, 7);
    _tile_dpbf16ps(2, 6, 7);
    _tile_dpbf16ps(3, 6, 7);
    _tile_dpbf16ps(4, 6, 7);
    _tile_dpbf16ps(5, 6, 7);
  }
  _tile_stored(5, sums, 64);
  _tile_release();
  asm volatile("" : : "r"(sums) : "memory");
  return 6 * sum_of(sums, 16 * 16);
}

#endif

}  // namespace

PeakLoop peak_loop(Isa isa, DType compute_dtype) {
  const bool bf16 = element_of(compute_dtype) == Element::kBF16;
#if defined(__x86_64__)
  if (isa == Isa::kAmx && bf16) return amx_products;
  if (isa == Isa::kAvx512Bf16 && bf16) return avx512_bf16_products;
  if (isa >= Isa::kAvx512) return avx512_products;
  if (isa == Isa::kAvx2) return avx2_products;
#else
  static_cast<void>(isa);
  static_cast<void>(bf16);
#endif
  return portable_products;
}

}  // namespace cadre::cpu

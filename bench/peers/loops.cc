#include "loops.h"

#include <bit>
#include <cmath>
#include <cstring>

namespace cadre::peers {

namespace {

constexpr int64_t kRowsWorthThreads = 16;  // below, starting the threads costs more than it saves

/// To nearest, ties to even; without the check for NaN that BFloat16 makes.
uint16_t round_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16);
}

}  // namespace

void gather_rows(const BFloat16* from, int64_t width, const int64_t* rows, int64_t num_rows,
                 BFloat16* to) {
#pragma omp parallel for if (num_rows >= kRowsWorthThreads)
  for (int64_t i = 0; i < num_rows; ++i) {
    std::memcpy(to + i * width, from + rows[i] * width,
                static_cast<size_t>(width) * sizeof(BFloat16));
  }
}

void silu_mul(const float* gate_up, int64_t num_rows, int64_t width, BFloat16* h) {
#pragma omp parallel for if (num_rows >= kRowsWorthThreads)
  for (int64_t i = 0; i < num_rows; ++i) {
    const float* gate = gate_up + i * 2 * width;
    const float* up = gate + width;
    BFloat16* out = h + i * width;
#pragma omp simd
    for (int64_t j = 0; j < width; ++j) {
      out[j].bits = round_bits(gate[j] / (1 + std::exp(-gate[j])) * up[j]);
    }
  }
}

void weighted_sum(const float* rows, const int64_t* positions, const float* weights,
                  int64_t num_tokens, int64_t top_k, int64_t width, BFloat16* out) {
  constexpr int64_t kBlock = 512;  // columns of a sum, in the L1 cache
#pragma omp parallel for if (num_tokens >= kRowsWorthThreads)
  for (int64_t t = 0; t < num_tokens; ++t) {
    for (int64_t begin = 0; begin < width; begin += kBlock) {
      const int64_t count = width - begin < kBlock ? width - begin : kBlock;
      float sum[kBlock] = {};
      for (int64_t s = t * top_k; s < (t + 1) * top_k; ++s) {
        const float* row = rows + positions[s] * width + begin;
        const float weight = weights[s];
#pragma omp simd
        for (int64_t j = 0; j < count; ++j) sum[j] += weight * row[j];
      }
#pragma omp simd
      for (int64_t j = 0; j < count; ++j) out[t * width + begin + j].bits = round_bits(sum[j]);
    }
  }
}

uint64_t read_memory(const void* memory, int64_t num_bytes) {
  const auto* words = static_cast<const uint64_t*>(memory);
  uint64_t sum = 0;
#pragma omp parallel for simd reduction(+ : sum)
  for (int64_t i = 0; i < num_bytes / 8; ++i) sum += words[i];
  return sum;
}

}  // namespace cadre::peers

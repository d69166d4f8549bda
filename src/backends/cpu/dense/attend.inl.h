// The body of attention's inner step, for vectors of W floats: each instruction set compiles it
// with its own width (attend.cc).
#pragma once

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

#include "backends/cpu/dense/attend.h"

namespace cadre::cpu {

#define CADRE_INLINE inline __attribute__((always_inline))

// The compiler's vector types; 4, 8 and 16 lanes.
template <int W>
struct Vector;
template <>
struct Vector<4> {
  using Type = float __attribute__((vector_size(16)));
};
template <>
struct Vector<8> {
  using Type = float __attribute__((vector_size(32)));
};
template <>
struct Vector<16> {
  using Type = float __attribute__((vector_size(64)));
};
template <int W>
using Lanes = typename Vector<W>::Type;

// v[i] becomes v[2i] and v[2i + 1] side by side, each with the halves of its groups of lanes added:
// after log2(W) such steps, lane i of v[0] is the sum of the lanes of what v[i] was. Every vector
// goes through the same tree, so a sum does not depend on its place.
#define CADRE_FOLD(count, low, high)                         \
  for (int i = 0; i < (count); ++i) {                        \
    const auto a = v[2 * i];                                 \
    const auto b = v[2 * i + 1];                             \
    v[i] = __builtin_shufflevector(a, b, CADRE_UNPACK low) + \
           __builtin_shufflevector(a, b, CADRE_UNPACK high); \
  }
#define CADRE_UNPACK(...) __VA_ARGS__

CADRE_INLINE void sum_each(Lanes<4> (&v)[4]){CADRE_FOLD(2, (0, 1, 4, 5), (2, 3, 6, 7))
                                                 CADRE_FOLD(1, (0, 2, 4, 6), (1, 3, 5, 7))}

CADRE_INLINE void sum_each(Lanes<8> (&v)[8]){
    CADRE_FOLD(4, (0, 1, 2, 3, 8, 9, 10, 11), (4, 5, 6, 7, 12, 13, 14, 15))
        CADRE_FOLD(2, (0, 1, 4, 5, 8, 9, 12, 13), (2, 3, 6, 7, 10, 11, 14, 15))
            CADRE_FOLD(1, (0, 2, 4, 6, 8, 10, 12, 14), (1, 3, 5, 7, 9, 11, 13, 15))}

CADRE_INLINE void sum_each(Lanes<16> (&v)[16]) {
  CADRE_FOLD(8, (0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
             (8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
  CADRE_FOLD(4, (0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
             (4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
  CADRE_FOLD(2, (0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
             (2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
  CADRE_FOLD(1, (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
             (1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))
}

// Scores of W keys; keys beyond `count` repeat the last one, the caller overwrites them.
template <int W>
CADRE_INLINE void score_group(const AttendArgs& args, int64_t first, float* scores) {
  const int64_t dim = args.head_dim;
  const float* rows[W];
  for (int i = 0; i < W; ++i) rows[i] = args.keys + std::min(first + i, args.count - 1) * dim;
  Lanes<W> sums[W] = {};
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    Lanes<W> query;
    std::memcpy(&query, args.query + d, sizeof(query));
#pragma GCC unroll 16
    for (int i = 0; i < W; ++i) {
      Lanes<W> key;
      std::memcpy(&key, rows[i] + d, sizeof(key));
      sums[i] += query * key;
    }
  }
  if (d < dim) {
    const size_t bytes = static_cast<size_t>(dim - d) * sizeof(float);
    Lanes<W> query = {};
    std::memcpy(&query, args.query + d, bytes);
    for (int i = 0; i < W; ++i) {
      Lanes<W> key = {};
      std::memcpy(&key, rows[i] + d, bytes);
      sums[i] += query * key;
    }
  }
  sum_each(sums);
  std::memcpy(scores, &sums[0], sizeof(sums[0]));
}

// exp(x) for x <= 0 within 2 ulp, 0 below -87, NaN for NaN: 2^n * p(r) with the polynomial of
// degree 6 on |r| <= ln(2) / 2. Vectorises, unlike the library's.
CADRE_INLINE float exp_of_nonpositive(float x) {
  constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer
  const float clamped = x < -87.0f ? -87.0f : x;
  const float shifted = clamped * 1.44269504f + kRound;
  const float n = shifted - kRound;
  const float r = (clamped - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.0f / 720.0f;
  p = p * r + 1.0f / 120.0f;
  p = p * r + 1.0f / 24.0f;
  p = p * r + 1.0f / 6.0f;
  p = p * r + 0.5f;
  p = p * r + 1.0f;
  p = p * r + 1.0f;
  const uint32_t power = (std::bit_cast<uint32_t>(shifted) + 127u) << 23;
  return x < -87.0f ? 0.0f : p * std::bit_cast<float>(power);
}

// accumulator = accumulator * factor + sum_j weights[j] * values[j], j ascending.
template <int W>
CADRE_INLINE void accumulate(const AttendArgs& args, const float* weights, float factor) {
  const int64_t dim = args.head_dim;
  constexpr int kWide = 4;  // independent sums, to hide the latency of an addition
  int64_t d = 0;
  for (; d + kWide * W <= dim; d += kWide * W) {
    Lanes<W> sums[kWide];
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) {
      std::memcpy(&sums[i], args.accumulator + d + i * W, sizeof(sums[i]));
      sums[i] *= factor;
    }
    for (int64_t j = 0; j < args.count; ++j) {
      const float* row = args.values + j * dim + d;
#pragma GCC unroll 4
      for (int i = 0; i < kWide; ++i) {
        Lanes<W> value;
        std::memcpy(&value, row + i * W, sizeof(value));
        sums[i] += value * weights[j];
      }
    }
#pragma GCC unroll 4
    for (int i = 0; i < kWide; ++i) {
      std::memcpy(args.accumulator + d + i * W, &sums[i], sizeof(sums[i]));
    }
  }
  for (; d < dim; ++d) {
    float sum = args.accumulator[d] * factor;
    for (int64_t j = 0; j < args.count; ++j) sum += args.values[j * dim + d] * weights[j];
    args.accumulator[d] = sum;
  }
}

template <int W>
CADRE_INLINE void attend_body(const AttendArgs& args) {
  constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
  alignas(64) float weights[kKeyBlock];
  for (int64_t first = 0; first < args.count; first += W) {
    score_group<W>(args, first, weights + first);
  }
  std::fill(weights + args.count, weights + kKeyBlock, kNegativeInfinity);

  float maxima[W];
  std::fill_n(maxima, W, args.state->max);
  for (int64_t j = 0; j < kKeyBlock; j += W) {
    for (int lane = 0; lane < W; ++lane) {
      maxima[lane] = weights[j + lane] > maxima[lane] ? weights[j + lane] : maxima[lane];
    }
  }
  float max = maxima[0];
  for (const float candidate : maxima) max = candidate > max ? candidate : max;
  // With nothing above minus infinity yet, 0 keeps exp(-inf - max) at 0; a NaN score stays NaN.
  const float reference = max == kNegativeInfinity ? 0.0f : max;
  for (float& weight : weights) weight = exp_of_nonpositive(weight - reference);
  float sums[W] = {};
  for (int64_t j = 0; j < kKeyBlock; j += W) {
    for (int lane = 0; lane < W; ++lane) sums[lane] += weights[j + lane];
  }
  float sum = 0;
  for (const float lane : sums) sum += lane;
  const float factor = exp_of_nonpositive(args.state->max - reference);
  args.state->sum = args.state->sum * factor + sum;
  args.state->max = max;
  accumulate<W>(args, weights, factor);
}

}  // namespace cadre::cpu

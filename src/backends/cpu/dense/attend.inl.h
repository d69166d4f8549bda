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

// Queries that share what is loaded of keys and values: as many as the registers hold.
inline constexpr int kQueryTile = 4;

template <int W>
CADRE_INLINE void load_lanes(const float* from, Lanes<W>& lanes) {
  std::memcpy(&lanes, from, sizeof(lanes));
}

// sums[q][i] = products of query q and key i, lane by lane.
template <int W, int kQueries, int kKeys>
CADRE_INLINE void multiply_keys(const float* queries, const float* const* keys, int64_t dim,
                                Lanes<W> (&sums)[kQueries][kKeys]) {
#pragma GCC unroll 16
  for (int i = 0; i < kKeys; ++i) {
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) sums[q][i] = Lanes<W>{};
  }
  int64_t d = 0;
  for (; d + W <= dim; d += W) {
    Lanes<W> query[kQueries];
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) load_lanes<W>(queries + q * dim + d, query[q]);
#pragma GCC unroll 16
    for (int i = 0; i < kKeys; ++i) {
      Lanes<W> key;
      load_lanes<W>(keys[i] + d, key);
#pragma GCC unroll 4
      for (int q = 0; q < kQueries; ++q) sums[q][i] += query[q] * key;
    }
  }
  if (d == dim) return;
  const size_t bytes = static_cast<size_t>(dim - d) * sizeof(float);
  for (int q = 0; q < kQueries; ++q) {
    Lanes<W> query = {};
    std::memcpy(&query, queries + q * dim + d, bytes);
    for (int i = 0; i < kKeys; ++i) {
      Lanes<W> key = {};
      std::memcpy(&key, keys[i] + d, bytes);
      sums[q][i] += query * key;
    }
  }
}

// Scores of W keys for each query, [kQueries][kKeyBlock]; keys beyond `count` repeat the last one,
// the caller overwrites them.
template <int W, int kQueries>
CADRE_INLINE void score_group(const AttendArgs& args, const float* queries, int64_t first,
                              float* scores) {
  constexpr int kKeys = W / kQueries;  // at a time
  const float* keys[W];
  for (int i = 0; i < W; ++i) {
    keys[i] = args.keys + std::min(first + i, args.count - 1) * args.head_dim;
  }
  Lanes<W> sums[kQueries][W];
  for (int i = 0; i < W; i += kKeys) {
    Lanes<W> some[kQueries][kKeys];
    multiply_keys<W, kQueries, kKeys>(queries, keys + i, args.head_dim, some);
    for (int q = 0; q < kQueries; ++q) std::memcpy(&sums[q][i], some[q], sizeof(some[q]));
  }
  for (int q = 0; q < kQueries; ++q) {
    sum_each(sums[q]);
    std::memcpy(scores + q * kKeyBlock, &sums[q][0], sizeof(sums[q][0]));
  }
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

// kCount vectors from d on of each query's accumulator, see accumulate().
template <int W, int kQueries, int kCount>
CADRE_INLINE void accumulate_part(const AttendArgs& args, float* accumulators, const float* weights,
                                  const float* factors, int64_t d) {
  const int64_t dim = args.value_dim;
  Lanes<W> sums[kQueries][kCount];
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      load_lanes<W>(accumulators + q * dim + d + i * W, sums[q][i]);
      sums[q][i] *= factors[q];
    }
  }
  for (int64_t j = 0; j < args.count; ++j) {
    Lanes<W> values[kCount];
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i)
      load_lanes<W>(args.values + j * args.value_stride + d + i * W, values[i]);
#pragma GCC unroll 4
    for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
      for (int i = 0; i < kCount; ++i) sums[q][i] += values[i] * weights[q * kKeyBlock + j];
    }
  }
#pragma GCC unroll 4
  for (int q = 0; q < kQueries; ++q) {
#pragma GCC unroll 4
    for (int i = 0; i < kCount; ++i) {
      std::memcpy(accumulators + q * dim + d + i * W, &sums[q][i], sizeof(sums[q][i]));
    }
  }
}

// accumulator = accumulator * factor + sum_j weights[j] * values[j], j ascending, of each query.
template <int W, int kQueries>
CADRE_INLINE void accumulate(const AttendArgs& args, float* accumulators, const float* weights,
                             const float* factors) {
  const int64_t dim = args.value_dim;
  constexpr int kWide = 4;  // independent sums, to hide the latency of an addition
  constexpr int kAtOnce = W < 16 && kQueries > 1 ? 2 : kWide;  // what 16 registers hold
  int64_t d = 0;
  for (; d + kWide * W <= dim; d += kWide * W) {
    for (int i = 0; i < kWide; i += kAtOnce) {
      accumulate_part<W, kQueries, kAtOnce>(args, accumulators, weights, factors, d + i * W);
    }
  }
  for (; d < dim; ++d) {
    for (int q = 0; q < kQueries; ++q) {
      float& accumulator = accumulators[q * dim + d];
      float sum = accumulator * factors[q];
      for (int64_t j = 0; j < args.count; ++j) {
        sum += args.values[j * args.value_stride + d] * weights[q * kKeyBlock + j];
      }
      accumulator = sum;
    }
  }
}

// Turns the scores of a query into weights and brings its state up to date; returns the factor for
// what was accumulated before.
template <int W>
CADRE_INLINE float soften(SoftmaxState& state, int64_t count, float* weights) {
  constexpr float kNegativeInfinity = -std::numeric_limits<float>::infinity();
  std::fill(weights + count, weights + kKeyBlock, kNegativeInfinity);
  float maxima[W];
  std::fill_n(maxima, W, state.max);
  for (int64_t j = 0; j < kKeyBlock; j += W) {
    for (int lane = 0; lane < W; ++lane) {
      maxima[lane] = weights[j + lane] > maxima[lane] ? weights[j + lane] : maxima[lane];
    }
  }
  float max = maxima[0];
  for (const float candidate : maxima) max = candidate > max ? candidate : max;
  // With nothing above minus infinity yet, 0 keeps exp(-inf - max) at 0; a NaN score stays NaN.
  const float reference = max == kNegativeInfinity ? 0.0f : max;
  for (int64_t j = 0; j < kKeyBlock; ++j) weights[j] = exp_of_nonpositive(weights[j] - reference);
  float sums[W] = {};
  for (int64_t j = 0; j < kKeyBlock; j += W) {
    for (int lane = 0; lane < W; ++lane) sums[lane] += weights[j + lane];
  }
  float sum = 0;
  for (const float lane : sums) sum += lane;
  const float factor = exp_of_nonpositive(state.max - reference);
  state.sum = state.sum * factor + sum;
  state.max = max;
  return factor;
}

template <int W, int kQueries>
CADRE_INLINE void attend_queries(const AttendArgs& args, int64_t query) {
  const float* queries = args.queries + query * args.head_dim;
  alignas(64) float weights[kQueries * kKeyBlock];
  for (int64_t first = 0; first < args.count; first += W) {
    score_group<W, kQueries>(args, queries, first, weights + first);
  }
  float factors[kQueries];
  for (int q = 0; q < kQueries; ++q) {
    factors[q] = soften<W>(args.states[query + q], args.count, weights + q * kKeyBlock);
  }
  accumulate<W, kQueries>(args, args.accumulators + query * args.value_dim, weights, factors);
}

template <int W>
CADRE_INLINE void attend_body(const AttendArgs& args) {
  int64_t query = 0;
  for (; query + kQueryTile <= args.num_queries; query += kQueryTile) {
    attend_queries<W, kQueryTile>(args, query);
  }
  for (; query < args.num_queries; ++query) attend_queries<W, 1>(args, query);
}

template <int W>
CADRE_INLINE void score_body(const AttendArgs& args, float* scores) {
  int64_t query = 0;
  for (; query + kQueryTile <= args.num_queries; query += kQueryTile) {
    for (int64_t first = 0; first < args.count; first += W) {
      score_group<W, kQueryTile>(args, args.queries + query * args.head_dim, first,
                                 scores + query * kKeyBlock + first);
    }
  }
  for (; query < args.num_queries; ++query) {
    for (int64_t first = 0; first < args.count; first += W) {
      score_group<W, 1>(args, args.queries + query * args.head_dim, first,
                        scores + query * kKeyBlock + first);
    }
  }
}

}  // namespace cadre::cpu

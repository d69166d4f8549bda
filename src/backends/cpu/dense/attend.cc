// One body, compiled for several instruction sets; the choice falls at run time.
#include "backends/cpu/dense/attend.h"

#include <array>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace cadre::cpu {
namespace {

#define CADRE_INLINE inline __attribute__((always_inline))

using Lanes = float __attribute__((vector_size(64)));
constexpr int64_t kLanes = 16;

// Sixteen lanes by a fixed rule of index, then a fixed tree.
CADRE_INLINE float dot(const float* a, const float* b, int64_t count) {
  Lanes sums[2] = {};
  int64_t i = 0;
  for (; i + kLanes <= count; i += kLanes) {
    Lanes x;
    Lanes y;
    std::memcpy(&x, a + i, sizeof(x));
    std::memcpy(&y, b + i, sizeof(y));
    sums[(i / kLanes) & 1] += x * y;
  }
  const Lanes total = sums[0] + sums[1];
  std::array<float, kLanes> lanes;
  std::memcpy(lanes.data(), &total, sizeof(total));
  for (; i < count; ++i) lanes[static_cast<size_t>(i % kLanes)] += a[i] * b[i];
  for (size_t half = kLanes / 2; half > 0; half /= 2) {
    for (size_t lane = 0; lane < half; ++lane) lanes[lane] += lanes[lane + half];
  }
  return lanes[0];
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
CADRE_INLINE void accumulate(const AttendArgs& args, const float* weights, float factor) {
  const int64_t dim = args.head_dim;
  constexpr int64_t kWide = 4;  // independent sums, to hide the latency of an addition
  int64_t d = 0;
  for (; d + kWide * kLanes <= dim; d += kWide * kLanes) {
    Lanes sums[kWide];
    std::memcpy(sums, args.accumulator + d, sizeof(sums));
    for (auto& sum : sums) sum *= factor;
    for (int64_t j = 0; j < args.count; ++j) {
      Lanes row[kWide];
      std::memcpy(row, args.values + j * dim + d, sizeof(row));
      for (int64_t i = 0; i < kWide; ++i) sums[i] += row[i] * weights[j];
    }
    std::memcpy(args.accumulator + d, sums, sizeof(sums));
  }
  for (; d < dim; ++d) {
    float sum = args.accumulator[d] * factor;
    for (int64_t j = 0; j < args.count; ++j) sum += args.values[j * dim + d] * weights[j];
    args.accumulator[d] = sum;
  }
}

CADRE_INLINE void attend_body(const AttendArgs& args) {
  std::array<float, kKeyBlock> weights{};
  float max = args.state->max;
  for (int64_t j = 0; j < args.count; ++j) {
    const float score = dot(args.query, args.keys + j * args.head_dim, args.head_dim);
    weights[static_cast<size_t>(j)] = score;
    max = score > max ? score : max;
  }
  // With nothing above minus infinity yet, 0 keeps exp(-inf - max) at 0; a NaN score stays NaN.
  const float reference = max == -std::numeric_limits<float>::infinity() ? 0.0f : max;
  for (auto& weight : weights) weight = exp_of_nonpositive(weight - reference);
  float sum = 0;
  for (int64_t j = 0; j < args.count; ++j) sum += weights[static_cast<size_t>(j)];
  const float factor = exp_of_nonpositive(args.state->max - reference);
  args.state->sum = args.state->sum * factor + sum;
  args.state->max = max;
  accumulate(args, weights.data(), factor);
}

void attend_generic(const AttendArgs& args) { attend_body(args); }

#if defined(__x86_64__)
__attribute__((target("avx2,fma"))) void attend_avx2(const AttendArgs& args) { attend_body(args); }
__attribute__((target("avx512f,avx512dq,avx512bw,avx512vl,avx2,fma"))) void attend_avx512(
    const AttendArgs& args) {
  attend_body(args);
}
#endif

}  // namespace

std::span<const AttendFunction> attend_functions() {
#if defined(__x86_64__)
  static constexpr AttendFunction kAll[] = {attend_avx512, attend_avx2, attend_generic};
  static const size_t fastest = [] {
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512dq") &&
                        __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    const bool avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    return size_t{avx512 ? 0u : avx2 ? 1u : 2u};
  }();
  return std::span(kAll).subspan(fastest);
#else
  static constexpr AttendFunction kAll[] = {attend_generic};
  return kAll;
#endif
}

}  // namespace cadre::cpu

// Random values and a reference in double on the device, for hopper_bench.cu.
#pragma once

#include <cuda_bf16.h>

#include <cstdint>

namespace cadre::cuda {
namespace {

// Uniform, variance 1.
__device__ float random_value(uint64_t i, uint64_t seed) {
  uint64_t z = i * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return (static_cast<float>(z >> 40) / 16777216.0f - 0.5f) * 3.4641016f;
}

__global__ void fill_random(__nv_bfloat16* to, int64_t count, float scale, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    to[i] = __float2bfloat16(scale * random_value(static_cast<uint64_t>(i), seed));
  }
}

// A few pairs (token, expert) through the layer in double; a warp a value.
struct Truth {
  const __nv_bfloat16* x;
  const __nv_bfloat16* gate_up;
  const __nv_bfloat16* down;
  int64_t hidden, intermediate;
};

__device__ double dot(const __nv_bfloat16* w, const __nv_bfloat16* x, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    sum +=
        static_cast<double>(__bfloat162float(w[i])) * static_cast<double>(__bfloat162float(x[i]));
  }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}
__device__ double dot(const __nv_bfloat16* w, const double* x, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    sum += static_cast<double>(__bfloat162float(w[i])) * x[i];
  }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}

__global__ void truth_h(Truth t, const int64_t* tokens, const int64_t* experts, double* h) {
  const int64_t pair = blockIdx.y;
  const int64_t i = blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= t.intermediate) return;
  const __nv_bfloat16* w = t.gate_up + experts[pair] * 2 * t.intermediate * t.hidden;
  const __nv_bfloat16* x = t.x + tokens[pair] * t.hidden;
  const double gate = dot(w + i * t.hidden, x, t.hidden);
  const double up = dot(w + (t.intermediate + i) * t.hidden, x, t.hidden);
  if (threadIdx.x % 32 == 0) h[pair * t.intermediate + i] = gate / (1 + exp(-gate)) * up;
}
__global__ void truth_y(Truth t, const int64_t* experts, const double* h, double* y) {
  const int64_t pair = blockIdx.y;
  const int64_t i = blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= t.hidden) return;
  const double v = dot(t.down + (experts[pair] * t.hidden + i) * t.intermediate,
                       h + pair * t.intermediate, t.intermediate);
  if (threadIdx.x % 32 == 0) y[pair * t.hidden + i] = v;
}

}  // namespace
}  // namespace cadre::cuda

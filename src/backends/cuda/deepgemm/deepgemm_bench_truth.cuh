// Random values and a float64 emulation of the FP8 layer on the device, for deepgemm_bench.cu.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include <cstdint>

namespace cadre::cuda {
namespace {

__device__ uint64_t random_bits(uint64_t i, uint64_t seed) {
  uint64_t z = i * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  return z ^ (z >> 31);
}

// Nearly normal, variance 1: four uniform values.
__device__ float random_value(uint64_t i, uint64_t seed) {
  const uint64_t bits = random_bits(i, seed);
  float sum = 0;
  for (int part = 0; part < 4; ++part) {
    sum += static_cast<float>(bits >> (16 * part) & 0xffff) / 65536.0f - 0.5f;
  }
  return sum * 1.7320508f;
}

__global__ void fill_bf16(__nv_bfloat16* to, int64_t count, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    to[i] = __float2bfloat16(random_value(static_cast<uint64_t>(i), seed));
  }
}
// Deviation 128: the largest of a block reaches 448.
__global__ void fill_codes(uint32_t* to, int64_t count, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    uint32_t word = 0;
    for (int b = 0; b < 4; ++b) {
      const float v = 128 * random_value(static_cast<uint64_t>(4 * i + b), seed);
      word |= static_cast<uint32_t>(__nv_cvt_float_to_fp8(v, __NV_SATFINITE, __NV_E4M3)) << (8 * b);
    }
    to[i] = word;
  }
}
__global__ void fill_scales(float* to, int64_t count, float unit, uint64_t seed) {
  const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  if (i >= count) return;
  const uint64_t bits = random_bits(static_cast<uint64_t>(i), seed);
  to[i] = unit * (0.5f + static_cast<float>(bits >> 40) / 16777216.0f);
}

__device__ double e4m3(uint8_t code) {
  const __half_raw h = __nv_cvt_fp8_to_halfraw(code, __NV_E4M3);
  return __half2float(__half(h));
}

// Codes [rows, k] with one scale for every 128 of k: value(i) at scale_stride between groups.
struct Row {
  const uint8_t* codes;
  const float* scales;
  int64_t scale_stride;
};

// A warp a value.
__device__ double dot(const Row& x, const uint8_t* w, const float* w_scales, int64_t k) {
  double sum = 0;
  for (int64_t i = threadIdx.x % 32; i < k; i += 32) {
    sum += e4m3(x.codes[i]) * x.scales[i / 128 * x.scale_stride] * e4m3(w[i]) * w_scales[i / 128];
  }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}

// Rows of sorted tokens through one product in double. Weights [E, n, k], scales [E, n / 128, k /
// 128]; with a gate n counts gate and up.
struct Truth {
  const uint8_t* codes;
  const float* scales;
  int64_t code_stride, scale_stride;
  const uint8_t* weights;
  const float* weight_scales;
  int64_t n, k;
};

__device__ double product(const Truth& t, int64_t row, int64_t expert, int64_t n) {
  const Row x = {t.codes + row * t.code_stride, t.scales + row, t.scale_stride};
  const int64_t blocks = (t.k + 127) / 128;
  return dot(x, t.weights + (expert * t.n + n) * t.k,
             t.weight_scales + (expert * (t.n / 128) + n / 128) * blocks, t.k);
}

// h [count, n / 2]
__global__ void truth_h(Truth t, const int64_t* rows, const int64_t* experts, float* h) {
  const int64_t i = blockIdx.x * 8 + threadIdx.x / 32, inner = t.n / 2;
  if (i >= inner) return;
  const double gate = product(t, rows[blockIdx.y], experts[blockIdx.y], i);
  const double up = product(t, rows[blockIdx.y], experts[blockIdx.y], inner + i);
  if (threadIdx.x % 32 == 0) {
    h[blockIdx.y * inner + i] = static_cast<float>(gate / (1 + exp(-gate)) * up);
  }
}
__global__ void truth_y(Truth t, const int64_t* rows, const int64_t* experts, double* y) {
  const int64_t i = blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= t.n) return;
  const double v = product(t, rows[blockIdx.y], experts[blockIdx.y], i);
  if (threadIdx.x % 32 == 0) y[blockIdx.y * t.n + i] = v;
}

// Copies as fast as memory allows.
__global__ void copy_all(const int4* from, int4* to, int64_t count) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
  for (; i + 3 * step < count; i += 4 * step) {
    int4 v[4];
    for (int j = 0; j < 4; ++j) v[j] = __ldcs(from + i + j * step);
    for (int j = 0; j < 4; ++j) __stcs(to + i + j * step, v[j]);
  }
  for (; i < count; i += step) to[i] = from[i];
}

}  // namespace
}  // namespace cadre::cuda

// Elements of any compute dtype as floats, one or eight at a time, and the start of a dependent
// kernel. What is not known at compile time is the same for a whole kernel, so branches are cheap.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime.h>

#include <cstdint>

#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/launch.h"
#include "cadre/dtype.h"
#include "cadre/stream.h"
#include "cadre/tensor.h"

namespace cadre::cuda {

/// How kernels of this folder are launched: they all begin with begin_dependent().
inline Launch dependent_launch(const Stream& stream) {
  return compute_capability(stream.device.index) >= 90 ? Launch::kDependent : Launch::kPlain;
}

/// Clusters of 16 blocks: Hopper and the data centre GPUs after it.
inline bool has_large_clusters(const Stream& stream) {
  const int capability = compute_capability(stream.device.index);
  return capability >= 90 && capability < 110;
}

/// True when vectors of eight elements may be loaded everywhere in rows of `width`.
inline bool allows_vectors(const void* data, int64_t width) {
  return width % 8 == 0 && reinterpret_cast<uintptr_t>(data) % 16 == 0;
}

inline int64_t row_width(const TensorView& x) { return x.dim(x.rank() - 1); }
inline int64_t num_rows(const TensorView& x) {
  const int64_t width = row_width(x);
  return width == 0 ? 0 : x.numel() / width;
}

#ifdef __CUDACC__

/// Waits for the kernels before, then lets the next one start: when a kernel starts, all but the
/// one directly before it have ended.
__device__ inline void begin_dependent() {
  wait_for_previous_kernel();
  let_next_kernel_start();
}

/// The same, for short kernels: the next one may start its independent work at once, while even
/// those before this one run. Only where what follows reads nothing but weights, a step's inputs or
/// the past's keys and values before it waits: a product or attention.
__device__ inline void begin_short() {
  let_next_kernel_start();
  wait_for_previous_kernel();
}

__device__ inline float widen(float x) { return x; }
__device__ inline float widen(__nv_bfloat16 x) { return __bfloat162float(x); }
__device__ inline float widen(__half x) { return __half2float(x); }

template <typename T>
__device__ inline T narrow(float x);
template <>
__device__ inline float narrow<float>(float x) {
  return x;
}
template <>
__device__ inline __nv_bfloat16 narrow<__nv_bfloat16>(float x) {
  return __float2bfloat16_rn(x);
}
template <>
__device__ inline __half narrow<__half>(float x) {
  return __float2half_rn(x);
}

__device__ inline float load_one(const void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kBF16) return widen(static_cast<const __nv_bfloat16*>(data)[i]);
  return widen(static_cast<const __half*>(data)[i]);
}

__device__ inline void store_one(float x, void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[i] = x;
  } else if (dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(data)[i] = narrow<__nv_bfloat16>(x);
  } else {
    static_cast<__half*>(data)[i] = narrow<__half>(x);
  }
}

/// Two 16-bit elements in one register.
template <typename T>
__device__ inline float2 widen_two(uint32_t bits);
template <>
__device__ inline float2 widen_two<__nv_bfloat16>(uint32_t bits) {
  return {__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u)};
}
template <>
__device__ inline float2 widen_two<__half>(uint32_t bits) {
  return __half22float2(*reinterpret_cast<const __half2*>(&bits));
}

template <typename T>
__device__ inline uint32_t narrow_two(float low, float high);
template <>
__device__ inline uint32_t narrow_two<__nv_bfloat16>(float low, float high) {
  const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}
template <>
__device__ inline uint32_t narrow_two<__half>(float low, float high) {
  const __half2 pair = __floats2half2_rn(low, high);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

/// Elements [i, i + 8) of aligned memory; i is a multiple of 8.
__device__ inline void load_eight(const void* data, DType dtype, int64_t i, float (&x)[8]) {
  if (dtype == DType::kF32) {
    const float4* from = reinterpret_cast<const float4*>(static_cast<const float*>(data) + i);
    const float4 a = from[0];
    const float4 b = from[1];
    x[0] = a.x, x[1] = a.y, x[2] = a.z, x[3] = a.w;
    x[4] = b.x, x[5] = b.y, x[6] = b.z, x[7] = b.w;
    return;
  }
  const uint4 bits = *reinterpret_cast<const uint4*>(static_cast<const uint16_t*>(data) + i);
  const uint32_t words[4] = {bits.x, bits.y, bits.z, bits.w};
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    const float2 two =
        dtype == DType::kBF16 ? widen_two<__nv_bfloat16>(words[j]) : widen_two<__half>(words[j]);
    x[2 * j] = two.x;
    x[2 * j + 1] = two.y;
  }
}

__device__ inline void store_eight(const float (&x)[8], void* data, DType dtype, int64_t i) {
  if (dtype == DType::kF32) {
    float4* to = reinterpret_cast<float4*>(static_cast<float*>(data) + i);
    to[0] = {x[0], x[1], x[2], x[3]};
    to[1] = {x[4], x[5], x[6], x[7]};
    return;
  }
  uint32_t words[4];
#pragma unroll
  for (int j = 0; j < 4; ++j) {
    words[j] = dtype == DType::kBF16 ? narrow_two<__nv_bfloat16>(x[2 * j], x[2 * j + 1])
                                     : narrow_two<__half>(x[2 * j], x[2 * j + 1]);
  }
  *reinterpret_cast<uint4*>(static_cast<uint16_t*>(data) + i) = {words[0], words[1], words[2],
                                                                 words[3]};
}

/// Ordered as the values are; +0 and -0 are the same. Not for NaN. 0 is below all keys.
__device__ inline uint32_t key_of(float value) {
  const uint32_t bits = __float_as_uint(value + 0.0f);
  return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}

__device__ inline float warp_sum(float x) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  return x;
}

#endif

}  // namespace cadre::cuda

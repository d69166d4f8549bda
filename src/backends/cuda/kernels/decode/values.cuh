// Scalars of the decode kernels: dtypes as floats, biases, the weighted sum of one output.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/kernels/decode/plan.cuh"

namespace cadre::cuda {

__device__ inline float to_float(float v) { return v; }
__device__ inline float to_float(__half v) { return __half2float(v); }
__device__ inline float to_float(__nv_bfloat16 v) { return __bfloat162float(v); }

template <typename T>
__device__ T from_float(float v);
template <>
__device__ inline float from_float<float>(float v) {
  return v;
}
template <>
__device__ inline __half from_float<__half>(float v) {
  return __float2half_rn(v);
}
template <>
__device__ inline __nv_bfloat16 from_float<__nv_bfloat16>(float v) {
  return __float2bfloat16_rn(v);
}

/// Element i of an expert's bias; 0 without one.
__device__ inline float bias_of(const DeviceVectors& biases, DType dtype, int expert, int64_t i) {
  if (biases.first.data == nullptr) return 0;
  if (dtype == DType::kF32) {
    const DeviceVector v = biases.expert<float>(expert);
    return static_cast<const float*>(v.data)[i * v.stride];
  }
  const DeviceVector v = biases.expert<uint16_t>(expert);
  const uint16_t bits = static_cast<const uint16_t*>(v.data)[i * v.stride];
  return dtype == DType::kF16 ? __half2float(__ushort_as_half(bits))
                              : __bfloat162float(__ushort_as_bfloat16(bits));
}

/// Number i of an array of T; of void: of the call's compute dtype.
template <typename T>
__device__ float read_number(const void* data, int64_t i, DType /*dtype*/) {
  return to_float(static_cast<const T*>(data)[i]);
}
template <>
__device__ inline float read_number<void>(const void* data, int64_t i, DType dtype) {
  if (dtype == DType::kF32) return static_cast<const float*>(data)[i];
  if (dtype == DType::kF16) return to_float(static_cast<const __half*>(data)[i]);
  return to_float(static_cast<const __nv_bfloat16*>(data)[i]);
}
template <typename T>
__device__ void write_number(void* data, int64_t i, DType /*dtype*/, float value) {
  static_cast<T*>(data)[i] = from_float<T>(value);
}
template <>
__device__ inline void write_number<void>(void* data, int64_t i, DType dtype, float value) {
  if (dtype == DType::kF32) {
    static_cast<float*>(data)[i] = value;
  } else if (dtype == DType::kF16) {
    static_cast<__half*>(data)[i] = from_float<__half>(value);
  } else {
    static_cast<__nv_bfloat16*>(data)[i] = from_float<__nv_bfloat16>(value);
  }
}

template <typename T>
__device__ float routing_weight(const DecodeArgs& a, int pair) {
  const int64_t at = pair / a.top_k * a.routing_weights_stride + pair % a.top_k;
  if (a.routing_weights_are_f32) return static_cast<const float*>(a.routing_weights)[at];
  return read_number<T>(a.routing_weights, at, a.compute_dtype);
}

/// By all threads of a block; visible after the next barrier.
template <typename T>
__device__ void load_routing_weights(const Plan& plan, const DecodeArgs& a) {
#pragma unroll 1
  for (int p = threadIdx.x; p < a.num_tokens * a.top_k; p += blockDim.x) {
    if (plan.expert_of_pair[p] >= 0) plan.weight[p] = routing_weight<T>(a, p);
  }
}

/// out[t, column]: the pairs' results in slot order. `y` is where the column of pair 0 lies.
template <typename T>
__device__ void combine_one(const DecodeArgs& a, const Plan& plan, int t, int column,
                            const float* y, int64_t y_stride) {
  constexpr int kAtOnce = 8;
  float sum = 0;
  const int first = t * a.top_k;
#pragma unroll 1
  for (int begin = 0; begin < a.top_k; begin += kAtOnce) {
    float value[kAtOnce];
    int expert[kAtOnce];
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      const int pair = first + begin + j;
      expert[j] = begin + j < a.top_k ? plan.expert_of_pair[pair] : -1;
      value[j] = expert[j] >= 0 ? y[pair * y_stride] : 0;
    }
#pragma unroll
    for (int j = 0; j < kAtOnce; ++j) {
      if (expert[j] < 0) continue;
      if (a.down_bias.first.data != nullptr) {
        value[j] += bias_of(a.down_bias, a.bias_dtype, expert[j], column);
      }
      sum += plan.weight[first + begin + j] * value[j];
    }
  }
  const int64_t at = t * a.out_stride + column;
  if (a.out_is_f32) {
    static_cast<float*>(a.out)[at] = sum;
  } else {
    write_number<T>(a.out, at, a.compute_dtype, sum);
  }
}

/// The block's columns of all tokens.
template <typename T>
__device__ void combine(const DecodeArgs& a, const Plan& plan, int begin, int columns,
                        const float* y, int64_t y_stride) {
#pragma unroll 1
  for (int i = threadIdx.x; i < a.num_tokens * columns; i += blockDim.x) {
    const int column = i % columns;
    combine_one<T>(a, plan, i / columns, begin + column, y + column, y_stride);
  }
}

}  // namespace cadre::cuda

// What stands around the products of few tokens: tokens quantised before, the weighted sum behind.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/kernels/activation_scale.cuh"
#include "backends/cuda/kernels/decode/plan.cuh"
#include "backends/cuda/kernels/hopper_fp8_few_kernels.h"
#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWide = 4;  // neighbouring values of a thread; a group is a warp's

template <typename T>
struct alignas(sizeof(T) * kWide) Values {
  T v[kWide];
};

template <typename T>
__device__ void load_values(const T* from, int32_t count, float (&values)[kWide]) {
  Values<T> raw = {};
  if (count >= kWide && reinterpret_cast<uintptr_t>(from) % sizeof(raw) == 0) {
    raw = *reinterpret_cast<const Values<T>*>(from);
  } else {
    for (int i = 0; i < kWide; ++i) {
      if (i < count) raw.v[i] = from[i];
    }
  }
  for (int i = 0; i < kWide; ++i) values[i] = static_cast<float>(raw.v[i]);
}

// A warp for each token and group of 128.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ HopperFp8Few few) {
  const DecodeArgs& a = few.args;
  wait_for_previous_kernel();
  if (blockIdx.x == 0) {
    const int counters = 1 + a.num_tokens * a.top_k;
    for (int i = threadIdx.x; i < counters; i += kThreads) few.counters[i] = 0;
    __syncthreads();
    __threadfence();  // the next kernel counts before this one has ended
  }
  let_next_kernel_start();
  const int64_t item = static_cast<int64_t>(blockIdx.x) * (kThreads / 32) + threadIdx.x / 32;
  const int64_t token = item / a.x_codes.groups;
  const auto group = static_cast<int32_t>(item % a.x_codes.groups);
  if (token >= a.num_tokens) return;
  const auto k = static_cast<int32_t>(group * kFp8Group + threadIdx.x % 32 * kWide);
  float values[kWide];
  load_values(static_cast<const T*>(a.x) + token * a.x_stride + k, a.hidden - k, values);
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kWide; ++i) largest = max(largest, magnitude_bits(values[i]));
  largest = __reduce_max_sync(~0u, largest);
  const ActivationScale scale = activation_scale_of_bits(largest);
  uint32_t codes = 0;
#pragma unroll
  for (int i = 0; i < kWide; ++i) codes |= to_e4m3(scaled_activation(values[i], scale)) << (8 * i);
  *reinterpret_cast<uint32_t*>(a.x_codes.codes + token * a.x_codes.stride + k) = codes;
  if (threadIdx.x % 32 == 0) a.x_codes.scales[item] = scale.scale;
}

template <typename T>
__device__ float routing_weight(const DecodeArgs& a, int token, int slot) {
  const int64_t at = token * a.routing_weights_stride + slot;
  if (a.routing_weights_are_f32) return static_cast<const float*>(a.routing_weights)[at];
  return static_cast<float>(static_cast<const T*>(a.routing_weights)[at]);
}

template <typename Out>
__device__ void store_values(Out* to, const float (&values)[kWide]) {
  Values<Out> rounded;
  for (int i = 0; i < kWide; ++i) rounded.v[i] = static_cast<Out>(values[i]);
  if (reinterpret_cast<uintptr_t>(to) % sizeof(rounded) == 0) {
    *reinterpret_cast<Values<Out>*>(to) = rounded;
  } else {
    for (int i = 0; i < kWide; ++i) to[i] = rounded.v[i];
  }
}

// A thread for kWide columns of a token: slots in order, of each the parts in order.
template <typename T, typename Out>
__global__ void __launch_bounds__(kThreads)
    combine_kernel(const __grid_constant__ HopperFp8Few few) {
  constexpr int kAtOnce = 8;
  const DecodeArgs& a = few.args;
  const int vectors = a.hidden / kWide;
  const int64_t item = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const auto token = static_cast<int>(item / vectors);
  const auto column = static_cast<int>(item % vectors) * kWide;
  if (token >= a.num_tokens) return;
  float sum[kWide] = {};
  const float* const y =
      a.y + static_cast<int64_t>(token) * a.top_k * few.parts * a.hidden + column;
  for (int first = 0; first < a.top_k; first += kAtOnce) {
    float weight[kAtOnce];
    uint32_t there = 0;
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (first + s < a.top_k && expert_of(a, token * a.top_k + first + s) >= 0) there |= 1u << s;
      if (there >> s & 1) weight[s] = routing_weight<T>(a, token, first + s);
    }
    if (first == 0) {  // ids and weights are older than the kernel before this one
      wait_for_previous_kernel();
      let_next_kernel_start();
    }
    float4 values[kAtOnce];
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (there >> s & 1) {
        values[s] = __ldcg(reinterpret_cast<const float4*>(y + static_cast<int64_t>(first + s) *
                                                                   few.parts * a.hidden));
      }
    }
#pragma unroll
    for (int s = 0; s < kAtOnce; ++s) {
      if (!(there >> s & 1)) continue;
      for (int part = 1; part < few.parts; ++part) {
        const float4 more = __ldcg(reinterpret_cast<const float4*>(
            y + (static_cast<int64_t>(first + s) * few.parts + part) * a.hidden));
        values[s].x += more.x, values[s].y += more.y, values[s].z += more.z, values[s].w += more.w;
      }
      sum[0] = fmaf(weight[s], values[s].x, sum[0]);
      sum[1] = fmaf(weight[s], values[s].y, sum[1]);
      sum[2] = fmaf(weight[s], values[s].z, sum[2]);
      sum[3] = fmaf(weight[s], values[s].w, sum[3]);
    }
  }
  store_values(static_cast<Out*>(a.out) + token * a.out_stride + column, sum);
}

unsigned blocks_of(int64_t items, int64_t each) {
  return static_cast<unsigned>((items + each - 1) / each);
}

template <typename T>
void combine_to(const HopperFp8Few& few, const Stream& stream) {
  const DecodeArgs& a = few.args;
  auto* const kernel = a.out_is_f32 ? combine_kernel<T, float> : combine_kernel<T, T>;
  const int64_t items = int64_t{a.num_tokens} * (a.hidden / kWide);
  launch("hopper_fp8_few_combine", kernel, dim3(blocks_of(items, kThreads)), dim3(kThreads), 0,
         stream_of(stream), Launch::kDependent, few);
}

template <typename T>
void quantize_from(const HopperFp8Few& few, const Stream& stream) {
  const int64_t items = few.args.num_tokens * few.args.x_codes.groups;
  launch("hopper_fp8_few_quantize", quantize_kernel<T>, dim3(blocks_of(items, kThreads / 32)),
         dim3(kThreads), 0, stream_of(stream), Launch::kDependent, few);
}

}  // namespace

void hopper_fp8_few_quantize(const HopperFp8Few& few, const Stream& stream) {
  switch (few.args.compute_dtype) {
    case DType::kBF16:
      return quantize_from<__nv_bfloat16>(few, stream);
    case DType::kF16:
      return quantize_from<__half>(few, stream);
    default:
      return quantize_from<float>(few, stream);
  }
}

void hopper_fp8_few_combine(const HopperFp8Few& few, const Stream& stream) {
  switch (few.args.compute_dtype) {
    case DType::kBF16:
      return combine_to<__nv_bfloat16>(few, stream);
    case DType::kF16:
      return combine_to<__half>(few, stream);
    default:
      return combine_to<float>(few, stream);
  }
}

}  // namespace cadre::cuda

// A warp takes four groups of 128 of a token, a thread 16 values, so that every row gets 512 bytes
// at a time.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "backends/cuda/kernels/activation_scale.cuh"
#include "backends/cuda/kernels/hopper_fp8_rows.h"
#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/ptx.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWide = 16;                                           // values of a thread
constexpr int kGroupThreads = static_cast<int>(kFp8Group) / kWide;  // 8
constexpr int kWarps = kThreads / 32;
constexpr int kWarpValues = 32 * kWide;

/// Passed to the kernel by value.
struct Tokens {
  const void* x;
  int64_t x_stride;  // elements
  bool aligned;      // to 16 bytes, k a multiple of kWide
  int64_t num_tokens;
  int32_t k;
  int32_t groups;
  int32_t warps;  // for a token
  const int32_t* row_of_pair;
  int32_t top_k;
  uint8_t* codes;
  int64_t code_stride;
  float* scales;
  int64_t scale_stride;
};

template <typename T>
__device__ void load_wide(const T* from, float (&values)[kWide]) {
  constexpr int kCount = 16 / sizeof(T);
#pragma unroll
  for (int i = 0; i < kWide; i += kCount) {
    const int4 part = *reinterpret_cast<const int4*>(from + i);
    const T* elements = reinterpret_cast<const T*>(&part);
#pragma unroll
    for (int j = 0; j < kCount; ++j) values[i + j] = static_cast<float>(elements[j]);
  }
}

template <typename T>
__device__ void load_values(const Tokens& t, int64_t token, int32_t first, float (&values)[kWide]) {
  const T* from = static_cast<const T*>(t.x) + token * t.x_stride + first;
  if (t.aligned && first < t.k) return load_wide(from, values);
  for (int i = 0; i < kWide; ++i) {
    if (first + i < t.k) values[i] = static_cast<float>(from[i]);
  }
}

__device__ uint32_t largest_of_group(const float (&values)[kWide]) {
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < kWide; ++i) largest = max(largest, magnitude_bits(values[i]));
  for (int step = kGroupThreads / 2; step > 0; step /= 2) {
    largest = max(largest, __shfl_xor_sync(~0u, largest, step));
  }
  return largest;
}

__device__ uint4 codes_of(const float (&values)[kWide], const ActivationScale& scale) {
  uint32_t words[4];
#pragma unroll
  for (int w = 0; w < 4; ++w) {
    const float* v = values + 4 * w;
    const uint32_t low =
        ptx::pack_e4m3(scaled_activation(v[0], scale), scaled_activation(v[1], scale));
    const uint32_t high =
        ptx::pack_e4m3(scaled_activation(v[2], scale), scaled_activation(v[3], scale));
    words[w] = low | high << 16;
  }
  return make_uint4(words[0], words[1], words[2], words[3]);
}

template <typename T>
__global__ void __launch_bounds__(kThreads, 4) quantize_kernel(Tokens t) {
  const int64_t at = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int64_t token = at / t.warps;
  if (token >= t.num_tokens) return;
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  const int32_t first = static_cast<int32_t>(at % t.warps) * kWarpValues + lane * kWide;
  const int32_t group = first / static_cast<int32_t>(kFp8Group);
  float values[kWide] = {};
  // The plan waits for the kernel before it: what the tokens come from has ended.
  load_values<T>(t, token, first, values);
  const ActivationScale scale = activation_scale_of_bits(largest_of_group(values));
  const uint4 codes = codes_of(values, scale);
  wait_for_previous_kernel();
  let_next_kernel_start();
  for (int32_t base = 0; base < t.top_k; base += 32) {
    const int32_t own = base + lane < t.top_k ? t.row_of_pair[token * t.top_k + base + lane] : -1;
    for (int32_t slot = 0; slot < min(32, t.top_k - base); ++slot) {
      const int64_t row = __shfl_sync(~0u, own, slot);
      if (row < 0 || group >= t.groups) continue;
      *reinterpret_cast<uint4*>(t.codes + row * t.code_stride + first) = codes;
      if (lane % kGroupThreads == 0) t.scales[group * t.scale_stride + row] = scale.scale;
    }
  }
}

template <typename T>
void launch_quantize(const Tokens& tokens, const Stream& stream) {
  const int64_t blocks = (tokens.num_tokens * tokens.warps + kWarps - 1) / kWarps;
  CADRE_ASSERT(blocks <= 0x7fffffff);
  launch("quantize_tokens", quantize_kernel<T>, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
         0, stream_of(stream), Launch::kDependent, tokens);
}

}  // namespace

void quantize_tokens(const QuantizeTokens& args, const Stream& stream) {
  const TensorView& x = args.x;
  const auto size = static_cast<int64_t>(size_of(x.dtype()));
  Tokens t = {};
  t.x = x.data();
  t.x_stride = x.stride(0);
  t.num_tokens = x.dim(0);
  t.k = static_cast<int32_t>(x.dim(1));
  t.aligned = reinterpret_cast<uintptr_t>(x.data()) % 16 == 0 && t.x_stride * size % 16 == 0 &&
              t.k % kWide == 0;
  t.groups = static_cast<int32_t>(fp8_groups(t.k));
  t.warps = (t.k + kWarpValues - 1) / kWarpValues;
  t.row_of_pair = args.plan.row_of_pair;
  t.top_k = static_cast<int32_t>(args.top_k);
  t.codes = args.rows.codes;
  t.code_stride = fp8_row_stride(t.k);
  t.scales = args.rows.scales;
  t.scale_stride = fp8_scale_stride(t.num_tokens * args.top_k);
  switch (x.dtype()) {
    case DType::kF32:
      return launch_quantize<float>(t, stream);
    case DType::kBF16:
      return launch_quantize<__nv_bfloat16>(t, stream);
    default:
      return launch_quantize<__half>(t, stream);
  }
}

}  // namespace cadre::cuda

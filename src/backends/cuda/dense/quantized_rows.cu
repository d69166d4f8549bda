// Quantised weights and a few rows of x: a warp has one to four rows of W, a lane 16 neighbours of
// K at a time, whose sum of products takes the scales and is added in float32. The codes of the
// next 512 of K are on their way meanwhile.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "backends/cuda/dense/quantized_linear.h"
#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kValues = 16;  // of K, a lane

__device__ void decode_e4m3(uint4 codes, float (&values)[kValues]) {
  const uint32_t words[4] = {codes.x, codes.y, codes.z, codes.w};
#pragma unroll
  for (int i = 0; i < kValues; i += 2) {
    const float2 two = __half22float2(e4m3_pair(words[i / 4] >> i % 4 * 8 & 0xffffu));
    values[i] = two.x;
    values[i + 1] = two.y;
  }
}

__device__ void decode_e2m1(uint2 codes, float (&values)[kValues]) {
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    values[i] = e2m1_value((i < 8 ? codes.x : codes.y) >> i % 8 * 4);
  }
}

template <typename T>
__device__ void load_values(const void* x, int64_t at, float (&values)[kValues]) {
  constexpr int kVector = 16 / sizeof(T);
  alignas(16) T raw[kValues];
#pragma unroll
  for (int i = 0; i < kValues; i += kVector) {
    *reinterpret_cast<uint4*>(raw + i) =
        *reinterpret_cast<const uint4*>(static_cast<const T*>(x) + at + i);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(raw[i]);
}

__device__ void load_x(const QuantizedGemm& args, int64_t row, int64_t k,
                       float (&values)[kValues]) {
  const PortableGemm& gemm = args.gemm;
  const int64_t at = row * gemm.x_stride + k;
  if (args.x_scales != nullptr) {
    decode_e4m3(*reinterpret_cast<const uint4*>(static_cast<const uint8_t*>(gemm.x) + at), values);
  } else if (gemm.dtype == DType::kBF16) {
    load_values<__nv_bfloat16>(gemm.x, at, values);
  } else if (gemm.dtype == DType::kF16) {
    load_values<__half>(gemm.x, at, values);
  } else {
    load_values<float>(gemm.x, at, values);
  }
}

__device__ int64_t block_of(int64_t i, int64_t block) { return block == 0 ? 0 : i / block; }

__device__ float scale_at(const QuantizedGemm& args, int64_t n, int64_t k) {
  const DeviceMatrix& w = args.gemm.w.first;
  const int64_t at = block_of(n + w.scale_row_offset, args.layout.block_rows) * w.scale_row_stride +
                     block_of(k, args.layout.block_cols) * w.scale_col_stride;
  return args.layout.dtype == DType::kF32 ? static_cast<const float*>(w.scales)[at]
                                          : e8m0_value(static_cast<const uint8_t*>(w.scales)[at]);
}

__device__ float value_of(const void* data, DType dtype, int64_t at) {
  if (dtype == DType::kBF16) return __bfloat162float(static_cast<const __nv_bfloat16*>(data)[at]);
  if (dtype == DType::kF16) return __half2float(static_cast<const __half*>(data)[at]);
  return static_cast<const float*>(data)[at];
}

__device__ void write(const PortableGemm& gemm, int64_t row, int64_t n, float value) {
  const int64_t at = row * gemm.out_stride + n;
  if (gemm.bias.first.data != nullptr) {
    value += value_of(gemm.bias.first.data, gemm.bias_dtype, n * gemm.bias.first.stride);
  }
  if (gemm.out_dtype == DType::kBF16) {
    static_cast<__nv_bfloat16*>(gemm.out)[at] = __float2bfloat16(value);
  } else if (gemm.out_dtype == DType::kF16) {
    static_cast<__half*>(gemm.out)[at] = __float2half(value);
  } else {
    float* out = static_cast<float*>(gemm.out) + at;
    *out = gemm.accumulate ? *out + value : value;
  }
}

// Rows [kRows * blockIdx.y, ...) of x, of which those below max_rows are there; kWeightRows of W a
// warp.
template <int kRows, int kWeightRows, bool kIsFp4>
__global__ void __launch_bounds__(kThreads)
    rows_kernel(const __grid_constant__ QuantizedGemm args) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const PortableGemm& gemm = args.gemm;
  const DeviceMatrix& w = gemm.w.first;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t first_n = (int64_t{blockIdx.x} * (kThreads / 32) + threadIdx.x / 32) * kWeightRows;
  if (first_n >= gemm.n) return;
  const int64_t first_row = int64_t{blockIdx.y} * kRows;
  // A row beyond the last is the last once more, and is not written.
  int64_t n[kWeightRows];
  int64_t row[kRows];
#pragma unroll
  for (int i = 0; i < kWeightRows; ++i) n[i] = min(first_n + i, gemm.n - 1);
#pragma unroll
  for (int t = 0; t < kRows; ++t) row[t] = min(first_row + t, gemm.max_rows - 1);
  float sums[kRows][kWeightRows] = {};
  using Codes = std::conditional_t<kIsFp4, uint2, uint4>;
  Codes next[kWeightRows];
  const auto ask = [&](int64_t k) {
#pragma unroll
    for (int i = 0; i < kWeightRows; ++i) {
      const auto* from = static_cast<const uint8_t*>(w.data) + n[i] * w.row_stride;
      next[i] = *reinterpret_cast<const Codes*>(from + (kIsFp4 ? k / 2 : k));
    }
  };
  if (lane * kValues < gemm.k) ask(lane * kValues);
  for (int64_t k = lane * kValues; k < gemm.k; k += 32 * kValues) {
    float weights[kWeightRows][kValues];
    float scales[kWeightRows];
#pragma unroll
    for (int i = 0; i < kWeightRows; ++i) {
      if constexpr (kIsFp4) {
        decode_e2m1(next[i], weights[i]);
      } else {
        decode_e4m3(next[i], weights[i]);
      }
    }
    if (k + 32 * kValues < gemm.k) ask(k + 32 * kValues);
#pragma unroll
    for (int i = 0; i < kWeightRows; ++i) scales[i] = scale_at(args, n[i], k);
#pragma unroll
    for (int t = 0; t < kRows; ++t) {
      float x[kValues];
      load_x(args, row[t], k, x);
      float x_scale = 1;
      if (args.x_scales != nullptr) {
        x_scale = args.x_scales[row[t] * args.x_scale_row_stride +
                                block_of(k, args.x_group) * args.x_scale_group_stride];
      }
#pragma unroll
      for (int i = 0; i < kWeightRows; ++i) {
        float part = 0;
#pragma unroll
        for (int v = 0; v < kValues; ++v) part += x[v] * weights[i][v];
        sums[t][i] += x_scale * scales[i] * part;
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kRows; ++t) {
#pragma unroll
    for (int i = 0; i < kWeightRows; ++i) {
#pragma unroll
      for (int step = 16; step > 0; step /= 2) {
        sums[t][i] += __shfl_xor_sync(0xffffffffu, sums[t][i], step);
      }
      if (lane == 0 && first_row + t < gemm.max_rows && first_n + i < gemm.n) {
        write(gemm, first_row + t, first_n + i, sums[t][i]);
      }
    }
  }
}

template <int kRows, int kWeightRows>
void run(const QuantizedGemm& args, const Stream& stream) {
  constexpr int kRowsOfBlock = kThreads / 32 * kWeightRows;
  const dim3 grid(static_cast<unsigned>((args.gemm.n + kRowsOfBlock - 1) / kRowsOfBlock),
                  static_cast<unsigned>((args.gemm.max_rows + kRows - 1) / kRows));
  const auto kernel = args.format == StorageFormat::kFp4 ? rows_kernel<kRows, kWeightRows, true>
                                                         : rows_kernel<kRows, kWeightRows, false>;
  launch("quantized_rows", kernel, grid, dim3(kThreads), 0, stream_of(stream), Launch::kDependent,
         args);
}

bool is_aligned(const void* data, int64_t stride_bytes) {
  return reinterpret_cast<uintptr_t>(data) % 16 == 0 && stride_bytes % 16 == 0;
}

}  // namespace

bool takes_quantized_rows(const QuantizedGemm& product) {
  const PortableGemm& gemm = product.gemm;
  const DeviceMatrix& w = gemm.w.first;
  const int64_t x_bytes =
      product.x_scales != nullptr ? 1 : static_cast<int64_t>(size_of(gemm.dtype));
  return gemm.max_rows <= kMaxQuantizedRows && gemm.k % kValues == 0 && w.col_stride == 1 &&
         product.layout.block_cols % kValues == 0 && product.x_group % kValues == 0 &&
         is_aligned(w.data, w.row_stride) && is_aligned(gemm.x, gemm.x_stride * x_bytes);
}

void quantized_rows(const QuantizedGemm& product, const Stream& stream) {
  if (product.gemm.max_rows == 0 || product.gemm.n == 0) return;
  if (product.gemm.max_rows == 1) return run<1, 1>(product, stream);
  if (product.gemm.max_rows <= 4) return run<4, 2>(product, stream);
  run<8, 4>(product, stream);
}

}  // namespace cadre::cuda

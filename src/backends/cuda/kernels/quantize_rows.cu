#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/quantize_rows.h"
#include "backends/cuda/kernels/small_floats.cuh"
#include "core/check.h"
#include "quant/activations.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 8;                 // neighbours of one thread
constexpr int kWarpValues = 32 * kValues;  // of k
constexpr int kWarps = kThreads / 32;

/// kValues from `from` on, of which the first `count` are there; the rest is zero.
template <typename T>
__device__ void load(const T* from, int count, float (&values)[kValues]) {
  constexpr int kVector = 16 / sizeof(T);
  alignas(16) T raw[kValues];
  if (count == kValues && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; i += kVector) {
      *reinterpret_cast<uint4*>(raw + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) raw[i] = i < count ? from[i] : T(0.0f);
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = static_cast<float>(raw[i]);
}

__device__ void store(uint8_t* to, int count, const float (&values)[kValues]) {
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kValues; i += 2) {
    const __nv_fp8x2_storage_t two =
        __nv_cvt_float2_to_fp8x2(make_float2(values[i], values[i + 1]), __NV_SATFINITE, __NV_E4M3);
    words[i / 4] |= uint32_t{two} << i % 4 * 8;
  }
  if (count == kValues && reinterpret_cast<uintptr_t>(to) % 8 == 0) {
    *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    return;
  }
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (i < count) to[i] = static_cast<uint8_t>(words[i / 4] >> i % 4 * 8);
  }
}

// kValues (half of a run of 16 that is permuted) in fp16; `k` says which half.
__device__ void store_placed(uint16_t* row, int64_t k, const float (&values)[kValues]) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const __half2 two = e4m3_pair(to_e4m3(values[2 * i]) | to_e4m3(values[2 * i + 1]) << 8);
    pairs[i] = *reinterpret_cast<const uint32_t*>(&two);
  }
  // Column 4 q + i of the 16 goes to i / 2 * 8 + 2 q + i % 2.
  uint16_t* to = row + k / 16 * 16 + k % 16 / 2;
  *reinterpret_cast<uint2*>(to) = make_uint2(pairs[0], pairs[2]);
  *reinterpret_cast<uint2*>(to + 8) = make_uint2(pairs[1], pairs[3]);
}

// activation_scale() of quant/activations.h.
__device__ ActivationScale scale_of(uint32_t largest) {
  if (largest >= 0x7f800000u) return {__uint_as_float(0x7fc00000u), 0};
  const float amax = fmaxf(__uint_as_float(largest), kActivationFloor);
  return {__fdiv_rn(amax, kMaxE4m3), __fdiv_rn(kMaxE4m3, amax)};
}

// A warp takes kWarpValues of one row; a group lies in group / kValues of its lanes.
template <typename T>
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __grid_constant__ QuantizeRows args) {
  if (args.next_starts_first) let_next_kernel_start();
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (blockIdx.x == 0 && static_cast<int>(threadIdx.x) < args.num_zeros) {
    args.zeros[threadIdx.x] = 0;
  }
  // 32 bits where they do: a division of 64 takes longer than everything else here.
  const auto width = static_cast<int32_t>(args.k);
  const int32_t pieces = (width + kWarpValues - 1) / kWarpValues;
  const int32_t item = static_cast<int32_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  const int32_t row = item / pieces;
  if (row >= (args.num_rows == nullptr ? args.rows : *args.num_rows)) return;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int32_t k = item % pieces * kWarpValues + lane * kValues;
  const int32_t count = min(max(width - k, 0), kValues);
  const int64_t source =
      args.pair_of_row == nullptr ? row : args.pair_of_row[row] / static_cast<int32_t>(args.top_k);
  float values[kValues];
  load(static_cast<const T*>(args.x) + source * args.x_stride + k, count, values);
  // Lanes beyond K may ask for a split that is not there; they write nothing.
  const int32_t split_width = args.splits == 1 ? width : width / static_cast<int32_t>(args.splits);
  const int32_t split = args.splits == 1 ? 0 : k / split_width;
  const int64_t out_row = split * args.rows + row;
  const int32_t out_k = k - split * split_width;
  float* scales = args.scales + out_row * args.scale_row_stride;
  if (args.static_scale != 0) {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = __fdiv_rn(values[i], args.static_scale);
    if (k == 0) scales[0] = args.static_scale;
  } else {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      largest = max(largest, __float_as_uint(values[i]) & 0x7fffffffu);
    }
    const int lanes = static_cast<int>(args.group) / kValues;
    for (int step = lanes / 2; step > 0; step /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    }
    const ActivationScale scale = scale_of(largest);
#pragma unroll
    for (int i = 0; i < kValues; ++i) {
      values[i] = scale.inverse == 0 ? 0.0f : __fmul_rn(values[i], scale.inverse);
    }
    if (lane % lanes == 0 && count > 0) {
      scales[out_k / static_cast<int32_t>(args.group) * args.scale_group_stride] = scale.scale;
    }
  }
  if (args.placed != nullptr) {
    if (count > 0) store_placed(args.placed + row * args.k, k, values);
    return;
  }
  if (count > 0) store(args.codes + out_row * args.codes_stride + out_k, count, values);
}

template <typename T>
void run(const QuantizeRows& args, const Stream& stream) {
  const int64_t items = args.rows * num_groups(args.k, kWarpValues);
  CADRE_ASSERT(items < INT32_MAX - kWarps && args.k < INT32_MAX - kWarpValues);
  launch("quantize_rows", quantize_kernel<T>,
         dim3(static_cast<unsigned>((items + kWarps - 1) / kWarps)), dim3(kThreads), 0,
         stream_of(stream), Launch::kDependent, args);
}

}  // namespace

void quantize_rows(const QuantizeRows& args, const Stream& stream) {
  CADRE_ASSERT(args.placed == nullptr || args.k % 16 == 0);
  CADRE_ASSERT(args.group == kActivationGroup || args.group == kFp4ActivationGroup);
  CADRE_ASSERT(args.num_zeros <= 32);
  CADRE_ASSERT(args.splits == 1 || args.k % (args.splits * kActivationGroup) == 0);
  if (args.rows == 0 || args.k == 0) return;
  switch (args.dtype) {
    case DType::kBF16:
      return run<__nv_bfloat16>(args, stream);
    case DType::kF16:
      return run<__half>(args, stream);
    default:
      return run<float>(args, stream);
  }
}

int64_t activation_group(StorageFormat format) {
  return format == StorageFormat::kFp4 ? kFp4ActivationGroup : kActivationGroup;
}

namespace {

constexpr int64_t kCodesAlignment = 16;

int64_t codes_stride(int64_t k) { return num_groups(k, kCodesAlignment) * kCodesAlignment; }

}  // namespace

size_t activation_codes_bytes(int64_t rows, int64_t k, int64_t group) {
  return Workspace::padded(static_cast<size_t>(rows * codes_stride(k))) +
         Workspace::padded(static_cast<size_t>(rows * num_groups(k, group)) * sizeof(float));
}

ActivationCodes allocate_activation_codes(int64_t rows, int64_t k, int64_t group,
                                          Workspace& workspace) {
  const int64_t groups = num_groups(k, group);
  auto* codes = workspace.allocate<uint8_t>(rows * codes_stride(k));
  return {codes, codes_stride(k), workspace.allocate<float>(rows * groups), groups};
}

void quantize_rows(QuantizeRows args, const ActivationCodes& codes, const Stream& stream) {
  args.codes = codes.codes;
  args.codes_stride = codes.stride;
  args.scales = codes.scales;
  args.scale_row_stride = codes.groups;
  args.scale_group_stride = 1;
  quantize_rows(args, stream);
}

}  // namespace cadre::cuda

#include <cuda_bf16.h>

#include "backends/cuda/kernels/hopper_mx_gemm.h"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kValues = 32;  // a thread's, one permuted run

template <bool kIsFp4>
__global__ void __launch_bounds__(kThreads)
    place_kernel(const uint16_t* x, int64_t x_stride, const int32_t* pair_of_row, int64_t top_k,
                 const int32_t* num_rows, int64_t k, uint16_t* out) {
  wait_for_previous_kernel();
  let_next_kernel_start();
  const int64_t runs = k / kValues;
  const int64_t item = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  const int64_t row = item / runs;
  if (row >= *num_rows) return;
  const int64_t column = item % runs * kValues;
  const uint16_t* from = x + pair_of_row[row] / top_k * x_stride + column;
  alignas(16) uint16_t values[kValues];
  if (reinterpret_cast<uintptr_t>(from) % 16 == 0) {
#pragma unroll
    for (int i = 0; i < kValues; i += 8) {
      *reinterpret_cast<uint4*>(values + i) = *reinterpret_cast<const uint4*>(from + i);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kValues; ++i) values[i] = from[i];
  }
  alignas(16) uint16_t placed[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) placed[mx_place(kIsFp4, i)] = values[i];
  uint16_t* to = out + row * k + column;
#pragma unroll
  for (int i = 0; i < kValues; i += 8) {
    *reinterpret_cast<uint4*>(to + i) = *reinterpret_cast<const uint4*>(placed + i);
  }
}

}  // namespace

void place_mx_rows(StorageFormat format, const TensorView& x, const int32_t* pair_of_row,
                   int64_t top_k, const int32_t* num_rows, int64_t max_rows, void* out,
                   const Stream& stream) {
  const int64_t k = x.dim(1);
  const int64_t items = max_rows * (k / kValues);
  if (items == 0) return;
  const auto kernel = format == StorageFormat::kFp4 ? place_kernel<true> : place_kernel<false>;
  launch("place_mx_rows", kernel, dim3(static_cast<unsigned>((items + kThreads - 1) / kThreads)),
         dim3(kThreads), 0, stream_of(stream), Launch::kDependent,
         static_cast<const uint16_t*>(x.data()), x.stride(0), pair_of_row, top_k, num_rows, k,
         static_cast<uint16_t*>(out));
}

}  // namespace cadre::cuda

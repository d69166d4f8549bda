// A thread adds four neighbouring columns.
#include <algorithm>

#include "backends/cuda/dense/fp8_splits.h"
#include "backends/cuda/dense/linear_parts.cuh"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kColumns = 4;
constexpr int kAtOnce = 16;

__global__ void __launch_bounds__(kThreads)
    add_splits_kernel(const __grid_constant__ SplitSums args) {
  begin_dependent();
  const LinearPart& part = args.parts[blockIdx.y];
  const auto stride = static_cast<int32_t>(args.sum_strides[blockIdx.y]);
  const auto size = static_cast<int32_t>(args.rows) * stride;  // of the sums of one split
  const int32_t at = (static_cast<int32_t>(blockIdx.x) * kThreads + threadIdx.x) * kColumns;
  if (at >= size) return;
  const int32_t row = at / stride;
  const int32_t column = at % stride;
  const float* from = args.sums[blockIdx.y] + at;
  float sums[kColumns];
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    sums[i] = column + i < part.n ? output_base(part, row, column + i) : 0.0f;
  }
  for (int32_t first = 0; first < args.splits; first += kAtOnce) {
    float4 values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      values[i] = {0, 0, 0, 0};
      if (first + i < args.splits) {
        values[i] = *reinterpret_cast<const float4*>(from + int64_t{first + i} * size);
      }
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      sums[0] += values[i].x, sums[1] += values[i].y;
      sums[2] += values[i].z, sums[3] += values[i].w;
    }
  }
#pragma unroll
  for (int i = 0; i < kColumns; ++i) {
    if (column + i >= part.n) continue;
    store_one(sums[i], part.out, part.out_dtype, row * part.out_stride + column + i);
  }
}

}  // namespace

void add_splits(const SplitSums& args, const Stream& stream) {
  int64_t most = 0;  // fits 32 bits with room to spare: kFp8SumsBytes
  for (int p = 0; p < args.num_parts; ++p) {
    most = std::max(most, args.rows * args.sum_strides[p] / kColumns);
  }
  if (most == 0) return;
  launch("add_splits", add_splits_kernel,
         dim3(static_cast<unsigned>((most + kThreads - 1) / kThreads),
              static_cast<unsigned>(args.num_parts)),
         dim3(kThreads), 0, stream_of(stream), dependent_launch(stream), args);
}

}  // namespace cadre::cuda

// RMS norm: a warp or a block of threads for each row. A row's sum is taken in an order that
// depends on its width alone.
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kBlockThreads = 256;
constexpr int kKept = 4;  // vectors of a row that a thread keeps in registers

struct NormArgs {
  const void* x;
  DType x_dtype;
  const void* weight;
  DType weight_dtype;
  void* out;
  DType out_dtype;
  int64_t rows;
  int64_t width;
  float eps;
};

// Of all kThreads threads of a row; the block's rows call it together.
template <int kThreads>
__device__ float row_sum(float x) {
  x = warp_sum(x);
  if constexpr (kThreads == 32) return x;
  __shared__ float sums[kThreads / 32];
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
#pragma unroll
  for (int i = 0; i < kThreads / 32; ++i) total += sums[i];
  return total;
}

__device__ float norm_factor(float sum, const NormArgs& args) {
  return 1.0f / sqrtf(sum / static_cast<float>(args.width) + args.eps);
}

template <int kThreads>
__global__ void __launch_bounds__(kBlockThreads) norm_vectors_kernel(NormArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kBlockThreads / kThreads) + threadIdx.x / kThreads;
  const int64_t vectors = args.width / 8;
  float w[kKept][8];
  float x[kKept][8];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t v = lane + i * kThreads;
    if (v < vectors) load_eight(args.weight, args.weight_dtype, 8 * v, w[i]);
  }
  begin_short();
  if (row >= args.rows) return;  // whole warps: kThreads is 32 or the block
  const int64_t first = row * args.width;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t v = lane + i * kThreads;
    if (v < vectors) load_eight(args.x, args.x_dtype, first + 8 * v, x[i]);
  }
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    if (lane + i * kThreads < vectors) {
#pragma unroll
      for (int j = 0; j < 8; ++j) sum += x[i][j] * x[i][j];
    }
  }
  for (int64_t v = lane + kKept * kThreads; v < vectors; v += kThreads) {
    float more[8];
    load_eight(args.x, args.x_dtype, first + 8 * v, more);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += more[j] * more[j];
  }
  const float factor = norm_factor(row_sum<kThreads>(sum), args);
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t v = lane + i * kThreads;
    if (v < vectors) {
#pragma unroll
      for (int j = 0; j < 8; ++j) x[i][j] *= factor * w[i][j];
      store_eight(x[i], args.out, args.out_dtype, first + 8 * v);
    }
  }
  for (int64_t v = lane + kKept * kThreads; v < vectors; v += kThreads) {
    float more[8];
    float scale[8];
    load_eight(args.x, args.x_dtype, first + 8 * v, more);
    load_eight(args.weight, args.weight_dtype, 8 * v, scale);
#pragma unroll
    for (int j = 0; j < 8; ++j) more[j] *= factor * scale[j];
    store_eight(more, args.out, args.out_dtype, first + 8 * v);
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kBlockThreads) norm_any_kernel(NormArgs args) {
  begin_short();
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kBlockThreads / kThreads) + threadIdx.x / kThreads;
  if (row >= args.rows) return;
  const int64_t first = row * args.width;
  float sum = 0;
  for (int64_t i = lane; i < args.width; i += kThreads) {
    const float x = load_one(args.x, args.x_dtype, first + i);
    sum += x * x;
  }
  const float factor = norm_factor(row_sum<kThreads>(sum), args);
  for (int64_t i = lane; i < args.width; i += kThreads) {
    const float x = load_one(args.x, args.x_dtype, first + i);
    const float w = load_one(args.weight, args.weight_dtype, i);
    store_one(x * factor * w, args.out, args.out_dtype, first + i);
  }
}

}  // namespace

void CudaDenseOps::rms_norm(const TensorView& x, const TensorView& weight, float eps,
                            MutableTensorView out, const Stream& stream) {
  const int64_t width = row_width(x);
  CADRE_ASSERT(weight.numel() == width && out.numel() == x.numel());
  const NormArgs args{x.data(),
                      x.dtype(),
                      weight.data(),
                      weight.dtype(),
                      out.mutable_data(),
                      out.dtype(),
                      num_rows(x),
                      width,
                      eps};
  if (args.rows == 0) return;
  const bool vectors = allows_vectors(x.data(), width) && allows_vectors(weight.data(), width) &&
                       allows_vectors(out.data(), width);
  const bool narrow = width <= 1024 / (vectors ? 1 : 4);  // a warp is enough
  const auto kernel = vectors ? (narrow ? norm_vectors_kernel<32> : norm_vectors_kernel<256>)
                              : (narrow ? norm_any_kernel<32> : norm_any_kernel<256>);
  const int64_t rows_per_block = narrow ? kBlockThreads / 32 : 1;
  launch("norm_kernel", kernel,
         dim3(static_cast<unsigned>((args.rows + rows_per_block - 1) / rows_per_block)),
         dim3(kBlockThreads), 0, stream_of(stream), dependent_launch(stream), args);
}

}  // namespace cadre::cuda

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
  const void* added;  // null, or [rows, width]: x is float32, becomes x + added, and is normalised
  DType added_dtype;
  const void* weight;  // null: ones
  DType weight_dtype;
  void* out;
  DType out_dtype;
  int64_t rows;
  int64_t width;
  float eps;
};

__device__ void load_weight(const NormArgs& args, int64_t i, float (&w)[8]) {
  if (args.weight != nullptr) return load_eight(args.weight, args.weight_dtype, i, w);
#pragma unroll
  for (float& x : w) x = 1.0f;
}

// x + added, which is kept in x.
__device__ void add_eight(const NormArgs& args, int64_t i, float (&x)[8]) {
  float y[8];
  load_eight(args.added, args.added_dtype, i, y);
#pragma unroll
  for (int j = 0; j < 8; ++j) x[j] += y[j];
  store_eight(x, const_cast<void*>(args.x), DType::kF32, i);
}

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
__global__ void __launch_bounds__(kBlockThreads)
    norm_vectors_kernel(const __grid_constant__ NormArgs args) {
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kBlockThreads / kThreads) + threadIdx.x / kThreads;
  const int64_t vectors = args.width / 8;
  float w[kKept][8];
  float x[kKept][8];
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t v = lane + i * kThreads;
    if (v < vectors) load_weight(args, 8 * v, w[i]);
  }
  begin_short();
  if (row >= args.rows) return;  // whole warps: kThreads is 32 or the block
  const int64_t first = row * args.width;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < kKept; ++i) {
    const int64_t v = lane + i * kThreads;
    if (v < vectors) load_eight(args.x, args.x_dtype, first + 8 * v, x[i]);
    if (v < vectors && args.added != nullptr) add_eight(args, first + 8 * v, x[i]);
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
    if (args.added != nullptr) add_eight(args, first + 8 * v, more);
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
    load_weight(args, 8 * v, scale);
#pragma unroll
    for (int j = 0; j < 8; ++j) more[j] *= factor * scale[j];
    store_eight(more, args.out, args.out_dtype, first + 8 * v);
  }
}

template <int kThreads>
__global__ void __launch_bounds__(kBlockThreads)
    norm_any_kernel(const __grid_constant__ NormArgs args) {
  begin_short();
  const int lane = static_cast<int>(threadIdx.x) % kThreads;
  const int64_t row =
      static_cast<int64_t>(blockIdx.x) * (kBlockThreads / kThreads) + threadIdx.x / kThreads;
  if (row >= args.rows) return;
  const int64_t first = row * args.width;
  float sum = 0;
  for (int64_t i = lane; i < args.width; i += kThreads) {
    float x = load_one(args.x, args.x_dtype, first + i);
    if (args.added != nullptr) {
      x += load_one(args.added, args.added_dtype, first + i);
      store_one(x, const_cast<void*>(args.x), DType::kF32, first + i);
    }
    sum += x * x;
  }
  const float factor = norm_factor(row_sum<kThreads>(sum), args);
  for (int64_t i = lane; i < args.width; i += kThreads) {
    const float x = load_one(args.x, args.x_dtype, first + i);
    const float w = args.weight != nullptr ? load_one(args.weight, args.weight_dtype, i) : 1.0f;
    store_one(x * factor * w, args.out, args.out_dtype, first + i);
  }
}

void norm(const NormArgs& args, const Stream& stream) {
  if (args.rows == 0) return;
  const bool vectors =
      allows_vectors(args.x, args.width) && allows_vectors(args.weight, args.width) &&
      allows_vectors(args.out, args.width) && allows_vectors(args.added, args.width);
  const bool narrow = args.width <= 1024 / (vectors ? 1 : 4);  // a warp is enough
  const auto kernel = vectors ? (narrow ? norm_vectors_kernel<32> : norm_vectors_kernel<256>)
                              : (narrow ? norm_any_kernel<32> : norm_any_kernel<256>);
  const int64_t rows_per_block = narrow ? kBlockThreads / 32 : 1;
  const auto blocks = static_cast<unsigned>((args.rows + rows_per_block - 1) / rows_per_block);
  launch("norm_kernel", kernel, dim3(blocks), dim3(kBlockThreads), 0, stream_of(stream),
         dependent_launch(stream), args);
}

}  // namespace

void CudaDenseOps::rms_norm(const TensorView& x, const TensorView& weight, float eps,
                            MutableTensorView out, const Stream& stream) {
  const int64_t width = row_width(x);
  CADRE_ASSERT((!weight || weight.numel() == width) && out.numel() == x.numel());
  NormArgs args = {};
  args.x = x.data();
  args.x_dtype = x.dtype();
  args.weight = weight.data();
  args.weight_dtype = weight.dtype();
  args.out = out.mutable_data();
  args.out_dtype = out.dtype();
  args.rows = num_rows(x);
  args.width = width;
  args.eps = eps;
  norm(args, stream);
}

void CudaDenseOps::add_rms_norm(MutableTensorView residual, const TensorView& x,
                                const TensorView& weight, float eps, MutableTensorView out,
                                const Stream& stream) {
  const int64_t width = row_width(residual);
  CADRE_ASSERT(residual.dtype() == DType::kF32 && weight.numel() == width &&
               x.numel() == residual.numel() && out.numel() == residual.numel());
  NormArgs args = {};
  args.x = residual.data();
  args.x_dtype = DType::kF32;
  args.added = x.data();
  args.added_dtype = x.dtype();
  args.weight = weight.data();
  args.weight_dtype = weight.dtype();
  args.out = out.mutable_data();
  args.out_dtype = out.dtype();
  args.rows = num_rows(residual);
  args.width = width;
  args.eps = eps;
  norm(args, stream);
}

}  // namespace cadre::cuda

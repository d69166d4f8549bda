// What models with images need besides: layer norm, plain activations, rows added or put at given
// places, angles of positions on several axes. Done once a picture, so nothing is tuned here.
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "backends/cuda/kernels/gate_function.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;

unsigned blocks_for(int64_t count) {
  return static_cast<unsigned>((count + kThreads - 1) / kThreads);
}

__device__ int64_t thread_index() {
  return static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
}

// Of all threads; every thread gets it.
__device__ float block_sum(float x) {
  __shared__ float sums[kThreads / 32];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (const float s : sums) total += s;
  return total;
}

struct LayerNormArgs {
  const void* x;
  DType x_dtype;
  const void* weight;
  DType weight_dtype;
  const void* bias;
  DType bias_dtype;
  void* out;
  DType out_dtype;
  int64_t width;
  float eps;
};

// A block for each row.
__global__ void __launch_bounds__(kThreads)
    layer_norm_kernel(const __grid_constant__ LayerNormArgs args) {
  begin_dependent();
  const int64_t first = blockIdx.x * args.width;
  const auto width = static_cast<float>(args.width);
  float sum = 0;
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    sum += load_one(args.x, args.x_dtype, first + i);
  }
  const float mean = block_sum(sum) / width;
  float squares = 0;
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    const float distance = load_one(args.x, args.x_dtype, first + i) - mean;
    squares += distance * distance;
  }
  const float factor = 1.0f / sqrtf(block_sum(squares) / width + args.eps);
  for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
    const float x = (load_one(args.x, args.x_dtype, first + i) - mean) * factor;
    store_one(
        x * load_one(args.weight, args.weight_dtype, i) + load_one(args.bias, args.bias_dtype, i),
        args.out, args.out_dtype, first + i);
  }
}

__global__ void __launch_bounds__(kThreads)
    plain_activation_kernel(const void* x, DType x_dtype, Activation activation, void* out,
                            DType out_dtype, int64_t count) {
  begin_dependent();
  const int64_t i = thread_index();
  if (i >= count) return;
  store_one(activate_on_device(load_one(x, x_dtype, i), activation), out, out_dtype, i);
}

__global__ void __launch_bounds__(kThreads)
    angles_on_axes_kernel(const int32_t* positions, const int32_t* axes, const float* inverse,
                          float scale, int64_t tokens, int64_t half, float* cos_out,
                          float* sin_out) {
  begin_dependent();
  const int64_t index = thread_index();
  if (index >= tokens * half) return;
  const int64_t i = index % half;
  const float angle = static_cast<float>(positions[axes[i] * tokens + index / half]) * inverse[i];
  float sine;
  float cosine;
  sincosf(angle, &sine, &cosine);
  cos_out[index] = cosine * scale;
  sin_out[index] = sine * scale;
}

struct RowsArgs {
  const void* from;  // rows of `width`
  DType from_dtype;
  const int32_t* rows;
  const float* weights;  // of add_weighted_rows
  int64_t parts;         // rows that are added to each of y's
  void* y;
  DType y_dtype;
  int64_t count;  // of elements
  int64_t width;
  bool adds;  // of scatter_rows
};

__global__ void __launch_bounds__(kThreads)
    add_weighted_rows_kernel(const __grid_constant__ RowsArgs args) {
  begin_dependent();
  const int64_t index = thread_index();
  if (index >= args.count) return;
  const int64_t row = index / args.width;
  const int64_t column = index % args.width;
  float y = load_one(args.y, args.y_dtype, index);
  for (int64_t j = 0; j < args.parts; ++j) {
    const int64_t at = row * args.parts + j;
    y += args.weights[at] *
         load_one(args.from, args.from_dtype, args.rows[at] * args.width + column);
  }
  store_one(y, args.y, args.y_dtype, index);
}

__global__ void __launch_bounds__(kThreads)
    scatter_rows_kernel(const __grid_constant__ RowsArgs args) {
  begin_dependent();
  const int64_t index = thread_index();
  if (index >= args.count) return;
  const int64_t to = args.rows[index / args.width] * args.width + index % args.width;
  float value = load_one(args.from, args.from_dtype, index);
  if (args.adds) value += load_one(args.y, args.y_dtype, to);
  store_one(value, args.y, args.y_dtype, to);
}

RowsArgs rows_args(const TensorView& from, const TensorView& rows, const MutableTensorView& y) {
  CADRE_ASSERT(row_width(from) == row_width(y));
  RowsArgs args = {};
  args.from = from.data();
  args.from_dtype = from.dtype();
  args.rows = rows.as<int32_t>();
  args.y = y.mutable_data();
  args.y_dtype = y.dtype();
  args.width = row_width(y);
  return args;
}

}  // namespace

void CudaDenseOps::layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias,
                              float eps, MutableTensorView out, const Stream& stream) {
  const int64_t width = row_width(x);
  CADRE_ASSERT(weight.numel() == width && bias.numel() == width && out.numel() == x.numel());
  if (x.numel() == 0) return;
  const LayerNormArgs args{x.data(),    x.dtype(),    weight.data(),      weight.dtype(),
                           bias.data(), bias.dtype(), out.mutable_data(), out.dtype(),
                           width,       eps};
  launch("layer_norm_kernel", layer_norm_kernel, static_cast<unsigned>(num_rows(x)), kThreads, 0,
         stream_of(stream), dependent_launch(stream), args);
}

void CudaDenseOps::plain_activation(const TensorView& x, Activation activation,
                                    MutableTensorView out, const Stream& stream) {
  CADRE_ASSERT(out.numel() == x.numel());
  if (x.numel() == 0) return;
  launch("plain_activation_kernel", plain_activation_kernel, blocks_for(x.numel()), kThreads, 0,
         stream_of(stream), dependent_launch(stream), x.data(), x.dtype(), activation,
         out.mutable_data(), out.dtype(), x.numel());
}

void CudaDenseOps::rope_angles_on_axes(const AxisPositions& where,
                                       const TensorView& inverse_frequencies, float scale,
                                       MutableTensorView cos, MutableTensorView sin,
                                       const Stream& stream) {
  const int64_t tokens = where.positions.dim(1);
  const int64_t half = inverse_frequencies.dim(0);
  CADRE_ASSERT(where.axes.dim(0) == half && cos.numel() == tokens * half &&
               sin.numel() == tokens * half);
  if (tokens * half == 0) return;
  launch("angles_on_axes_kernel", angles_on_axes_kernel, blocks_for(tokens * half), kThreads, 0,
         stream_of(stream), dependent_launch(stream), where.positions.as<int32_t>(),
         where.axes.as<int32_t>(), inverse_frequencies.as<float>(), scale, tokens, half,
         cos.as<float>(), sin.as<float>());
}

void CudaDenseOps::add_weighted_rows(const TensorView& table, const TensorView& rows,
                                     const TensorView& weights, MutableTensorView y,
                                     const Stream& stream) {
  CADRE_ASSERT(rows.dim(0) == num_rows(y) && weights.numel() == rows.numel());
  if (y.numel() == 0) return;
  RowsArgs args = rows_args(table, rows, y);
  args.weights = weights.as<float>();
  args.parts = rows.dim(1);
  args.count = y.numel();
  launch("add_weighted_rows_kernel", add_weighted_rows_kernel, blocks_for(args.count), kThreads, 0,
         stream_of(stream), dependent_launch(stream), args);
}

void CudaDenseOps::scatter_rows(const TensorView& x, const TensorView& rows, Accumulate accumulate,
                                MutableTensorView y, const Stream& stream) {
  CADRE_ASSERT(rows.dim(0) == num_rows(x));
  if (x.numel() == 0) return;
  RowsArgs args = rows_args(x, rows, y);
  args.count = x.numel();
  args.adds = accumulate == Accumulate::kAdd;
  launch("scatter_rows_kernel", scatter_rows_kernel, blocks_for(args.count), kThreads, 0,
         stream_of(stream), dependent_launch(stream), args);
}

}  // namespace cadre::cuda

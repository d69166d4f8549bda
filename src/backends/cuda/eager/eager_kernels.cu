#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/eager/eager_kernels.h"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;

// A block takes one row after the other.
dim3 grid_of(int64_t rows) { return dim3(static_cast<unsigned>(std::min<int64_t>(rows, 8192))); }

template <typename Element>
__global__ void gather_kernel(const Element* x, int64_t x_stride, const int32_t* pair_of_row,
                              int64_t rows, int64_t top_k, int64_t width, Element* out) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    const Element* from = x + pair_of_row[row] / top_k * x_stride;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) out[row * width + i] = from[i];
  }
}

__device__ float value_of(const Bias& bias, int64_t i) {
  if (bias.vector.data == nullptr) return 0;
  const int64_t at = i * bias.vector.stride;
  switch (bias.dtype) {
    case DType::kBF16:
      return __bfloat162float(static_cast<const __nv_bfloat16*>(bias.vector.data)[at]);
    case DType::kF16:
      return __half2float(static_cast<const __half*>(bias.vector.data)[at]);
    default:
      return static_cast<const float*>(bias.vector.data)[at];
  }
}

template <typename T>
__global__ void gate_kernel(GateFunction function, const float* gate, Bias gate_bias,
                            const float* up, Bias up_bias, int64_t rows, int64_t width, T* h) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const int64_t at = row * width + i;
      const float g = function.has_gate ? gate[at] + value_of(gate_bias, i) : 0;
      h[at] = static_cast<T>(apply(function, g, up[at] + value_of(up_bias, i)));
    }
  }
}

__global__ void bias_kernel(float* y, Bias bias, int64_t rows, int64_t width) {
  for (int64_t row = blockIdx.x; row < rows; row += gridDim.x) {
    for (int64_t i = threadIdx.x; i < width; i += kThreads) y[row * width + i] += value_of(bias, i);
  }
}

template <typename Element>
void gather(const TensorView& x, const int32_t* pair_of_row, int64_t rows, int64_t top_k, void* out,
            const Stream& stream) {
  launch("gather_rows_of_pairs", gather_kernel<Element>, grid_of(rows), dim3(kThreads), 0,
         stream_of(stream), Launch::kPlain, static_cast<const Element*>(x.data()), x.stride(0),
         pair_of_row, rows, top_k, x.dim(1), static_cast<Element*>(out));
}

template <typename T>
void gate_as(const GateFunction& function, const float* gate, const Bias& gate_bias,
             const float* up, const Bias& up_bias, int64_t rows, int64_t width, void* h,
             const Stream& stream) {
  launch("apply_gate", gate_kernel<T>, grid_of(rows), dim3(kThreads), 0, stream_of(stream),
         Launch::kPlain, function, gate, gate_bias, up, up_bias, rows, width, static_cast<T*>(h));
}

}  // namespace

void gather_rows_of_pairs(const TensorView& x, const int32_t* pair_of_row, int64_t rows,
                          int64_t top_k, void* out, const Stream& stream) {
  const auto run = size_of(x.dtype()) == 2 ? gather<uint16_t> : gather<uint32_t>;
  run(x, pair_of_row, rows, top_k, out, stream);
}

void apply_gate(const GateFunction& function, const float* gate, const Bias& gate_bias,
                const float* up, const Bias& up_bias, int64_t rows, int64_t width, void* h,
                DType dtype, const Stream& stream) {
  const auto run = dtype == DType::kBF16  ? gate_as<__nv_bfloat16>
                   : dtype == DType::kF16 ? gate_as<__half>
                                          : gate_as<float>;
  run(function, gate, gate_bias, up, up_bias, rows, width, h, stream);
}

void add_to_rows(float* y, const Bias& bias, int64_t rows, int64_t width, const Stream& stream) {
  launch("add_to_rows", bias_kernel, grid_of(rows), dim3(kThreads), 0, stream_of(stream),
         Launch::kPlain, y, bias, rows, width);
}

}  // namespace cadre::cuda

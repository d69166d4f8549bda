#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/matmul_bias.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;

template <typename Bias>
__global__ void add_bias_kernel(float* out, int64_t out_stride, int64_t m, int64_t n,
                                const Bias* bias, bool accumulate) {
  const int64_t column = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  if (column >= n) return;
  const float b = static_cast<float>(bias[column]);
  for (int64_t row = blockIdx.y; row < m; row += gridDim.y) {
    float& element = out[row * out_stride + column];
    element = accumulate ? element + b : b;
  }
}

template <typename Bias>
void add(float* out, int64_t out_stride, int64_t m, int64_t n, const void* bias, bool accumulate,
         const Stream& stream) {
  const dim3 grid(static_cast<unsigned>((n + kThreads - 1) / kThreads),
                  static_cast<unsigned>(std::min<int64_t>(m, 1024)));
  launch("add_bias", add_bias_kernel<Bias>, grid, dim3(kThreads), 0, stream_of(stream),
         Launch::kPlain, out, out_stride, m, n, static_cast<const Bias*>(bias), accumulate);
}

}  // namespace

void add_bias(float* out, int64_t out_stride, int64_t m, int64_t n, const void* bias,
              DType bias_dtype, bool accumulate, const Stream& stream) {
  const auto run = bias_dtype == DType::kBF16  ? add<__nv_bfloat16>
                   : bias_dtype == DType::kF16 ? add<__half>
                                               : add<float>;
  run(out, out_stride, m, n, bias, accumulate, stream);
}

}  // namespace cadre::cuda

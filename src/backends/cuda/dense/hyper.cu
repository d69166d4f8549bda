// Hyper-connections: n residual streams become what a sublayer sees, and its result goes back to
// all of them.
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"
#include "dense/compressed_ops.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kMaxStreams = static_cast<int>(kMaxHyperStreams);

struct CollapseCall {
  const float* streams;  // [num_tokens, n, width]
  const float* logits;
  const void* base;
  DType base_dtype;
  const void* scale;
  DType scale_dtype;
  float norm_eps;
  float eps;
  int64_t iterations;
  float* collapsed;
  float* post;  // null for the head
  float* mix;
  int32_t n;
  int64_t width;
};

__device__ float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// One warp; lane i has row i, then column i. mix [n, n] shared.
__device__ void sinkhorn(const CollapseCall& call, float* mix) {
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int32_t n = call.n;
  if (lane < n) {
    float* row = mix + lane * n;
    float max = row[0];
    for (int32_t i = 1; i < n; ++i) max = fmaxf(max, row[i]);
    float sum = 0;
    for (int32_t i = 0; i < n; ++i) sum += row[i] = expf(row[i] - max);
    for (int32_t i = 0; i < n; ++i) row[i] = row[i] / sum + call.eps;
  }
  const auto divide = [&](int32_t first, int32_t stride) {
    __syncwarp();
    if (lane < n) {
      float sum = 0;
      for (int32_t i = 0; i < n; ++i) sum += mix[first + i * stride];
      for (int32_t i = 0; i < n; ++i) mix[first + i * stride] /= sum + call.eps;
    }
    __syncwarp();
  };
  for (int64_t iteration = 0; iteration < call.iterations; ++iteration) {
    if (iteration > 0) divide(lane * n, 1);
    divide(lane, n);
  }
}

// A block for each token.
__global__ void __launch_bounds__(kThreads)
    collapse_kernel(const __grid_constant__ CollapseCall call) {
  __shared__ float sums[kThreads / 32];
  __shared__ float pre[kMaxStreams];
  __shared__ float mix[kMaxStreams * kMaxStreams];
  begin_dependent();
  const int64_t token = blockIdx.x;
  const int32_t n = call.n;
  const int64_t all = n * call.width;
  const float* streams = call.streams + token * all;
  float sum = 0;
  for (int64_t i = threadIdx.x; i < all; i += kThreads) sum += streams[i] * streams[i];
  sum = warp_sum(sum);
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = sum;
  __syncthreads();
  float total = 0;
  for (const float s : sums) total += s;
  const float factor = 1.0f / sqrtf(total / static_cast<float>(all) + call.norm_eps);
  const int32_t parts = call.post == nullptr ? n : (2 + n) * n;
  const auto part = [&](int32_t i) {
    const int32_t scale = min(i / n, 2);
    return call.logits[token * parts + i] * factor * load_one(call.scale, call.scale_dtype, scale) +
           load_one(call.base, call.base_dtype, i);
  };
  for (auto i = static_cast<int32_t>(threadIdx.x); i < parts; i += kThreads) {
    const float x = part(i);
    if (i < n) {
      pre[i] = sigmoid(x) + call.eps;
    } else if (i < 2 * n) {
      call.post[token * n + i - n] = 2.0f * sigmoid(x);
    } else {
      mix[i - 2 * n] = x;
    }
  }
  __syncthreads();
  for (int64_t c = threadIdx.x; c < call.width; c += kThreads) {
    float out = 0;
    for (int32_t i = 0; i < n; ++i) out += pre[i] * streams[i * call.width + c];
    call.collapsed[token * call.width + c] = out;
  }
  if (call.post == nullptr || threadIdx.x >= 32) return;
  sinkhorn(call, mix);
  for (auto i = static_cast<int32_t>(threadIdx.x); i < n * n; i += 32) {
    call.mix[token * n * n + i] = mix[i];
  }
}

// A thread for each channel of a token.
__global__ void __launch_bounds__(kThreads)
    expand_kernel(float* streams, const float* x, const float* post, const float* mix, int32_t n,
                  int64_t width, int64_t num_tokens) {
  begin_dependent();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= num_tokens * width) return;
  const int64_t token = index / width;
  float* own = streams + token * n * width + index % width;
  float before[kMaxStreams];
#pragma unroll
  for (int32_t j = 0; j < kMaxStreams; ++j) {
    if (j < n && post != nullptr) before[j] = own[j * width];
  }
  for (int32_t k = 0; k < n; ++k) {
    if (post == nullptr) {
      own[k * width] = x[index];
      continue;
    }
    float out = post[token * n + k] * x[index];
#pragma unroll
    for (int32_t j = 0; j < kMaxStreams; ++j) {
      if (j < n) out += mix[(token * n + j) * n + k] * before[j];
    }
    own[k * width] = out;
  }
}

}  // namespace

void CudaDenseOps::hyper_collapse(const HyperCollapseArgs& args, const Stream& stream) {
  const int64_t n = args.streams.dim(1);
  CADRE_ASSERT(n <= kMaxHyperStreams && args.logits.dim(1) == (args.post ? (2 + n) * n : n) &&
               args.base.numel() == args.logits.dim(1));
  if (args.streams.numel() == 0) return;
  CollapseCall call = {};
  call.streams = args.streams.as<float>();
  call.logits = args.logits.as<float>();
  call.base = args.base.data();
  call.base_dtype = args.base.dtype();
  call.scale = args.scale.data();
  call.scale_dtype = args.scale.dtype();
  call.norm_eps = args.norm_eps;
  call.eps = args.eps;
  call.iterations = args.sinkhorn_iterations;
  call.collapsed = args.collapsed.as<float>();
  if (args.post) {
    call.post = args.post.as<float>();
    call.mix = args.mix.as<float>();
  }
  call.n = static_cast<int32_t>(n);
  call.width = args.streams.dim(2);
  launch("collapse_kernel", collapse_kernel, static_cast<unsigned>(args.streams.dim(0)), kThreads,
         0, stream_of(stream), dependent_launch(stream), call);
}

void CudaDenseOps::hyper_expand(const HyperExpandArgs& args, const Stream& stream) {
  const int64_t n = args.streams.dim(1);
  const int64_t width = args.streams.dim(2);
  CADRE_ASSERT(n <= kMaxHyperStreams && args.x.dim(1) == width);
  if (args.x.numel() == 0) return;
  const auto blocks = static_cast<unsigned>((args.x.numel() + kThreads - 1) / kThreads);
  launch("expand_kernel", expand_kernel, blocks, kThreads, 0, stream_of(stream),
         dependent_launch(stream), args.streams.as<float>(), args.x.as<float>(),
         args.post ? args.post.as<float>() : nullptr, args.post ? args.mix.as<float>() : nullptr,
         static_cast<int32_t>(n), width, args.x.dim(0));
}

}  // namespace cadre::cuda

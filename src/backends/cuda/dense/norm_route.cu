// Norm, router product and routing of a few tokens in one launch: one cluster of blocks. Each block
// norms all tokens for itself, multiplies by its share of the router's rows, which it has asked for
// before the kernels ahead have ended, and sends the logits to the blocks that pick the tokens'
// experts, one block a token.
#include <cooperative_groups.h>

#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/mma.cuh"
#include "backends/cuda/dense/route.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kCluster = 16;
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kMaxTokens = 8;
constexpr int64_t kMaxShared = 160 * 1024;

struct NormRouteCall {
  const float* residual;  // [num_tokens, width]
  const void* norm;
  DType norm_dtype;
  float eps;
  void* x;           // [num_tokens, width]
  const void* gate;  // [num_experts, width]
  int64_t gate_stride;
  DType dtype;  // of x and gate
  int32_t width;
  RouteArgs route;  // its logits are not used
};

constexpr int32_t kPad = 32;  // elements behind a row in shared memory: two rows share no bank

// Shared memory: the block's rows of the gate, x of all tokens, partial sums of the warps, logits
// of the block's token, the picker's scratch.
struct Layout {
  int32_t rows;   // of the gate, a block
  int32_t pitch;  // of the gate's rows and x's
  int32_t x;      // bytes before each part
  int32_t sums;
  int32_t logits;
  int32_t scratch;
  int32_t bytes;

  Layout(const NormRouteCall& call, size_t scratch_bytes) {
    rows = (call.route.num_experts + kCluster - 1) / kCluster;
    pitch = (call.width + 31) / 32 * 32 + kPad;
    x = rows * pitch * 2;
    sums = x + static_cast<int32_t>(call.route.num_tokens) * pitch * 2;
    logits = sums + kWarps * rows * static_cast<int32_t>(kMaxTokens) * 4;
    scratch = logits + call.route.num_experts * 4;
    bytes = scratch + static_cast<int32_t>(scratch_bytes);
  }
};

__device__ uint4 zeros() { return {0, 0, 0, 0}; }

// The gate's rows into shared memory; what is beyond `width` becomes zeros.
__device__ void request_gate(const NormRouteCall& call, const Layout& layout, uint16_t* gate) {
  const int32_t pieces = (layout.pitch - kPad) / 8;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < layout.rows * pieces; i += kThreads) {
    const int32_t row = i / pieces;
    const int32_t k = (i - row * pieces) * 8;
    const int64_t expert = static_cast<int64_t>(blockIdx.x) * layout.rows + row;
    const bool valid = expert < call.route.num_experts && k < call.width;
    const auto* from =
        static_cast<const uint16_t*>(call.gate) + (valid ? expert * call.gate_stride + k : 0);
    copy_async(shared_address(gate + row * layout.pitch + k), from, valid);
  }
  commit_copies();
}

// The tokens' norms into shared memory; x in device memory is written by the blocks in turn.
template <int kTokens>
__device__ void norm_tokens(const NormRouteCall& call, const Layout& layout, uint16_t* x) {
  __shared__ float sums[kTokens][kWarps];
  const int32_t width = call.width;
  const auto tokens = static_cast<int>(call.route.num_tokens);
  const auto first = 8 * static_cast<int32_t>(threadIdx.x);
  constexpr int32_t kStride = 8 * kThreads;
  float sum[kTokens] = {};
  float kept[kTokens][8];  // of the first vector, which is all there is up to kStride
  for (int32_t i = first; i < width; i += kStride) {
    float v[kTokens][8];
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t < tokens) load_eight(call.residual, DType::kF32, t * width + i, v[t]);
    }
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        sum[t] += v[t][j] * v[t][j];
        if (i == first) kept[t][j] = v[t][j];
      }
    }
  }
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    const float total = warp_sum(sum[t]);
    if (threadIdx.x % 32 == 0) sums[t][threadIdx.x / 32] = total;
  }
  __syncthreads();
#pragma unroll
  for (int t = 0; t < kTokens; ++t) {
    sum[t] = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) sum[t] += sums[t][w];
    sum[t] = 1.0f / sqrtf(sum[t] / static_cast<float>(width) + call.eps);
  }
  for (int32_t i = first; i < layout.pitch - kPad; i += kStride) {
    float weight[8];
    if (i < width) load_eight(call.norm, call.norm_dtype, i, weight);
#pragma unroll
    for (int t = 0; t < kTokens; ++t) {
      if (t >= tokens) continue;
      if (i >= width) {
        *reinterpret_cast<uint4*>(x + t * layout.pitch + i) = zeros();
        continue;
      }
      if (i != first) load_eight(call.residual, DType::kF32, t * width + i, kept[t]);
#pragma unroll
      for (int j = 0; j < 8; ++j) kept[t][j] *= sum[t] * weight[j];
      store_eight(kept[t], x, call.dtype, t * layout.pitch + i);
      if (static_cast<int>(blockIdx.x) == t) {
        store_eight(kept[t], call.x, call.dtype, t * width + i);
      }
    }
  }
  __syncthreads();
}

// Logits of the block's rows of the gate, to the blocks that the tokens belong to. The warps share
// k, whose order is free as long as both sides have the same.
template <typename T>
__device__ void send_logits(const NormRouteCall& call, const Layout& layout, const uint16_t* gate,
                            const uint16_t* x, float* sums, float* logits) {
  const auto cluster = cooperative_groups::this_cluster();
  const auto tokens = static_cast<int32_t>(call.route.num_tokens);
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int group = lane / 4;
  for (int32_t row = 0; row < layout.rows; row += 16) {
    float acc[2][4] = {};
    for (int32_t k = 32 * warp + 8 * (lane % 4); k < layout.pitch - kPad; k += 32 * kWarps) {
      const auto read = [&](const uint16_t* from, int32_t i, int32_t count) {
        return i < count ? *reinterpret_cast<const uint4*>(from + i * layout.pitch + k) : zeros();
      };
      const uint4 low = read(gate, row + group, layout.rows);
      const uint4 high = read(gate, row + group + 8, layout.rows);
      const uint4 b = read(x, group, tokens);
      mma<T>(acc[0], low.x, high.x, low.y, high.y, b.x, b.y);
      mma<T>(acc[1], low.z, high.z, low.w, high.w, b.z, b.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int32_t at = row + group + 8 * (i / 2);
      const int32_t token = 2 * (lane % 4) + i % 2;
      if (at < layout.rows) {
        sums[(warp * layout.rows + at) * kMaxTokens + token] = acc[0][i] + acc[1][i];
      }
    }
  }
  __syncthreads();
  const auto first = static_cast<int32_t>(blockIdx.x) * layout.rows;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < layout.rows * kMaxTokens; i += kThreads) {
    const int32_t row = i / kMaxTokens;
    const int32_t token = i % kMaxTokens;
    if (token >= tokens || first + row >= call.route.num_experts) continue;
    float logit = 0;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) logit += sums[w * layout.rows * kMaxTokens + i];
    cluster.map_shared_rank(logits, token)[first + row] = logit;
  }
}

template <typename T, int kPerLane, int kTokens>
__global__ void __launch_bounds__(kThreads, 1)
    norm_route_kernel(const __grid_constant__ NormRouteCall call,
                      const __grid_constant__ Layout layout) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  extern __shared__ __align__(16) unsigned char memory[];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();
  auto* gate = reinterpret_cast<uint16_t*>(memory);
  auto* x = reinterpret_cast<uint16_t*>(memory + layout.x);
  auto* sums = reinterpret_cast<float*>(memory + layout.sums);
  auto* logits = reinterpret_cast<float*>(memory + layout.logits);
  request_gate(call, layout, gate);
  begin_short();
  norm_tokens<kTokens>(call, layout, x);
  wait_for_copies<0>();
  __syncthreads();
  cluster.barrier_wait();  // all blocks are there
  send_logits<T>(call, layout, gate, x, sums, logits);
  cluster.sync();
  const auto token = static_cast<int64_t>(blockIdx.x);
  if (token >= call.route.num_tokens || threadIdx.x >= 32) return;
  const Scratch scratch(memory + layout.scratch, call.route);
  route_token<kPerLane>(call.route, logits, scratch, token, static_cast<int>(threadIdx.x));
#endif
}

template <typename T, int kPerLane>
void run(const NormRouteCall& call, const Layout& layout, const Stream& stream) {
  const auto kernel = call.route.num_tokens == 1 ? norm_route_kernel<T, kPerLane, 1>
                                                 : norm_route_kernel<T, kPerLane, kMaxTokens>;
  allow_shared_memory(kernel, static_cast<size_t>(layout.bytes));
  CADRE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  launch_cluster("norm_route_kernel", kernel, dim3(kCluster), dim3(kThreads),
                 static_cast<size_t>(layout.bytes), stream_of(stream), dim3(kCluster), call,
                 layout);
}

template <typename T>
void run(const NormRouteCall& call, const Layout& layout, const Stream& stream) {
  if (call.route.num_experts <= 64) return run<T, 2>(call, layout, stream);
  if (call.route.num_experts <= 128) return run<T, 4>(call, layout, stream);
  if (call.route.num_experts <= 256) return run<T, 8>(call, layout, stream);
  run<T, 16>(call, layout, stream);
}

bool fits(const NormRouteArgs& args, const Stream& stream) {
  const TensorView& gate = args.gate.weight;
  const int64_t width = row_width(args.residual);
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  return has_large_clusters(stream) && args.residual.dim(0) <= kMaxTokens && width % 8 == 0 &&
         gate.dim(0) <= 512 && !args.gate.bias && gate.dtype() == args.x.dtype() &&
         gate.dtype() != DType::kF32 && gate.stride(1) == 1 && gate.stride(0) % 8 == 0 &&
         aligned(gate.data()) && aligned(args.residual.data()) && aligned(args.x.data()) &&
         aligned(args.norm.data());
}

}  // namespace

void CudaDenseOps::norm_and_route(const NormRouteArgs& args, Workspace& workspace,
                                  const Stream& stream) {
  const int64_t num_experts = args.gate.weight.dim(0);
  const int64_t top_k = args.top_k_index.dim(1);
  if (args.residual.dim(0) == 0) return;
  if (!fits(args, stream)) return DenseOps::norm_and_route(args, workspace, stream);
  validate(args.options, num_experts, top_k);
  CADRE_ASSERT(args.residual.dtype() == DType::kF32 &&
               args.gate.weight.dim(1) == row_width(args.residual));
  NormRouteCall call = {};
  call.residual = args.residual.as<float>();
  call.norm = args.norm.data();
  call.norm_dtype = args.norm.dtype();
  call.eps = args.eps;
  call.x = args.x.mutable_data();
  call.gate = args.gate.weight.data();
  call.gate_stride = args.gate.weight.stride(0);
  call.dtype = args.x.dtype();
  call.width = static_cast<int32_t>(row_width(args.residual));
  call.route = route_args({}, args.correction_bias, args.options, num_experts, args.top_k_index,
                          args.top_k_weights);
  const Layout layout(call, Scratch::bytes(num_experts, top_k, args.options));
  if (layout.bytes > kMaxShared) return DenseOps::norm_and_route(args, workspace, stream);
  if (call.dtype == DType::kBF16) return run<__nv_bfloat16>(call, layout, stream);
  run<__half>(call, layout, stream);
}

}  // namespace cadre::cuda

// The next token of each row of logits; here the greedy ones. A few rows: each is cut over the
// blocks of a cluster. Many, or a GPU without large clusters: over more blocks, and one block of a
// second launch takes the best of theirs.
#include <cooperative_groups.h>
#include <math_constants.h>

#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/sample.cuh"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kChunk = 8 * kThreads;  // logits of a block of best_of_chunk_kernel
constexpr int kCluster = 16;
constexpr int64_t kMaxClusterRows = 2;  // beyond, two launches are faster
constexpr int kClusterThreads = 1024;

__global__ void __launch_bounds__(kThreads)
    best_of_chunk_kernel(const float* logits, int64_t vocab, Best* chunks) {
  __shared__ Best shared[kThreads / 32];
  begin_dependent();
  const float* row = logits + blockIdx.y * vocab;
  Best best = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const int64_t id = blockIdx.x * kChunk + i * kThreads + threadIdx.x;
    if (id < vocab) {
      const Best one = best_of(row[id], id);
      best = one > best ? one : best;
    }
  }
  best = block_max(best, shared);
  if (threadIdx.x == 0) chunks[blockIdx.y * gridDim.x + blockIdx.x] = best;
}

__global__ void __launch_bounds__(kThreads)
    best_of_row_kernel(const Best* chunks, int64_t count, Drawn drawn) {
  __shared__ Best shared[kThreads / 32];
  begin_dependent();
  Best best = 0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    const Best one = chunks[blockIdx.x * count + i];
    best = one > best ? one : best;
  }
  best = block_max(best, shared);
  if (threadIdx.x == 0) drawn.store(blockIdx.x, gridDim.x, id_of(best));
}

// Grid: (kCluster, rows), a cluster for each row.
__global__ void __launch_bounds__(kClusterThreads)
    best_in_cluster_kernel(const float* logits, int64_t vocab, Drawn drawn) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __shared__ Best shared[kClusterThreads / 32];
  __shared__ Best of_blocks[kCluster];
  const auto cluster = cooperative_groups::this_cluster();
  cluster.barrier_arrive();
  begin_dependent();
  const float* row = logits + blockIdx.y * vocab;
  constexpr int kAtOnce = 8;
  constexpr int64_t kStep = static_cast<int64_t>(kCluster) * kClusterThreads;
  Best best = 0;
  for (int64_t first = blockIdx.x * kClusterThreads + threadIdx.x; first < vocab;
       first += kAtOnce * kStep) {
    float values[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      values[i] = first + i * kStep < vocab ? row[first + i * kStep] : CUDART_NAN_F;
    }
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const Best one = best_of(values[i], first + i * kStep);
      best = one > best ? one : best;
    }
  }
  best = block_max(best, shared);
  cluster.barrier_wait();  // all blocks are there
  if (threadIdx.x == 0) *cluster.map_shared_rank(&of_blocks[blockIdx.x], 0) = best;
  cluster.sync();
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  for (const Best other : of_blocks) best = other > best ? other : best;
  drawn.store(blockIdx.y, gridDim.y, id_of(best));
#endif
}

int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

void sample_greedy_in_two(const SampleArgs& args, Workspace& workspace, const Stream& stream) {
  const int64_t rows = args.logits.dim(0);
  const int64_t vocab = args.logits.dim(1);
  const int64_t chunks = chunks_of(vocab);
  const Workspace::Scope scope(workspace);
  auto* best = workspace.allocate<Best>(rows * chunks);
  const Launch mode = dependent_launch(stream);
  launch("best_of_chunk_kernel", best_of_chunk_kernel,
         dim3(static_cast<unsigned>(chunks), static_cast<unsigned>(rows)), kThreads, 0,
         stream_of(stream), mode, args.logits.as<float>(), vocab, best);
  launch("best_of_row_kernel", best_of_row_kernel, static_cast<unsigned>(rows), kThreads, 0,
         stream_of(stream), mode, static_cast<const Best*>(best), chunks, drawn_of(args));
}

void sample_greedy_in_one(const SampleArgs& args, const Stream& stream) {
  CADRE_CUDA_CHECK(cudaFuncSetAttribute(best_in_cluster_kernel,
                                        cudaFuncAttributeNonPortableClusterSizeAllowed, 1));
  launch_cluster("best_in_cluster_kernel", best_in_cluster_kernel,
                 dim3(kCluster, static_cast<unsigned>(args.logits.dim(0))), kClusterThreads, 0,
                 stream_of(stream), dim3(kCluster), args.logits.as<float>(), args.logits.dim(1),
                 drawn_of(args));
}

}  // namespace

void CudaDenseOps::sample(const SampleArgs& args, Workspace& workspace, const Stream& stream) {
  const int64_t rows = args.logits.dim(0);
  CADRE_ASSERT(args.ids.dim(0) == rows && rows < 65536 && args.logits.dim(1) >= 1);
  if (rows == 0) return;
  if (args.temperature != 0.0f || args.repetition_penalty != 1.0f) {
    return sample_draw(args, stream);
  }
  if (rows <= kMaxClusterRows && has_large_clusters(stream)) {
    return sample_greedy_in_one(args, stream);
  }
  sample_greedy_in_two(args, workspace, stream);
}

size_t CudaDenseOps::sample_workspace_bytes(int64_t num_rows, int64_t vocab_size) const {
  return Workspace::padded(static_cast<size_t>(num_rows * chunks_of(vocab_size)) * sizeof(Best));
}

}  // namespace cadre::cuda

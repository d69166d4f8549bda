// The next token of each row of logits; here the greedy ones. A row is cut over many blocks, then
// one block takes the best of theirs. (In one launch of a cluster of 16 it took longer.)
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/sample.cuh"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int64_t kChunk = 8 * kThreads;  // logits of a block of best_of_chunk_kernel

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

int64_t chunks_of(int64_t vocab) { return (vocab + kChunk - 1) / kChunk; }

void sample_greedy(const SampleArgs& args, Workspace& workspace, const Stream& stream) {
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

}  // namespace

void CudaDenseOps::sample(const SampleArgs& args, Workspace& workspace, const Stream& stream) {
  const int64_t rows = args.logits.dim(0);
  CADRE_ASSERT(args.ids.dim(0) == rows && rows < 65536 && args.logits.dim(1) >= 1);
  if (rows == 0) return;
  if (args.temperature != 0.0f || args.repetition_penalty != 1.0f) {
    return sample_draw(args, stream);
  }
  sample_greedy(args, workspace, stream);
}

size_t CudaDenseOps::sample_workspace_bytes(int64_t num_rows, int64_t vocab_size) const {
  return Workspace::padded(static_cast<size_t>(num_rows * chunks_of(vocab_size)) * sizeof(Best));
}

}  // namespace cadre::cuda

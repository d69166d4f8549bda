// What drawing kernels share: logits in the order of preference, and where a drawn id goes.
#pragma once

#include "backends/cuda/dense/values.cuh"
#include "core/check.h"
#include "dense/dense_ops.h"

namespace cadre::cuda {

// Larger is better: the value's order above, the complement of the id below; 0 is nothing at all.
using Best = unsigned long long;

__device__ inline Best best_of(float value, int64_t id) {
  if (isnan(value)) return 0;
  return static_cast<Best>(key_of(value)) << 32 | static_cast<uint32_t>(~static_cast<uint32_t>(id));
}
__device__ inline int32_t id_of(Best best) {
  return best == 0 ? -1 : static_cast<int32_t>(~static_cast<uint32_t>(best));
}

// Of all threads; every thread gets it. `shared` [warps].
__device__ inline Best block_max(Best best, Best* shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) {
    const Best other = __shfl_xor_sync(~0u, best, step);
    best = other > best ? other : best;
  }
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = best;
  __syncthreads();
  const int warps = static_cast<int>(blockDim.x) / 32;
  for (int i = 0; i < warps; ++i) best = shared[i] > best ? shared[i] : best;
  return best;
}

// Where drawn ids go. SampleArgs::next, when there is one.
struct Drawn {
  int32_t* ids;
  int32_t* token_ids;  // null: there is no next step
  int32_t* positions;
  int32_t* spans;
  int32_t* host_ids;

  // By one thread, which has the row to itself.
  __device__ void store(int64_t row, int64_t rows, int32_t id) const {
    ids[row] = id;
    if (token_ids == nullptr) return;
    const int32_t position = positions[row];
    host_ids[position % 2 * rows + row] = id;
    token_ids[row] = max(id, 0);
    positions[row] = position + 1;
    spans[4 * row + 3] = position + 1;
  }
};

inline Drawn drawn_of(const SampleArgs& args) {
  Drawn drawn = {};
  drawn.ids = args.ids.as<int32_t>();
  if (!args.next.token_ids) return drawn;
  const int64_t rows = args.logits.dim(0);
  CADRE_ASSERT(args.next.token_ids.dim(0) == rows && args.next.positions.dim(0) == rows &&
               args.next.spans.dim(0) == rows && args.next.host_ids != nullptr);
  drawn.token_ids = args.next.token_ids.as<int32_t>();
  drawn.positions = args.next.positions.as<int32_t>();
  drawn.spans = args.next.spans.as<int32_t>();
  drawn.host_ids = args.next.host_ids;
  return drawn;
}

/// Draws that are not greedy, or greedy with a penalty.
void sample_draw(const SampleArgs& args, const Stream& stream);

}  // namespace cadre::cuda

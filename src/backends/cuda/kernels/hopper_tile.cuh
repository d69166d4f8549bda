// What the parts of the Hopper grouped GEMM share: tile sizes, shared memory, parameters.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backends/cuda/kernels/hopper_gemm.h"
#include "backends/cuda/kernels/ptx.cuh"

namespace cadre::cuda::hopper {

/// Where the rows of a product come from.
enum class Rows {
  kSorted,  // a matrix
  kCut,     // a matrix, and the last pieces of work are cut along K
  kSort,    // tokens, sorted into a matrix on the way
  kGather,  // tokens, each tile from where they lie
};

/// CTAs that share rows or weights. Gathered rows are not shared, and calls that gather have few
/// rows an expert: there a CTA is on its own and waits for no other.
inline constexpr int kClusterSize = 2;
template <Rows kRows>
inline constexpr int kClusterOf = kRows == Rows::kGather ? 1 : kClusterSize;

inline constexpr int kTileRows = 128;
inline constexpr int kTileColumns = 256;  // of the weights: with a gate 128 of gate and 128 of up
inline constexpr int kTileK = 64;         // 128 bytes, the width of the swizzle
inline constexpr int kStages = 4;
inline constexpr int kConsumers = 2;  // warpgroups
inline constexpr int kThreads = 128 * (kConsumers + 1);
inline constexpr uint32_t kRowBoxBytes = kHopperRowBox * kTileK * 2;
inline constexpr uint32_t kWeightBoxBytes = kHopperWeightBox * kTileK * 2;
inline constexpr uint32_t kRowBytes = kTileRows * kTileK * 2;
inline constexpr uint32_t kStageBytes = kRowBytes + kTileColumns * kTileK * 2;
inline constexpr uint32_t kWarpStagingBytes = 4096;  // 16 rows of 256 bytes

/// What a CTA does with the stages that follow.
struct Piece {
  int32_t row;     // of out, the tile's first
  int32_t rows;    // of the tile; 0: nothing to compute, -1: no more work
  int32_t column;  // of out
  int32_t expert;
};

inline constexpr int kMails = 8;  // one CTA's loader is at most a ring ahead of the other's

struct Shared {
  alignas(16) Piece pieces[kStages];
  uint64_t full[kStages];   // loaded
  uint64_t empty[kStages];  // read by both CTAs
  uint64_t mail_there[kMails];
  int32_t mail[kMails];  // the cluster's next piece of work
};

inline constexpr size_t kSharedBytes = kStages * kStageBytes + kConsumers * 4 * kWarpStagingBytes +
                                       sizeof(Shared) + 1024;  // 1024 to align the stages

struct Params {
  CUtensorMap rows;
  CUtensorMap weights;
  CUtensorMap up_weights;
  // Rows to sort or to gather.
  const char* x;
  int64_t x_stride;  // bytes
  bool x_aligned;    // to 16 bytes
  const int32_t* pair_of_row;
  int32_t top_k;
  char* sorted;                   // where `rows` looks
  uint32_t* sort_taken;           // rows
  uint32_t* sorted_rows;          // of each tile
  const int32_t* expert_offsets;  // null: experts have equal shares of max_rows
  int32_t max_rows;
  uint32_t* claimed;  // pieces of work that clusters have taken beyond their first
  int32_t num_experts;
  int32_t n;
  int32_t k;
  int32_t column_tiles;
  int32_t k_tiles;
  int32_t group_pairs;  // pairs of row tiles that take turns at a column tile
  bool special;         // biases, or another gate function than plain SwiGLU
  bool apply_gate;
  GateFunction gate;
  DType bias_dtype;
  DeviceVectors bias;
  DeviceVectors up_bias;
  void* out;
  int64_t out_stride;
  CUtensorMap out_boxes;
  float* partial_sums;  // null: no piece is cut along K
  uint32_t* partial_turns;

  __device__ int32_t first_row(int32_t expert) const {
    if (expert_offsets != nullptr) return expert_offsets[expert];
    return expert * (max_rows / num_experts);
  }
};

/// Where a warp is in the ring of stages.
struct Ring {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

__device__ inline uint32_t stage_address(uint32_t base, int stage) {
  return base + static_cast<uint32_t>(stage) * kStageBytes;
}

}  // namespace cadre::cuda::hopper

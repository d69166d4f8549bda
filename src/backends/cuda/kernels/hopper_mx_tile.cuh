// What the parts of the kernel of hopper_mx_kernel.cuh share: tiles, their memory, parameters, and
// which tile comes next.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/hopper_mx_decode.cuh"
#include "backends/cuda/kernels/hopper_mx_gemm.h"

namespace cadre::cuda {
namespace mx {

using hopper::e8m0_bf16x2;
using hopper::wgmma_registers;

constexpr int kHalf = 128;  // weight rows of one box, two of them a tile
constexpr int kTileK = 64;
constexpr int kConsumers = 2;  // warpgroups
constexpr int kThreads = 128 * (kConsumers + 1);
// Registers of a thread; 128 * loader + 256 * consumer <= 65536.
constexpr int kLoaderRegisters = 40;
constexpr int kConsumerRegisters = 232;

/// kColumns: rows of tokens, the columns of a product.
template <typename Weights, int kColumns>
struct Tile {
  static constexpr int kRowBytes = kColumns * kTileK * 2;
  static constexpr int kBoxBytes = kHalf * Weights::kRowBytes;
  static constexpr int kStageBytes = kRowBytes + 2 * kBoxBytes;
  static constexpr int kStages = std::min(16, 200 * 1024 / kStageBytes);
  static constexpr int kStagingBytes = kColumns * 128;  // of a warpgroup: 64 columns of bf16
};

struct Piece {
  int32_t row;     // of out, the tile's first
  int32_t rows;    // of the tile; -1: no more work
  int32_t column;  // of out
  int32_t expert;
};

template <int kStages>
struct Shared {
  alignas(16) Piece pieces[kStages];
  uint64_t full[kStages];
  uint64_t empty[kStages];
};

template <typename T>
constexpr size_t kSharedBytes = T::kStages* T::kStageBytes + kConsumers* T::kStagingBytes +
                                sizeof(Shared<T::kStages>);

/// Bytes from one scale to the next in each direction; along K they are neighbours.
struct Scales {
  const uint8_t* first;
  int64_t expert_stride;
  int64_t row_stride;
};

/// Of FP8: where the scales of activations and weights lie.
struct Fp8Scales {
  const float* rows;  // [groups of 128 of K][row_stride]
  int64_t row_stride;
  int64_t block_rows;  // 0: all
  bool is_e8m0;
  int64_t scale_row_stride;  // in scales, as the next three
  int64_t scale_col_stride;  // 0: one block of columns
  int64_t up_row_offset;
  int64_t row_offset;
};

struct Params {
  CUtensorMap rows;
  CUtensorMap weights;
  CUtensorMap up_weights;
  Scales scales;
  Scales up_scales;
  const int32_t* expert_offsets;
  int32_t num_experts;
  int32_t n;
  int32_t column_tiles;
  int32_t k_tiles;
  bool plain;  // no bias; the gate function, if there is one, is SwiGLU
  bool apply_gate;
  bool out_placed;
  GateFunction gate;
  DType bias_dtype;
  DeviceVectors bias;
  DeviceVectors up_bias;
  Fp8Scales fp8;
  void* out;
  DType out_dtype;
};

template <int kStages>
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

// ---- which tile --------------------------------------------------------------------------------

/// Finds tiles by their numbers, which ascend: experts in order, in each of them column tiles, in
/// each of them row tiles, so that an expert's weights come from memory once. A warp together: a
/// lane knows one of 32 experts.
template <int kRows>
class Schedule {
 public:
  /// Tiles of kRows rows of tokens and `columns` columns of out.
  __device__ Schedule(const Params& p, int32_t columns) : p_(p), columns_(columns) {
    read_experts();
  }

  /// False when there is no such tile.
  __device__ bool find(int32_t item, Piece& piece) {
    while (item >= end_) {
      base_ += 32;
      if (base_ >= p_.num_experts) return false;
      read_experts();
    }
    const int lane = __popc(__ballot_sync(~0u, start_ <= item)) - 1;
    const int32_t rest = item - __shfl_sync(~0u, start_, lane);
    const int32_t rows = __shfl_sync(~0u, rows_, lane);
    const int32_t tiles = (rows + kRows - 1) / kRows;
    const int32_t row = rest % tiles * kRows;
    piece = {__shfl_sync(~0u, first_row_, lane) + row, min(kRows, rows - row),
             rest / tiles * columns_, base_ + lane};
    return true;
  }

 private:
  // Rows and first tiles of the 32 experts from base_ on.
  __device__ void read_experts() {
    const int lane = threadIdx.x % 32;
    const int32_t expert = min(base_ + lane, p_.num_experts);
    first_row_ = p_.expert_offsets[expert];
    rows_ = p_.expert_offsets[min(expert + 1, p_.num_experts)] - first_row_;
    const int32_t tiles = (rows_ + kRows - 1) / kRows * p_.column_tiles;
    int32_t sum = tiles;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    start_ = end_ + sum - tiles;
    end_ += __shfl_sync(~0u, sum, 31);
  }

  const Params& p_;
  int32_t columns_;
  int32_t base_ = 0;  // the expert of lane 0
  int32_t end_ = 0;   // tiles before the expert behind lane 31's
  int32_t start_ = 0;
  int32_t first_row_ = 0;
  int32_t rows_ = 0;
};

}  // namespace mx
}  // namespace cadre::cuda

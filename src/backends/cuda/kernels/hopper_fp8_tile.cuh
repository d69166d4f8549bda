// What the FP8 grouped GEMM has beyond the parts of the 16-bit one (hopper_tile.cuh): scales.
#pragma once

#include "backends/cuda/kernels/hopper_fp8_gemm.h"
#include "backends/cuda/kernels/hopper_tile.cuh"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda::hopper {

inline constexpr int32_t kFp8TileK = 128;  // 128 bytes, the width of the swizzle
inline constexpr int kHalfColumns = 128;   // of a tile: one box of weights

/// The scales of one stage: of the tile's rows, and words with those of the weights of both halves
/// of its columns, two blocks of rows each.
struct StageScales {
  float rows[kTileRows];
  uint32_t weights[4];
};

struct Fp8Shared : Shared {
  StageScales scales[kStages];
};

inline constexpr size_t kFp8SharedBytes =
    kStages * kStageBytes + kConsumers * 4 * kWarpStagingBytes + sizeof(Fp8Shared);

/// Scales of a projection's weights; strides in bytes.
struct WeightScales {
  const char* first;
  int64_t expert_stride;
  int64_t row_stride;
  int32_t column_stride;  // 0: one block of columns
  int32_t row_offset;
};

inline WeightScales to_scales(const DeviceMatrices& m, const ScaleLayout& layout) {
  const auto size = static_cast<int64_t>(size_of(layout.dtype));
  const int64_t step = layout.block_cols == 0 ? 0 : m.first.scale_col_stride * size;
  return {static_cast<const char*>(m.first.scales), m.scale_expert_bytes,
          m.first.scale_row_stride * size, static_cast<int32_t>(step),
          static_cast<int32_t>(m.first.scale_row_offset)};
}

struct Fp8Params : Params {
  const float* row_scales;
  int64_t row_scale_stride;
  WeightScales scales;
  WeightScales up_scales;
  int32_t block_rows;
  bool e8m0;
  float* out_scales;
  int64_t out_scale_stride;
  bool accumulate;       // float32 results: add them to what is there
  bool beside_previous;  // the kernel ahead may still run
};

/// The scales of 128 rows of weights, one of the halves of a tile, along K. Blocks have 128 rows or
/// more, so there are at most two: with `row_offset` rows of another matrix ahead, the border may
/// lie inside.
struct HalfScales {
  const char* first;
  int64_t second;  // bytes further on; 0: there is one block alone
  int32_t border;  // columns of the half under the first

  __device__ HalfScales(const Fp8Params& p, const WeightScales& w, int32_t expert, int32_t column) {
    const int32_t at = min(column, p.n - 1) + w.row_offset;
    const int32_t block = at / p.block_rows;
    const int32_t last = (p.n - 1 + w.row_offset) / p.block_rows;
    first = w.first + expert * w.expert_stride + block * w.row_stride;
    second = block < last ? w.row_stride : 0;
    border = block < last ? min((block + 1) * p.block_rows - at, kHalfColumns) : kHalfColumns;
  }
};

template <bool kGated>
__device__ HalfScales half_scales(const Fp8Params& p, int32_t expert, int32_t column, int half) {
  if (half == 0) return {p, p.scales, expert, column};
  return {p, kGated ? p.up_scales : p.scales, expert, kGated ? column : column + kHalfColumns};
}

/// Copied as the aligned word that it lies in: E8M0 is a byte of it.
__device__ inline const char* word_of(const char* scale) {
  return reinterpret_cast<const char*>(reinterpret_cast<uintptr_t>(scale) & ~uintptr_t{3});
}

/// A half's scales in the stages' words.
struct HalfReader {
  int32_t border;
  uint32_t byte;         // of E8M0: the place of the first block's scale of K = 0 in its word
  uint32_t second_byte;  // of the second block's
  uint32_t step;

  __device__ HalfReader(const HalfScales& half, const WeightScales& w)
      : border(half.border),
        byte(static_cast<uint32_t>(reinterpret_cast<uintptr_t>(half.first))),
        second_byte(byte + static_cast<uint32_t>(half.second)),
        step(static_cast<uint32_t>(w.column_stride)) {}

  __device__ bool is_split() const { return border < kHalfColumns; }
  __device__ float first(bool e8m0, uint32_t word, int32_t k) const {
    return value(e8m0, word, byte + static_cast<uint32_t>(k) * step);
  }
  __device__ float second(bool e8m0, uint32_t word, int32_t k) const {
    return value(e8m0, word, second_byte + static_cast<uint32_t>(k) * step);
  }

 private:
  __device__ static float value(bool e8m0, uint32_t word, uint32_t at) {
    if (!e8m0) return __uint_as_float(word);
    return e8m0_value(static_cast<uint8_t>(word >> (at % 4 * 8)));
  }
};

}  // namespace cadre::cuda::hopper

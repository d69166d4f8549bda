// What the kernels of products with few rows share: which weight a tile belongs to, and its
// outputs.
#pragma once

#include "backends/cuda/dense/linear_rows.h"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"

namespace cadre::cuda {

/// Numbers the tiles of `columns` weight rows through all parts; returns how many there are.
inline int32_t set_tiles(LinearRows& args, int64_t columns) {
  int64_t tiles = 0;
  for (int p = 0; p < args.num_parts; ++p) {
    args.parts[p].first_tile = static_cast<int32_t>(tiles);
    tiles += (args.parts[p].n + columns - 1) / columns;
  }
  CADRE_ASSERT(tiles < INT32_MAX);
  return static_cast<int32_t>(tiles);
}

#ifdef __CUDACC__

__device__ inline int part_of(const LinearRows& args, int32_t tile) {
  int p = 0;
  while (p + 1 < args.num_parts && tile >= args.parts[p + 1].first_tile) ++p;
  return p;
}

/// What is added to a sum: bias and residual.
__device__ inline float output_base(const LinearPart& part, int64_t row, int64_t column) {
  float base = part.bias != nullptr ? load_one(part.bias, part.bias_dtype, column) : 0.0f;
  if (part.accumulate) base += load_one(part.out, part.out_dtype, row * part.out_stride + column);
  return base;
}

__device__ inline uint4 load_shared(uint32_t address) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(address)
               : "memory");
  return v;
}

/// What a thread has to do with the outputs of a batch of tiles of a block: output i is sum
/// i % S::kSums of its tile i / S::kSums, of S::kColumns weight rows.
template <typename S>
struct Output {
  const LinearPart* part;
  int64_t row;
  int64_t column;
  bool is_there;

  __device__ Output(const LinearRows& args, int32_t first_tile, int32_t num_tiles, int i) {
    const int32_t tile = first_tile + i / S::kSums * static_cast<int32_t>(gridDim.x);
    const int sum = i % S::kSums;
    is_there = tile < num_tiles;
    part = &args.parts[part_of(args, is_there ? tile : 0)];
    row = sum / S::kColumns;
    column = static_cast<int64_t>(tile - part->first_tile) * S::kColumns + sum % S::kColumns;
    is_there = is_there && row < args.rows && column < part->n;
  }
};

#endif

/// For x and weights that vectors of 16 bytes do not fit.
void linear_rows_unaligned(LinearRows& args, const Stream& stream);
/// Float32.
void linear_rows_floats(LinearRows& args, bool vectors, const Stream& stream);

}  // namespace cadre::cuda

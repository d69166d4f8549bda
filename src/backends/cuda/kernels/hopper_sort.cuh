// Rows of tokens brought into the order of experts by warps that would idle, while the first tiles
// are multiplied. A tile's rows are counted; the loader waits for its tile alone. Warps take rows
// as they come, so that the CTAs that run finish the work whichever they are.
#pragma once

#include "backends/cuda/kernels/hopper_tile.cuh"

namespace cadre::cuda::hopper {

/// Where the rows of an expert's tile are counted: one place for each tile of any routing.
__device__ inline int32_t count_of_tile(int32_t expert, int32_t first_row, int32_t tile) {
  return first_row / kTileRows + expert + tile;
}

class Sorter {
 public:
  __device__ explicit Sorter(const Params& p) : p_(p), lane_(threadIdx.x % 32) {}

  /// One warp; returns when all rows are taken.
  __device__ void run() {
    const int32_t num_rows = p_.expert_offsets[p_.num_experts];
    read_experts();
    for (int32_t row = __shfl_sync(~0u, take(), 0); row < num_rows;) {
      const int32_t next = take();  // on its way during the copy
      const int32_t pair = row + lane_ < num_rows ? p_.pair_of_row[row + lane_] : 0;
      const int32_t end = min(row + kRowsAtOnce, num_rows);
      for (int32_t r = row; r < end; ++r) {
        const int32_t token = __shfl_sync(~0u, pair, r - row) / p_.top_k;
        copy_row(p_.x + token * p_.x_stride, p_.sorted + r * static_cast<int64_t>(p_.k) * 2);
      }
      tell(row, end);
      row = __shfl_sync(~0u, next, 0);
    }
  }

 private:
  static constexpr int kRowsAtOnce = 4;
  static constexpr int kPieces = 6;  // of 16 bytes in flight

  // The first row of the next ones, in lane 0.
  __device__ int32_t take() const {
    return lane_ == 0 ? static_cast<int32_t>(atomicAdd(p_.sort_taken, kRowsAtOnce)) : 0;
  }

  // First rows of the 32 experts from base_ on.
  __device__ void read_experts() {
    first_row_ = p_.expert_offsets[min(base_ + lane_, p_.num_experts)];
    end_row_ = p_.expert_offsets[min(base_ + 32, p_.num_experts)];
  }

  // Lane i counts row first + i.
  __device__ void tell(int32_t first, int32_t end) {
    ptx::fence_async_proxy_global();
    __syncwarp();
    for (int32_t row = first; row < end; ++row) {
      while (row >= end_row_) {
        base_ += 32;
        read_experts();
      }
      const unsigned begun =
          __ballot_sync(~0u, first_row_ <= row && base_ + lane_ < p_.num_experts);
      const int lane = __popc(begun) - 1;
      const int32_t tile = (row - __shfl_sync(~0u, first_row_, lane)) / kTileRows;
      const int32_t count = count_of_tile(base_ + lane, __shfl_sync(~0u, first_row_, lane), tile);
      if (lane_ == row - first) count_ = count;
    }
    if (lane_ < end - first) ptx::add_release(p_.sorted_rows + count_);
  }

  __device__ void copy_row(const char* from, char* to) const {
    if (!p_.x_aligned) return copy_elements(from, to);
    const int32_t bytes = p_.k * 2;
    for (int32_t first = lane_ * 16; first < bytes; first += kPieces * 512) {
      int4 pieces[kPieces];
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (first + i * 512 < bytes)
          pieces[i] = *reinterpret_cast<const int4*>(from + first + i * 512);
      }
#pragma unroll
      for (int i = 0; i < kPieces; ++i) {
        if (first + i * 512 < bytes) *reinterpret_cast<int4*>(to + first + i * 512) = pieces[i];
      }
    }
  }

  __device__ void copy_elements(const char* from, char* to) const {
    for (int32_t i = lane_; i < p_.k; i += 32) {
      reinterpret_cast<uint16_t*>(to)[i] = reinterpret_cast<const uint16_t*>(from)[i];
    }
  }

  const Params& p_;
  int32_t lane_;
  int32_t base_ = 0;  // the expert of lane 0
  int32_t first_row_ = 0;
  int32_t end_row_ = 0;  // of the 32 experts
  int32_t count_ = 0;    // where the lane's row is counted
};

}  // namespace cadre::cuda::hopper

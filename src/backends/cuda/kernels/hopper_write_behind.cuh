// Results written while the next tile is multiplied, by the copy engine: what a tile's end costs
// the products is the gate function and a copy of 128 columns to shared memory.
#pragma once

#include "backends/cuda/kernels/hopper_write.cuh"

namespace cadre::cuda::hopper {

/// A warp's 16 rows of a tile. 128 columns lie in its staging as the two boxes of p.out_boxes; with
/// 256 columns the other half waits in registers until those have left.
template <typename T, bool kGated>
class Writer {
 public:
  __device__ Writer(const Params& p, char* staging)
      : p_(p), staging_(ptx::shared_address(staging)) {}

  /// The tile before has been sent.
  __device__ void begin(const Piece& piece, int warpgroup, const float (&sums)[128]) {
    const int32_t warp_row = warpgroup * 64 + static_cast<int32_t>(threadIdx.x / 32 % 4) * 16;
    const int32_t rows = piece.rows - warp_row;
    if (rows <= 0) return;
    row_ = piece.row + warp_row;
    column_ = piece.column;
    free_staging();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      store(j, result(sums, 8 * j), result(sums, 8 * j + 2), result(sums, 8 * j + 4),
            result(sums, 8 * j + 6));
    }
    if (!kGated) {
#pragma unroll
      for (int i = 0; i < 32; ++i) later_[i] = result(sums, 64 + 2 * i);
    }
    send(rows);
    if (!kGated) {
      column_ += 128;
      rows_left_ = column_ < p_.n ? rows : 0;
      steps_ = kStepsBetween;
    }
  }

  /// At each stage of the next tile: sends the other half when the first one is likely to have left
  /// shared memory.
  __device__ void step() {
    if (--steps_ == 0) send_rest();
  }

  /// The other half, if it has not been sent.
  __device__ void send_rest() {
    if (kGated || rows_left_ == 0) return;
    free_staging();
#pragma unroll
    for (int j = 0; j < 8; ++j) {
      store(j, later_[4 * j], later_[4 * j + 1], later_[4 * j + 2], later_[4 * j + 3]);
    }
    send(rows_left_);
    rows_left_ = 0;
  }

  /// What was sent lies in out.
  __device__ void finish() {
    send_rest();
    ptx::wait_for_stores();
  }

 private:
  static constexpr int kBoxBytes = 16 * 128;
  static constexpr int32_t kStepsBetween = 4;

  __device__ void free_staging() {
    ptx::wait_until_stores_read();  // lane 0's
    __syncwarp();
  }

  // Results i and i + 1.
  __device__ static uint32_t result(const float (&sums)[128], int i) {
    if (!kGated) return ptx::pack(sums[i], sums[i + 1], T());
    float h[2] = {sums[i], sums[i + 1]};
    swiglu_pair(h, {sums[64 + i % 64], sums[65 + i % 64]});
    return ptx::pack(h[0], h[1], T());
  }

  // 16 bytes of a row, in the swizzle of 128 bytes.
  __device__ uint32_t place(int row, int chunk) const {
    return staging_ +
           static_cast<uint32_t>(chunk / 8 * kBoxBytes + row * 128 + ((chunk ^ row) % 8 << 4));
  }

  // 16 columns, chunks 2 j and 2 j + 1.
  __device__ void store(int j, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    const int lane = threadIdx.x % 32;
    ptx::store_matrices(place(lane % 16, 2 * j + lane / 16), a, b, c, d);
  }

  // 128 columns from column_ on. The copy engine knows out's columns, but no end of an expert.
  __device__ void send(int32_t rows) {
    if (rows < 16) return write_rows(rows);
    ptx::fence_async_proxy();
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
#pragma unroll
      for (int box = 0; box < 2; ++box) {
        if (column_ + 64 * box < p_.n) {
          ptx::store_2d(&p_.out_boxes, column_ + 64 * box, row_, staging_ + box * kBoxBytes);
        }
      }
      ptx::commit_stores();
    }
  }

  __device__ void write_rows(int32_t rows) {
    __syncwarp();
    const int lane = threadIdx.x % 32;
    const int32_t column = column_ + lane % 16 * 8;
    char* out = static_cast<char*>(p_.out) + row_ * p_.out_stride * 2 + column * int64_t{2};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      const int row = 2 * i + lane / 16;
      const int4 piece = ptx::load_shared_16(place(row, lane % 16));
      if (row < rows && column < p_.n) {
        *reinterpret_cast<int4*>(out + row * p_.out_stride * 2) = piece;
      }
    }
  }

  const Params& p_;
  uint32_t staging_;
  int32_t row_ = 0;
  int32_t column_ = 0;
  int32_t rows_left_ = 0;
  int32_t steps_ = 0;
  uint32_t later_[kGated ? 1 : 32] = {};
};

}  // namespace cadre::cuda::hopper

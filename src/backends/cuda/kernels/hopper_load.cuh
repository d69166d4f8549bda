// The loading side of the Hopper grouped GEMM: weights through tensor maps, rows likewise or
// gathered from where the tokens lie. It alone knows the order of work: with the first stage of a
// piece it tells consumers its place.
#pragma once

#include "backends/cuda/kernels/hopper_schedule.cuh"

namespace cadre::cuda::hopper {

inline constexpr uint16_t kBothCtas = 3;

template <bool kGated>
__device__ int32_t first_column(const Piece& piece) {
  return piece.column * (kGated ? kHopperWeightBox : kTileColumns);
}

/// What consumers see: columns of out, and no rows where the column tile lies beyond it.
template <bool kGated>
__device__ Piece to_consumers(const Params& p, Piece piece) {
  piece.column = first_column<kGated>(piece);
  if (piece.column >= p.n) piece.rows = 0;
  return piece;
}

/// In a pair each CTA loads one half of the weights for both, else its own weights.
template <bool kGated>
__device__ void load_weights(const Params& p, const Place& place, uint32_t rank, int32_t k,
                             uint32_t address, uint32_t barrier) {
  const int32_t column = first_column<kGated>(place.piece);
  const int32_t second = kGated ? column : column + kHopperWeightBox;
  const CUtensorMap* second_map = kGated ? &p.up_weights : &p.weights;
  const int32_t expert = place.piece.expert;
  if (place.pair) {
    const CUtensorMap* map = rank == 0 ? &p.weights : second_map;
    ptx::multicast_3d(address + rank * kWeightBoxBytes, map, k, rank == 0 ? column : second, expert,
                      barrier, kBothCtas);
    return;
  }
  ptx::load_3d(address, &p.weights, k, column, expert, barrier);
  ptx::load_3d(address + kWeightBoxBytes, second_map, k, second, expert, barrier);
}

/// In a pair each CTA loads its own rows, else one half of the rows for both.
__device__ inline void load_rows(const Params& p, const Place& place, int boxes, uint32_t rank,
                                 int32_t k, uint32_t address, uint32_t barrier) {
  const int32_t row = place.piece.row;
  if (place.pair) {
    ptx::load_2d(address, &p.rows, k, row, barrier);
    if (boxes == 2) {
      ptx::load_2d(address + kRowBoxBytes, &p.rows, k, row + kHopperRowBox, barrier);
    }
  } else if (static_cast<int>(rank) < boxes) {
    ptx::multicast_2d(address + rank * kRowBoxBytes, &p.rows, k,
                      row + static_cast<int32_t>(rank) * kHopperRowBox, barrier, kBothCtas);
  }
}

/// One warp: rows and weights through tensor maps.
template <bool kGated>
__device__ void load_all(const Params& p, Shared& shared, uint32_t stages) {
  const uint32_t rank = ptx::cluster_rank();
  const bool leader = threadIdx.x % 32 == 0;
  Schedule schedule(p, rank);
  Place place;
  Ring ring;
  while (schedule.next(place)) {
    if (leader) {
      const int boxes = place.piece.rows > kHopperRowBox ? 2 : 1;
      for (int32_t t = 0; t < p.k_tiles; ++t, ring.advance()) {
        const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
        const uint32_t address = stage_address(stages, ring.stage);
        ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
        if (t == 0) shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);
        ptx::arrive_expect_bytes(full, boxes * kRowBoxBytes + 2 * kWeightBoxBytes);
        load_weights<kGated>(p, place, rank, t * kTileK, address + kRowBytes, full);
        load_rows(p, place, boxes, rank, t * kTileK, address, full);
      }
    }
    __syncwarp();
  }
  if (leader) {
    ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    shared.pieces[ring.stage].rows = -1;
    ptx::arrive(ptx::shared_address(&shared.full[ring.stage]));
  }
}

/// A thread's part of a gathered tile: 16 bytes of every sixteenth row, in the 128-byte swizzle.
class Gatherer {
 public:
  static constexpr int kRowStep = 16;
  static constexpr int kCount = kTileRows / kRowStep;

  __device__ Gatherer(const Params& p)
      : p_(p),
        chunk_(static_cast<int32_t>(threadIdx.x % 8)),
        first_(static_cast<int32_t>(threadIdx.x % 128 / 8)) {}

  __device__ void start_tile(const Piece& piece) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t row = first_ + i * kRowStep;
      token_[i] = row < piece.rows ? p_.pair_of_row[piece.row + row] : -1;
    }
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (token_[i] >= 0) token_[i] /= p_.top_k;
    }
  }

  __device__ void load(int32_t k, uint32_t address, uint32_t barrier) const {
    const int32_t column = k + chunk_ * 8;
    const uint32_t bytes = column < p_.k ? 16 : 0;  // zeros beyond K
    const char* from = p_.x + (bytes != 0 ? column * 2 : 0);
    const uint32_t to =
        address + static_cast<uint32_t>(first_ * 128 + ((chunk_ ^ (first_ % 8)) << 4));
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      if (token_[i] >= 0) {
        ptx::copy_16(to + i * kRowStep * 128, from + token_[i] * p_.x_stride, bytes);
      }
    }
    ptx::arrive_when_copied(barrier);
  }

 private:
  const Params& p_;
  int32_t chunk_;
  int32_t first_;
  int32_t token_[kCount];
};

/// One warpgroup: weights through tensor maps, rows from the tokens.
template <bool kGated>
__device__ void gather_all(const Params& p, Shared& shared, uint32_t stages) {
  const uint32_t rank = ptx::cluster_rank();
  const bool leader = threadIdx.x % 128 == 0;
  Schedule schedule(p, rank);
  Gatherer gatherer(p);
  Place place;
  Ring ring;
  while (schedule.next(place)) {
    gatherer.start_tile(place.piece);
    for (int32_t t = 0; t < p.k_tiles; ++t, ring.advance()) {
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      const uint32_t address = stage_address(stages, ring.stage);
      ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (leader) {
        if (t == 0) shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);
        ptx::arrive_expect_bytes(full, 2 * kWeightBoxBytes);
        load_weights<kGated>(p, place, rank, t * kTileK, address + kRowBytes, full);
      }
      __syncwarp();
      gatherer.load(t * kTileK, address, full);
    }
  }
  const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
  ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
  if (leader) {
    shared.pieces[ring.stage].rows = -1;
    ptx::arrive(full);
  }
  ptx::arrive(full);
}

}  // namespace cadre::cuda::hopper

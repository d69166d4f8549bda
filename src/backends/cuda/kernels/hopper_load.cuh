// The loading side of the Hopper grouped GEMM: weights and rows through tensor maps. It alone knows
// the order of work: with the first stage of a piece it tells consumers its place.
#pragma once

#include "backends/cuda/kernels/hopper_cut.cuh"

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

/// When the loader takes its next piece and sends its number round: some stages before it needs it.
struct ClaimTimes {
  int32_t take;
  int32_t send;

  __device__ explicit ClaimTimes(int32_t k_tiles)
      : take(max(0, k_tiles - kStages)), send(min(take + 1, k_tiles - 1)) {}
};

/// The weights of a piece's first stages; how many of them.
template <bool kGated>
__device__ int32_t load_first_weights(const Params& p, Shared& shared, uint32_t stages,
                                      const Place& place, uint32_t rank, uint32_t bytes) {
  const int32_t count = min(kStages, p.k_tiles);
  for (int32_t t = 0; t < count; ++t) {
    const uint32_t full = ptx::shared_address(&shared.full[t]);
    ptx::arrive_expect_bytes(full, bytes);
    load_weights<kGated>(p, place, rank, t * kTileK, stage_address(stages, t) + kRowBytes, full);
  }
  return count;
}

__device__ inline uint32_t bytes_of_stage(const Piece& piece) {
  return (piece.rows > kHopperRowBox ? 2 : 1) * kRowBoxBytes + 2 * kWeightBoxBytes;
}

__device__ inline void wait_until_sorted(const Params& p, const Place& place) {
  while (ptx::load_acquire(p.sorted_rows + place.count) < static_cast<uint32_t>(place.piece.rows)) {
  }
  ptx::fence_async_proxy_global();
}

/// Finds pieces and their parts by the numbers of work.
template <Rows kRows>
class Work {
 public:
  __device__ Work(const Params& p, uint32_t rank) : p_(p), schedule_(p, rank) {
    if (kRows == Rows::kCut) {
      parts_ = Parts(schedule_.pieces(), static_cast<int32_t>(gridDim.x) / kClusterOf<kRows>);
    }
  }

  __device__ bool find(int32_t item, Place& place, Part& part) {
    if constexpr (kRows == Rows::kCut) {
      item = parts_.find(p_, item, part);
    } else {
      part = {0, p_.k_tiles, -1};
    }
    return schedule_.find(item, place);
  }

 private:
  const Params& p_;
  Schedule<kClusterOf<kRows>> schedule_;
  Parts parts_;  // kCut
};

/// One warp. The kernel before this one computes the rows: the first weights are on their way while
/// it ends. With Rows::kSort it is the plan, and the rows are those of the tokens, sorted by other
/// warps.
template <bool kGated, Rows kRows>
__device__ void load_all(const Params& p, GemmShared& shared, uint32_t stages) {
  if (kRows == Rows::kSort) cudaGridDependencySynchronize();
  const uint32_t rank = ptx::cluster_rank();
  const bool leader = threadIdx.x % 32 == 0;
  ClaimTimes times(p.k_tiles);
  Claims<kClusterOf<kRows>> claims(p, shared, rank);
  Work<kRows> work(p, rank);
  Place place;
  Part part;
  Ring ring;
  bool more = work.find(claims.first(), place, part);  // a whole one
  int32_t ahead = 0;                                   // stages whose weights are on their way
  if (more && leader) {
    shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);  // before the first arrival
    if (kRows == Rows::kCut) shared.parts[ring.stage] = part;
    ahead = load_first_weights<kGated>(p, shared, stages, place, rank, bytes_of_stage(place.piece));
  }
  if (kRows != Rows::kSort) cudaGridDependencySynchronize();
  ptx::launch_dependents();
  while (more) {
    if (leader) {
      const int boxes = place.piece.rows > kHopperRowBox ? 2 : 1;
      const uint32_t bytes = bytes_of_stage(place.piece);
#pragma unroll 1
      for (int32_t t = 0; t < part.count; ++t, ring.advance()) {
        const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
        const uint32_t address = stage_address(stages, ring.stage);
        const int32_t k = (part.first + t) * kTileK;
        ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
        if (t == 0 && ahead == 0) {
          shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);
          if (kRows == Rows::kCut) shared.parts[ring.stage] = part;
        }
        if (t >= ahead) {
          ptx::arrive_expect_bytes(full, bytes);
          load_weights<kGated>(p, place, rank, k, address + kRowBytes, full);
        }
        if (kRows == Rows::kSort && t == 0) wait_until_sorted(p, place);
        load_rows(p, place, boxes, rank, k, address, full);
        if (t == times.take) claims.take();
        if (t == times.send) claims.send();
      }
      ahead = 0;
    }
    __syncwarp();
    more = work.find(claims.receive(), place, part);
    if (kRows == Rows::kCut) times = ClaimTimes(part.count);
  }
  if (leader) {
    ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    shared.pieces[ring.stage].rows = -1;
    ptx::arrive(ptx::shared_address(&shared.full[ring.stage]));
  }
}

}  // namespace cadre::cuda::hopper

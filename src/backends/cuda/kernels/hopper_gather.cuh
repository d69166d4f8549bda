// Rows of tokens loaded from where they lie: for few rows an expert, when weights from memory are
// the limit, this costs nothing.
#pragma once

#include "backends/cuda/kernels/hopper_load.cuh"

namespace cadre::cuda::hopper {

/// A thread's part of a gathered tile: 16 bytes of every sixteenth row, in the 128-byte swizzle.
class Gatherer {
 public:
  static constexpr int kRowStep = 16;
  static constexpr int kCount = kTileRows / kRowStep;

  __device__ Gatherer(const Params& p)
      : p_(p),
        chunk_(static_cast<int32_t>(threadIdx.x % 8)),
        first_(static_cast<int32_t>(threadIdx.x % 128 / 8)) {}

  /// Asks for the tile's rows; know_rows() waits for the answer.
  __device__ void ask_for_rows(const Piece& piece) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t row = first_ + i * kRowStep;
      token_[i] = row < piece.rows ? p_.pair_of_row[piece.row + row] : -1;
    }
  }
  __device__ void know_rows() {
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

/// One warpgroup: weights through tensor maps, rows from the tokens. The kernel before is the plan.
template <bool kGated>
__device__ void gather_all(const Params& p, Shared& shared, uint32_t stages) {
  cudaGridDependencySynchronize();
  ptx::launch_dependents();
  const uint32_t rank = ptx::cluster_rank();
  const bool leader = threadIdx.x % 128 == 0;
  const ClaimTimes times(p.k_tiles);
  Claims<kClusterOf<Rows::kGather>> claims(p, shared, rank);
  Schedule<kClusterOf<Rows::kGather>> schedule(p, rank);
  Gatherer gatherer(p);
  Place place;
  Ring ring;
  bool more = schedule.find(claims.first(), place);
  int32_t ahead = 0;  // stages whose weights are on their way before the rows are known
  if (more && leader) {
    shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);  // before the first arrival
    ahead = load_first_weights<kGated>(p, shared, stages, place, rank, 2 * kWeightBoxBytes);
  }
  while (more) {
    gatherer.ask_for_rows(place.piece);
    for (int32_t t = 0; t < p.k_tiles; ++t, ring.advance()) {
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      const uint32_t address = stage_address(stages, ring.stage);
      ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (leader) {
        if (t == 0 && ahead == 0) shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);
        if (t >= ahead) {
          ptx::arrive_expect_bytes(full, 2 * kWeightBoxBytes);
          load_weights<kGated>(p, place, rank, t * kTileK, address + kRowBytes, full);
        }
        if (t == times.take) claims.take();
        if (t == times.send) claims.send();
      }
      __syncwarp();
      if (t == 0) gatherer.know_rows();  // the weights need not wait for them
      gatherer.load(t * kTileK, address, full);
    }
    ahead = 0;
    more = schedule.find(claims.receive(), place);
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

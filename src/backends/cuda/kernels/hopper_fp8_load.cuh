// The loading side of the FP8 grouped GEMM: load_all() of hopper_load.cuh, with the scales of each
// stage beside its tiles. Read by the consumers from global memory one stage ahead they took 2000
// cycles to come, twice the products of a stage.
#pragma once

#include "backends/cuda/kernels/hopper_fp8_tile.cuh"
#include "backends/cuda/kernels/hopper_load.cuh"

namespace cadre::cuda::hopper {

/// A lane's part of a stage's scales: every thirty-second row, and in the first four lanes a block
/// of the weights.
class ScaleCopies {
 public:
  static constexpr int kRowCount = kTileRows / 32;
  static constexpr int kBlocks = 4;

  template <bool kGated>
  __device__ static ScaleCopies of(const Fp8Params& p, const Piece& piece) {
    ScaleCopies copies;
    const int lane = threadIdx.x % 32;
    copies.rows_ = p.row_scales + piece.row + lane;
    copies.row_count_ = p.max_rows - piece.row - lane;
    if (lane < kBlocks) {
      const int32_t column = first_column<kGated>(piece);
      const HalfScales half = half_scales<kGated>(p, piece.expert, column, lane / 2);
      copies.block_ = half.first + (lane % 2 == 0 ? 0 : half.second);
      copies.block_step_ = (lane < 2 || !kGated ? p.scales : p.up_scales).column_stride;
    }
    return copies;
  }

  __device__ void start(const Fp8Params& p, int32_t k, StageScales& to, uint32_t barrier) const {
    const int lane = threadIdx.x % 32;
    const float* from = rows_ + k * p.row_scale_stride;
#pragma unroll
    for (int i = 0; i < kRowCount; ++i) {
      if (32 * i < row_count_) {
        ptx::copy_4(ptx::shared_address(&to.rows[lane + 32 * i]), from + 32 * i);
      }
    }
    if (lane < kBlocks) {
      ptx::copy_4(ptx::shared_address(&to.weights[lane]),
                  word_of(block_ + static_cast<int64_t>(k) * block_step_));
    }
    ptx::arrive_when_copied(barrier);
  }

 private:
  const float* rows_ = nullptr;
  int32_t row_count_ = 0;  // from this lane's on
  const char* block_ = nullptr;
  int32_t block_step_ = 0;
};

/// One warp. The kernel before this one computes the rows: the first weights are on their way while
/// it ends.
template <bool kGated>
__device__ void load_with_scales(const Fp8Params& p, Fp8Shared& shared, uint32_t stages) {
  const uint32_t rank = ptx::cluster_rank();
  const bool leader = threadIdx.x % 32 == 0;
  const ClaimTimes times(p.k_tiles);
  Claims<kClusterSize> claims(p, shared, rank);
  Schedule<kClusterSize> schedule(p, rank);
  Place place;
  Ring ring;
  bool more = schedule.find(claims.first(), place);
  int32_t ahead = 0;  // stages whose weights are on their way
  if (more && leader) {
    shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);  // before the first arrival
    for (; ahead < min(kStages, p.k_tiles); ++ahead) {
      const uint32_t full = ptx::shared_address(&shared.full[ahead]);
      ptx::arrive_expect_bytes(full, bytes_of_stage(place.piece));
      load_weights<kGated>(p, place, rank, ahead * kFp8TileK,
                           stage_address(stages, ahead) + kRowBytes, full);
    }
  }
  if (!p.beside_previous) cudaGridDependencySynchronize();
  ptx::launch_dependents();
  while (more) {
    const int boxes = place.piece.rows > kHopperRowBox ? 2 : 1;
    const ScaleCopies scales = ScaleCopies::of<kGated>(p, place.piece);
    for (int32_t t = 0; t < p.k_tiles; ++t, ring.advance()) {
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      const uint32_t address = stage_address(stages, ring.stage);
      ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (leader) {
        if (t == 0 && ahead == 0) shared.pieces[ring.stage] = to_consumers<kGated>(p, place.piece);
        if (t >= ahead) {
          ptx::arrive_expect_bytes(full, bytes_of_stage(place.piece));
          load_weights<kGated>(p, place, rank, t * kFp8TileK, address + kRowBytes, full);
        }
        load_rows(p, place, boxes, rank, t * kFp8TileK, address, full);
        if (t == times.take) claims.take();
        if (t == times.send) claims.send();
      }
      __syncwarp();
      scales.start(p, t, shared.scales[ring.stage], full);
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

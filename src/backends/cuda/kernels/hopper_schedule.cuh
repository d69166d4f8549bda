// The order of work of the Hopper grouped GEMM. A cluster's piece of work is either a pair of row
// tiles of one expert at one column tile, or a last odd row tile at two column tiles; that of a CTA
// on its own is one row tile at one column tile. Pieces of an expert follow each other rows first,
// so that its weights come from memory once. Clusters take the next piece when they are about to be
// done with theirs: pieces differ in length.
#pragma once

#include "backends/cuda/kernels/hopper_sort.cuh"

namespace cadre::cuda::hopper {

struct Place {
  Piece piece;    // its column counts tiles
  bool pair;      // else a single row tile
  int32_t count;  // of the tile's sorted rows
};

/// The numbers of the cluster's pieces. One thread of its first CTA takes them and sends them to
/// the loaders of all.
template <int kCluster>
class Claims {
 public:
  __device__ Claims(const Params& p, Shared& shared, uint32_t rank)
      : p_(p), shared_(shared), rank_(rank) {}

  __device__ static int32_t first() { return static_cast<int32_t>(blockIdx.x / kCluster); }

  /// One thread of each CTA, once for each piece; `send` some time later, for the time it takes.
  __device__ void take() {
    if (kCluster > 1) {
      ptx::arrive_expect_bytes(ptx::shared_address(&shared_.mail_there[slot_]), sizeof(int32_t));
    }
    if (rank_ == 0) {
      taken_ = static_cast<int32_t>(gridDim.x / kCluster + atomicAdd(p_.claimed, 1u));
    }
  }
  __device__ void send() {
    if (rank_ != 0) return;
    [[maybe_unused]] const uint32_t mail = ptx::shared_address(&shared_.mail[slot_]);
    const uint32_t there = ptx::shared_address(&shared_.mail_there[slot_]);
    if constexpr (kCluster == 1) {
      *const_cast<volatile int32_t*>(&shared_.mail[slot_]) = taken_;
      ptx::arrive(there);
    } else {
      for (uint32_t cta = 0; cta < kCluster; ++cta) {
        ptx::store_in_cluster(ptx::address_in_cta(mail, cta), taken_,
                              ptx::address_in_cta(there, cta));
      }
    }
  }

  /// All threads that load.
  __device__ int32_t receive() {
    ptx::wait(ptx::shared_address(&shared_.mail_there[slot_]), parity_);
    const int32_t item = *const_cast<volatile int32_t*>(&shared_.mail[slot_]);
    if (++slot_ == kMails) {
      slot_ = 0;
      parity_ ^= 1;
    }
    return item;
  }

 private:
  const Params& p_;
  Shared& shared_;
  uint32_t rank_;
  int slot_ = 0;
  uint32_t parity_ = 0;
  int32_t taken_ = 0;
};

/// Finds pieces by their numbers, which ascend. All lanes of a warp together: a lane knows one of
/// 32 experts.
template <int kCluster>
class Schedule {
 public:
  __device__ Schedule(const Params& p, uint32_t rank) : p_(p), rank_(static_cast<int32_t>(rank)) {
    read_experts();
  }

  /// Of the first 32 experts.
  __device__ int32_t pieces() const { return end_; }

  /// False when there is no such piece.
  __device__ bool find(int32_t item, Place& place) {
    while (item >= end_) {
      base_ += 32;
      if (base_ >= p_.num_experts) return false;
      read_experts();
    }
    const int lane = __popc(__ballot_sync(~0u, start_ <= item)) - 1;
    const int32_t rest = item - __shfl_sync(~0u, start_, lane);
    const int32_t rows = __shfl_sync(~0u, rows_, lane);
    place_in_expert(base_ + lane, __shfl_sync(~0u, first_row_, lane), rows, rest, place);
    return true;
  }

 private:
  // Rows and first pieces of the 32 experts from base_ on.
  __device__ void read_experts() {
    const int lane = threadIdx.x % 32;
    const int32_t expert = min(base_ + lane, p_.num_experts);
    first_row_ = p_.first_row(expert);
    rows_ = p_.first_row(min(expert + 1, p_.num_experts)) - first_row_;
    const int32_t tiles = (rows_ + kTileRows - 1) / kTileRows;
    const int32_t pieces =
        kCluster == 1 ? tiles * p_.column_tiles
                      : tiles / 2 * p_.column_tiles + tiles % 2 * ((p_.column_tiles + 1) / 2);
    int32_t sum = pieces;
    for (int step = 1; step < 32; step *= 2) {
      const int32_t below = __shfl_up_sync(~0u, sum, step);
      if (lane >= step) sum += below;
    }
    start_ = end_ + sum - pieces;
    end_ += __shfl_sync(~0u, sum, 31);
  }

  __device__ void place_in_expert(int32_t expert, int32_t first_row, int32_t rows, int32_t rest,
                                  Place& place) const {
    const int32_t tiles = (rows + kTileRows - 1) / kTileRows;
    if (kCluster == 1) {
      place.pair = false;
      place_tile(expert, first_row, rows, rest % tiles, rest / tiles, place);
      return;
    }
    const int32_t pairs = tiles / 2;
    const int32_t groups = max(1, (pairs + p_.group_pairs - 1) / p_.group_pairs);
    const int32_t group = min(rest / (p_.group_pairs * p_.column_tiles), groups - 1);
    rest -= group * p_.group_pairs * p_.column_tiles;
    const int32_t first_pair = group * p_.group_pairs;
    const int32_t group_pairs = min(p_.group_pairs, pairs - first_pair);
    const int32_t singles = group == groups - 1 ? tiles % 2 : 0;
    const int32_t round = 2 * group_pairs + singles;  // all pieces of two column tiles
    const int32_t turn = rest % round;
    int32_t column = rest / round * 2;
    int32_t tile = tiles - 1;
    place.pair = turn < group_pairs || turn >= group_pairs + singles;
    if (place.pair) {
      const int32_t second = turn >= group_pairs ? 1 : 0;
      column += second;
      tile = 2 * (first_pair + turn - second * (group_pairs + singles)) + rank_;
    } else {
      column += rank_;
    }
    place_tile(expert, first_row, rows, tile, column, place);
  }

  __device__ static void place_tile(int32_t expert, int32_t first_row, int32_t rows, int32_t tile,
                                    int32_t column, Place& place) {
    const int32_t row = tile * kTileRows;
    place.count = count_of_tile(expert, first_row, tile);
    place.piece = {first_row + row, min(kTileRows, rows - row), column, expert};
  }

  const Params& p_;
  int32_t rank_;
  int32_t base_ = 0;       // the expert of lane 0
  int32_t end_ = 0;        // pieces before the expert behind lane 31's
  int32_t start_ = 0;      // pieces before the lane's expert
  int32_t first_row_ = 0;  // of the lane's expert
  int32_t rows_ = 0;
};

}  // namespace cadre::cuda::hopper

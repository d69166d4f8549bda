// Streaming rows of weights through shared memory into tiles: each warp is on its own, with a ring
// of stages that its asynchronous copies fill. A block has a list of tiles; the list's chunks of k
// are split evenly over the block's warps, so a tile at the border of two warps is the sum of two
// parts, added in the order of warps at the end. All of it is a function of the routed ids.
#pragma once

#include "backends/cuda/batched_mm/plan.cuh"
#include "backends/cuda/batched_mm/tiles.cuh"

namespace cadre::cuda {

#ifdef __CUDACC__

inline constexpr int kChunkBytes = 128;  // of a row in one stage

/// A ring of kStages stages for each of kWarps warps. A stage holds 16 * kM rows of weights, the
/// upper 8 * kM of them a half of their own (up beside gate), and 8 * kN rows of tokens.
template <int kWarps_, int kM_, int kN_, int kStages_>
struct StreamShape {
  static constexpr int kWarps = kWarps_;
  static constexpr int kM = kM_;
  static constexpr int kN = kN_;
  static constexpr int kStages = kStages_;
  static constexpr int kHalf = 8 * kM;
  static constexpr int kHalfBytes = kHalf * kChunkBytes;
  static constexpr int kStageBytes = 2 * kHalfBytes + 8 * kN * kChunkBytes;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPartFloats = kM * kN * 4 * 32;
  // Ring and one part for each warp; the other part lies in the ring when that has run dry.
  static constexpr int kBytes = kWarps * (kRingBytes + kPartFloats * 4);
  static_assert(kRingBytes >= kPartFloats * 4);
};

/// Where the rows of a tile are: two halves of up to 8 * kM rows, and the entry's tokens.
struct TileRows {
  const char* low;  // first row of the lower half, and so on
  const char* high;
  int64_t stride;  // bytes
  int low_rows;
  int high_rows;
  int first;  // of plan.row
  int count;  // tokens
};

/// The matrix that all tiles multiply: rows of x or h.
struct TokenRows {
  const char* data;
  int64_t stride;  // bytes
};

template <typename T, typename Shape, typename Job>
class WeightStream {
 public:
  __device__ WeightStream(char* memory, const Plan& plan, const Job& job, TokenRows tokens, int k)
      : plan_(plan),
        job_(job),
        tokens_(tokens),
        k_bytes_(k * static_cast<int>(sizeof(T))),
        chunks_((k_bytes_ + kChunkBytes - 1) / kChunkBytes),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        memory_(memory) {
    const int64_t total = int64_t{job.num_tiles()} * chunks_;
    begin_ = total * warp_ / Shape::kWarps;
    end_ = total * (warp_ + 1) / Shape::kWarps;
    ring_ = memory + warp_ * Shape::kRingBytes;
    ring_address_ = static_cast<uint32_t>(__cvta_generic_to_shared(ring_));
    policy_ = read_once_policy();
    weights_.place(begin_, chunks_);
    x_.place(begin_, chunks_);
    open_weights();
    open_tokens();
  }

  /// Starts the copies of the first weights, and brings more of them into L2.
  __device__ void start_weights(int prefetched_stages) {
    for (int s = 0; s < Shape::kStages - 1; ++s) {
      copy_weights(s);
      commit_copies();
    }
    prefetch(prefetched_stages);
  }

  /// The rest of the first stages, and all others.
  __device__ void run() {
    for (int s = 0; s < Shape::kStages - 1; ++s) {
      copy_tokens(s);
      commit_copies();
    }
    consume();
    wait_copies<0>();
    finish();
  }

 private:
  // A place in the warp's list of chunks.
  struct Cursor {
    int tile;
    int chunk;
    int64_t at;

    __device__ void place(int64_t begin, int chunks) {
      at = begin;
      tile = static_cast<int>(begin / chunks);
      chunk = static_cast<int>(begin % chunks);
    }
    // True at a new tile.
    __device__ bool next(int chunks) {
      ++at;
      if (++chunk < chunks) return false;
      chunk = 0;
      ++tile;
      return true;
    }
  };

  // Rows lie 128 bytes apart; the 64-byte halves of odd ones are swapped, so that reading two rows
  // at once meets every bank once.
  __device__ static int place_in_row(int piece, int row) { return (piece ^ ((row & 1) << 2)) * 16; }

  __device__ int piece_bytes(int chunk) const {
    return max(0, min(16, k_bytes_ - chunk * kChunkBytes - lane_ % 8 * 16));
  }

  __device__ void open_weights() {
    if (weights_.at >= end_) return;
    const TileRows rows = job_.rows(weights_.tile);
    const int64_t lane_offset =
        lane_ / 8 * rows.stride + weights_.chunk * kChunkBytes + lane_ % 8 * 16;
    low_ = rows.low + lane_offset;
    high_ = rows.high + lane_offset;
    four_rows_ = rows.stride * 4;
    low_rows_ = rows.low_rows;
    high_rows_ = rows.high_rows;
  }
  __device__ void open_tokens() {
    if (x_.at >= end_) return;
    const TileRows rows = job_.rows(x_.tile);
    first_ = rows.first;
    count_ = rows.count;
  }

  __device__ void copy_weights(int stage) {
    if (weights_.at >= end_) return;
    const int bytes = piece_bytes(weights_.chunk);
    const int row = lane_ / 8;
    uint32_t to = ring_address_ + stage * Shape::kStageBytes + row * kChunkBytes +
                  place_in_row(lane_ % 8, row);
#pragma unroll
    for (int j = 0; j < 2 * Shape::kM; ++j) {
      copy_piece_once(to, low_ + j * four_rows_, row + 4 * j < low_rows_ ? bytes : 0, policy_);
      to += 4 * kChunkBytes;
    }
#pragma unroll
    for (int j = 0; j < 2 * Shape::kM; ++j) {
      copy_piece_once(to, high_ + j * four_rows_, row + 4 * j < high_rows_ ? bytes : 0, policy_);
      to += 4 * kChunkBytes;
    }
    low_ += kChunkBytes;
    high_ += kChunkBytes;
    if (weights_.next(chunks_)) open_weights();
  }

  __device__ void copy_tokens(int stage) {
    if (x_.at >= end_) return;
    const int bytes = piece_bytes(x_.chunk);
    const int row = lane_ / 8;
    uint32_t to = ring_address_ + stage * Shape::kStageBytes + 2 * Shape::kHalfBytes +
                  row * kChunkBytes + place_in_row(lane_ % 8, row);
    const char* from = tokens_.data + x_.chunk * kChunkBytes + lane_ % 8 * 16;
#pragma unroll
    for (int j = 0; j < 2 * Shape::kN; ++j) {
      const int n = row + 4 * j;
      if (j < 2 || 8 * (j / 2) < count_) {
        const bool is_there = n < count_;
        const int64_t source = is_there ? plan_.row[first_ + n] : 0;
        copy_piece(to, from + source * tokens_.stride, is_there ? bytes : 0);
      }
      to += 4 * kChunkBytes;
    }
    if (x_.next(chunks_)) open_tokens();
  }

  __device__ void prefetch(int stages) {
    Cursor cursor = weights_;
    for (int s = 0; s < stages && cursor.at < end_; ++s) {
      const TileRows rows = job_.rows(cursor.tile);
      const int64_t offset = cursor.chunk * kChunkBytes;
      if (lane_ < rows.low_rows) prefetch_line(rows.low + lane_ * rows.stride + offset);
      if (lane_ < rows.high_rows) prefetch_line(rows.high + lane_ * rows.stride + offset);
      cursor.next(chunks_);
    }
  }

  using Sums = float[Shape::kM][Shape::kN][4];

  __device__ static void clear(Sums& sums) {
#pragma unroll
    for (int i = 0; i < Shape::kM; ++i) {
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][n][c] = 0;
      }
    }
  }

  __device__ void multiply(int stage, int count, Sums& sums) const {
    const char* at = ring_ + stage * Shape::kStageBytes + lane_ / 4 * kChunkBytes;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const char* mine = at + place_in_row(4 * half + lane_ % 4, lane_ / 4);
      typename Product<T>::Fragment low[Shape::kM];
      typename Product<T>::Fragment high[Shape::kM];
#pragma unroll
      for (int i = 0; i < Shape::kM; ++i) {
        low[i] = Product<T>::prepare(*reinterpret_cast<const uint4*>(mine + i * 8 * kChunkBytes));
        high[i] = Product<T>::prepare(
            *reinterpret_cast<const uint4*>(mine + Shape::kHalfBytes + i * 8 * kChunkBytes));
      }
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
        if (n == 0 || 8 * n < count) {
          const auto x = Product<T>::prepare(
              *reinterpret_cast<const uint4*>(mine + 2 * Shape::kHalfBytes + n * 8 * kChunkBytes));
#pragma unroll
          for (int i = 0; i < Shape::kM; ++i) add(sums[i][n], low[i], high[i], x);
        }
      }
    }
  }
  __device__ static void add(float (&sum)[4], const typename Product<T>::Fragment& low,
                             const typename Product<T>::Fragment& high,
                             const typename Product<T>::Fragment& x) {
    if constexpr (kFreshSums<T>) {
      float fresh[4] = {};
      Product<T>::add(fresh, low, high, x);
#pragma unroll
      for (int c = 0; c < 4; ++c) sum[c] += fresh[c];
    } else {
      Product<T>::add(sum, low, high, x);
    }
  }

  // Part 0: of a tile that an earlier warp began. Part 1: of a tile that the next warp goes on
  // with; written when the ring has run dry.
  __device__ float* part(int warp, int which) const {
    char* at = which == 0
                   ? memory_ + Shape::kWarps * Shape::kRingBytes + warp * Shape::kPartFloats * 4
                   : memory_ + warp * Shape::kRingBytes;
    return reinterpret_cast<float*>(at) + lane_;
  }
  __device__ static void store_part(float* part, const Sums& sums) {
#pragma unroll
    for (int i = 0; i < Shape::kM; ++i) {
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) part[((i * Shape::kN + n) * 4 + c) * 32] = sums[i][n][c];
      }
    }
  }
  __device__ static void add_part(const float* part, Sums& sums) {
#pragma unroll
    for (int i = 0; i < Shape::kM; ++i) {
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) sums[i][n][c] += part[((i * Shape::kN + n) * 4 + c) * 32];
      }
    }
  }

  __device__ void consume() {
    Cursor cursor;
    cursor.place(begin_, chunks_);
    Sums sums;
    clear(sums);
    bool is_begun_by_other = cursor.chunk != 0;
    int count = begin_ < end_ ? job_.rows(cursor.tile).count : 0;
    int read = 0;
    int write = Shape::kStages - 1;
    while (cursor.at < end_) {
      wait_copies<Shape::kStages - 2>();
      __syncwarp();  // all lanes' copies have landed, and all have read the stage before this one
      copy_weights(write);
      copy_tokens(write);
      commit_copies();
      write = write + 1 == Shape::kStages ? 0 : write + 1;
      multiply(read, count, sums);
      read = read + 1 == Shape::kStages ? 0 : read + 1;
      const int tile = cursor.tile;
      if (cursor.next(chunks_)) {
        if (is_begun_by_other) {
          store_part(part(warp_, 0), sums);
        } else {
          job_.emit(tile, sums);
        }
        is_begun_by_other = false;
        clear(sums);
        if (cursor.at < end_) count = job_.rows(cursor.tile).count;
      }
    }
    if (begin_ == end_ || cursor.chunk == 0) return;
    wait_copies<0>();
    __syncwarp();
    store_part(part(warp_, is_begun_by_other ? 0 : 1), sums);
  }

  __device__ int64_t begin_of(int warp) const {
    return int64_t{job_.num_tiles()} * chunks_ * warp / Shape::kWarps;
  }

  // The warp that ends a tile which others began adds its parts up.
  __device__ void finish() {
    __syncthreads();
    if (begin_ == end_ || begin_ % chunks_ == 0) return;
    const int tile = static_cast<int>(begin_ / chunks_);
    const int64_t tile_begin = int64_t{tile} * chunks_;
    if (end_ < tile_begin + chunks_) return;
    int warp = warp_;
    while (begin_of(warp) > tile_begin) --warp;
    Sums sums;
    clear(sums);
    for (; warp <= warp_; ++warp) {
      const int64_t begin = begin_of(warp);
      if (begin == begin_of(warp + 1)) continue;
      add_part(part(warp, begin > tile_begin ? 0 : 1), sums);
    }
    job_.emit(tile, sums);
  }

  const Plan& plan_;
  const Job& job_;
  TokenRows tokens_;
  int k_bytes_;
  int chunks_;  // of a row
  int lane_;
  int warp_;
  char* memory_;
  char* ring_;
  uint32_t ring_address_;
  uint64_t policy_;
  int64_t begin_;  // this warp's chunks of the block's list
  int64_t end_;
  Cursor weights_;
  const char* low_ = nullptr;
  const char* high_ = nullptr;
  int64_t four_rows_ = 0;
  int low_rows_ = 0;
  int high_rows_ = 0;
  Cursor x_;
  int first_ = 0;
  int count_ = 0;
};

#endif

}  // namespace cadre::cuda

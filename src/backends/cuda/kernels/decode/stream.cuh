// Streaming rows of weights through shared memory into tiles: each warp is on its own, with a ring
// of stages that its asynchronous copies fill. A block has a list of tiles; the list's chunks of k
// are split evenly over the block's warps, so a tile at the border of two warps is the sum of two
// parts, added in the order of warps at the end. All of it is a function of the routed ids.
#pragma once

#include "backends/cuda/kernels/decode/mx.cuh"
#include "backends/cuda/kernels/decode/operands.cuh"
#include "backends/cuda/kernels/decode/plan.cuh"
#include "backends/cuda/kernels/decode/shapes.h"
#include "backends/cuda/kernels/decode/tiles.cuh"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {

/// The tokens of a tile: places in plan.row.
struct TileTokens {
  int first;
  int count;
};

/// Where the rows of a tile are: two halves of up to 8 * kM rows.
struct TileRows {
  const char* low;  // first row of the lower half, and so on
  const char* high;
  int64_t stride;  // bytes
  int low_rows;
  int high_rows;
};

/// The matrix that all tiles multiply: rows of x or h. In shared memory, as resident.cuh writes
/// them: up to a multiple of the chunk, zeros at the end.
struct TokenRows {
  const char* data;
  int64_t stride;                 // bytes
  const float* scales = nullptr;  // of e4m3 codes; beside MX weights, of the sums of each row
  int64_t scale_stride = 0;
};

#ifdef __CUDACC__

template <typename Operands, typename Shape, typename Job>
class WeightStream {
 public:
  /// `k` is a multiple of the elements of 16 bytes.
  __device__ WeightStream(const DecodeArgs& args, char* memory, const Plan& plan, const Job& job,
                          TokenRows tokens, int k)
      : args_(args),
        plan_(plan),
        job_(job),
        tokens_(tokens),
        pieces_(row_pieces<Operands>(k)),
        chunks_((pieces_ + Shape::kPieces - 1) / Shape::kPieces),
        lane_(threadIdx.x % 32),
        warp_(threadIdx.x / 32),
        lane_row_(lane_ / Shape::kPieces),
        lane_piece_(lane_ % Shape::kPieces),
        groups_((k + kGroup - 1) / kGroup),
        memory_(memory),
        ring_(memory + warp_ * Shape::kRingBytes) {
    copies_to_ = shared_address(ring_) + lane_row_ * Shape::kPitch +
                 (kIsMx ? lane_piece_ * 16 : place_in_row(lane_piece_, lane_row_));
    begin_ = begin_of(min(warp_, Shape::kWarps));  // warps beyond the shape's have no share
    end_ = begin_of(min(warp_ + 1, Shape::kWarps));
    copied_ = {begin_.tile, begin_.chunk, true,
               (end_.tile - begin_.tile) * chunks_ + end_.chunk - begin_.chunk};
  }

  /// Starts the copies of the first weights.
  __device__ void start_weights() {
    if constexpr (kIsMx) return start_mx(false);
    Cursor at = copied_;
#pragma unroll 1
    for (int s = 0; s < Shape::kStages && at.left > 0; ++s) {
      copy_weights(s, at);
      at.next(chunks_);
    }
    commit_copies();
  }

  /// The same, a stage at a time: what is on its way delays what other blocks wait for.
  __device__ void start_weights_slowly() {
    if constexpr (kIsMx) return start_mx(true);
    Cursor at = copied_;
#pragma unroll 1
    for (int s = 0; s < Shape::kStages && at.left > 0; ++s) {
      wait_copies<0>();
      copy_weights(s, at);
      commit_copies();
      at.next(chunks_);
    }
  }

  /// The tokens of the first stages, and all other stages. The next kernel may start when every
  /// warp of every block has at most `signal_left` chunks to ask for.
  __device__ void run(int signal_left) {
    consume(signal_left);
    finish();
  }

 private:
  static constexpr Kind kKind = Shape::kKind;
  static_assert(kKind == Operands::kKind);
  static constexpr bool kIsMx = Shape::kIsMx;
  static constexpr int kGroup = kIsMx ? 32 : kFp8Group;  // of k, with a scale

  __device__ void start_mx(bool slowly) {
    Cursor at = copied_;
#pragma unroll 1
    for (int s = 0; s < Shape::kStages; ++s) {
      if (slowly) wait_copies<0>();
      if (at.left > 0) {
        copy_weights(s, at);
        at.next(chunks_);
      }
      if (Shape::kIsResident) commit_copies();
    }
    if (!Shape::kIsResident) commit_copies();
  }

  struct Place {
    int tile;
    int chunk;
  };
  // A place in the warp's list of chunks.
  struct Cursor {
    int tile;
    int chunk;
    bool is_new;  // at the first chunk of the tile that the warp has
    int left;     // chunks

    __device__ void next(int chunks) {
      --left;
      is_new = ++chunk == chunks;
      if (!is_new) return;
      chunk = 0;
      ++tile;
    }
  };

  // Where the share of a warp begins: tiles * chunks * warp / kWarps without the large numbers.
  __device__ Place begin_of(int warp) const {
    const auto scaled = static_cast<uint32_t>(job_.num_tiles()) * static_cast<uint32_t>(warp);
    const auto rest = static_cast<int>(scaled % Shape::kWarps);
    return {static_cast<int>(scaled / Shape::kWarps), rest * chunks_ / Shape::kWarps};
  }

  __device__ int piece_bytes(int chunk) const {
    return chunk * Shape::kPieces + lane_piece_ < pieces_ ? 16 : 0;
  }

  // Rows beyond the tile's and tokens beyond the entry's are not copied: what lies in their places
  // goes into sums that nobody reads.
  __device__ void copy_weights(int stage, const Cursor& at) {
    if (at.is_new) {
      const TileRows rows = job_.rows(at.tile);
      const int64_t offset = lane_row_ * rows.stride + at.chunk * Shape::kChunk + lane_piece_ * 16;
      low_ = rows.low + offset;
      high_ = rows.high + offset;
      step_ = rows.stride * Shape::kRowsAtOnce;
      low_rows_ = rows.low_rows - lane_row_;
      high_rows_ = rows.high_rows - lane_row_;
      is_full_ = rows.low_rows == Shape::kHalf && rows.high_rows == Shape::kHalf;
    }
    const uint32_t to = copies_to_ + stage * Shape::kStageBytes;
    const char* low = low_;
    const char* high = high_;
    if (is_full_ && (at.chunk + 1) * Shape::kPieces <= pieces_) {
#pragma unroll
      for (int r = 0; r < Shape::kHalf; r += Shape::kRowsAtOnce) {
        copy_piece(to + r * Shape::kPitch, low);
        copy_piece(to + (Shape::kHalf + r) * Shape::kPitch, high);
        low += step_;
        high += step_;
      }
    } else {
      const int bytes = piece_bytes(at.chunk);
#pragma unroll
      for (int r = 0; r < Shape::kHalf; r += Shape::kRowsAtOnce) {
        if (r < low_rows_) copy_piece(to + r * Shape::kPitch, low, bytes);
        if (r < high_rows_) copy_piece(to + (Shape::kHalf + r) * Shape::kPitch, high, bytes);
        low += step_;
        high += step_;
      }
    }
    low_ += Shape::kChunk;
    high_ += Shape::kChunk;
    if constexpr (kKind != Kind::kPlain) {
      if (at.is_new) row_scales_ = job_.scales(at.tile, lane_ % Shape::kRows);
      const uint32_t scales_to =
          shared_address(ring_) + stage * Shape::kStageBytes + Shape::kScalesAt;
      if (row_scales_.at == nullptr) return;
      if constexpr (kIsMx) {
        MxScales<Shape>::copy(scales_to + lane_ * 16, row_scales_, at.chunk);
      } else {
        copy_scales(scales_to, at.chunk);
      }
    }
  }

  __device__ static void store_word(uint32_t to, uint32_t value) {
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(value) : "memory");
  }

  // The word that an E8M0 scale lies in, up to that scale, and its place there. Groups beyond k
  // have zeros as weights: their scale must be a number.
  __device__ void copy_scales(uint32_t to, int chunk) {
#pragma unroll
    for (int g = lane_ / Shape::kRows; g < Shape::kGroups; g += 32 / Shape::kRows) {
      const int group = chunk * Shape::kGroups + g;
      const char* const from =
          row_scales_.at + (group >> args_.format.col_shift) * args_.format.scale_bytes();
      const uint32_t slot = to + (g * Shape::kRows + lane_ % Shape::kRows) * 8;
      if (!args_.format.is_e8m0) {
        copy_word(slot, from, group < groups_ ? 4 : 0);
      } else {
        const auto begin = static_cast<int>(reinterpret_cast<uintptr_t>(from) % 4);
        copy_word(slot, from - begin, group < groups_ ? begin + 1 : 0);
        store_word(slot + 4, begin * 8);
      }
    }
  }

  static constexpr int kTokenCopies =
      Shape::kTokens < Shape::kRowsAtOnce ? 1 : Shape::kTokens / Shape::kRowsAtOnce;
  static constexpr bool kKeepsTokens = kTokenCopies <= 4;  // their addresses, in registers

  __device__ const char* token_at(int n, int chunk) const {
    return tokens_.data + plan_.row[first_ + n] * tokens_.stride + chunk * Shape::kChunk +
           lane_piece_ * 16;
  }

  // Rows beside MX weights are as long as whole chunks.
  __device__ void copy_mx_tokens(int stage, const Cursor& at) {
    constexpr int kPieces = Shape::kTokenChunk / 16;
    static_assert(kPieces <= 32);
    if (at.is_new) {
      const TileTokens tokens = job_.tokens(at.tile);
      first_ = tokens.first;
      count_ = tokens.count;
    }
    const int piece = lane_ % kPieces;
    const uint32_t to = shared_address(ring_) + stage * Shape::kStageBytes + Shape::kTokensAt;
    const char* const from = tokens_.data + at.chunk * Shape::kTokenChunk + piece * 16;
#pragma unroll 2
    for (int n = lane_ / kPieces; n < count_; n += 32 / kPieces) {
      copy_piece(to + n * Shape::kTokenPitch + piece * 16,
                 from + plan_.row[first_ + n] * tokens_.stride);
    }
  }

  __device__ void copy_tokens(int stage, const Cursor& at) {
    if constexpr (!Shape::kIsResident && kIsMx) {
      copy_mx_tokens(stage, at);
    } else if constexpr (!Shape::kIsResident) {
      if (at.is_new) {
        const TileTokens tokens = job_.tokens(at.tile);
        first_ = tokens.first;
        count_ = tokens.count;
        if constexpr (kKeepsTokens) {
#pragma unroll
          for (int j = 0; j < kTokenCopies; ++j) {
            const int n = lane_row_ + j * Shape::kRowsAtOnce;
            if (n < count_) kept_[j] = token_at(n, at.chunk);
          }
        }
      }
      const int bytes = at.chunk * Shape::kPieces + lane_piece_ < pieces_ ? 16 : 0;
      const uint32_t to = shared_address(ring_) + stage * Shape::kStageBytes + Shape::kTokensAt;
#pragma unroll
      for (int j = 0; j < kTokenCopies; ++j) {
        const int n = lane_row_ + j * Shape::kRowsAtOnce;
        if (n >= count_) continue;
        const uint32_t place = to + n * Shape::kChunk + place_in_row(lane_piece_, n);
        if constexpr (kKeepsTokens) {
          copy_piece(place, kept_[j], bytes);
          kept_[j] += Shape::kChunk;
        } else {
          copy_piece(place, token_at(n, at.chunk), bytes);
        }
      }
      if constexpr (kKind == Kind::kFp8) copy_token_scales(stage, at.chunk);
    }
  }

  __device__ void copy_token_scales(int stage, int chunk) const {
    const uint32_t to = shared_address(ring_) + stage * Shape::kStageBytes + Shape::kTokenScalesAt;
#pragma unroll
    for (int i = lane_; i < Shape::kGroups * Shape::kTokens; i += 32) {
      const int n = i % Shape::kTokens;
      const int group = chunk * Shape::kGroups + i / Shape::kTokens;
      if (n >= count_) continue;
      const float* const from = tokens_.scales + plan_.row[first_ + n] * tokens_.scale_stride;
      copy_word(to + 4 * i, reinterpret_cast<const char*>(from + min(group, groups_ - 1)),
                group < groups_ ? 4 : 0);
    }
  }

  using Sums = TileSums<Shape>;

  __device__ StageView view_of(int stage, const Cursor& at, const TileTokens& tokens) const {
    const char* const begin = ring_ + stage * Shape::kStageBytes;
    StageView view = {begin,
                      begin + Shape::kTokensAt,
                      begin + Shape::kScalesAt,
                      reinterpret_cast<const float*>(begin + Shape::kTokenScalesAt),
                      lane_,
                      tokens.count};
    if constexpr (Shape::kIsResident) {
      const int row = plan_.row[tokens.first];
      view.tokens = tokens_.data + row * tokens_.stride + at.chunk * Shape::kChunk;
      view.token_scales = tokens_.scales + row * tokens_.scale_stride + at.chunk * Shape::kGroups;
    }
    return view;
  }

  // Where this lane reads tokens of a tile; of a stage in the ring, or of whole rows.
  __device__ void find_mx_tokens(const TileTokens& tokens, uint32_t (&at)[Shape::kN]) const {
    const uint32_t begin = shared_address(Shape::kIsResident ? tokens_.data : ring_) +
                           (Shape::kIsResident ? 0 : Shape::kTokensAt) + lane_ % 4 * 16;
#pragma unroll
    for (int n = 0; n < Shape::kN; ++n) {
      const int token = 8 * n + lane_ / 4;
      if constexpr (Shape::kIsResident) {
        const int row = plan_.row[tokens.first + min(token, tokens.count - 1)];
        at[n] = begin + row * static_cast<uint32_t>(tokens_.stride);
      } else {
        at[n] = begin + token * Shape::kTokenPitch;
      }
    }
  }

  // The next stage, and the copies that take its place.
  __device__ void step_mx(int stage, const Cursor& at, int count,
                          const uint32_t (&tokens)[Shape::kN], int signal_left, Sums& sums) {
    const uint32_t scales = shared_address(memory_) +
                            Shape::kWarps * (Shape::kRingBytes + 2 * Shape::kPartBytes) +
                            warp_ * Shape::kMxScaleBytes;
    uint32_t from[Shape::kN];
#pragma unroll
    for (int n = 0; n < Shape::kN; ++n) {
      from[n] = tokens[n] +
                (Shape::kIsResident ? at.chunk * Shape::kTokenChunk : stage * Shape::kStageBytes);
    }
    wait_copies<Shape::kStages - 1>();
    __syncwarp();  // all lanes' copies have landed, and all have read the scales before these
    MxStage<Shape> values;
    const uint32_t begin = shared_address(ring_) + stage * Shape::kStageBytes;
    MxScales<Shape>::decode(begin + Shape::kScalesAt + lane_ * 16, scales, at.chunk, groups_);
    values.load(begin);
    __syncwarp();
    if (copied_.left > 0) {
      copy_weights(stage, copied_);
    }
    values.multiply(scales, from, count, sums);
    if constexpr (!Shape::kIsResident) __syncwarp();  // all lanes have read tokens
    if (copied_.left > 0) {
      copy_tokens(stage, copied_);
      copied_.next(chunks_);
      if (copied_.left == signal_left) let_next_kernel_start();
    }
    commit_copies();
  }

  // The same of other kinds.
  __device__ void step(int stage, const Cursor& at, const TileTokens& tokens, int signal_left,
                       Sums (&sums)[Shape::kSets]) {
    Stage<Operands, Shape> values;
    wait_copies<Shape::kStages - 1>();
    __syncwarp();  // all lanes' copies have landed
    const StageView view = view_of(stage, at, tokens);
    values.load(args_, view);
    if constexpr (Shape::kReadsTokensLate) values.multiply(view, sums);
    __syncwarp();  // all lanes have read
    if (copied_.left > 0) {
      copy_weights(stage, copied_);
      copy_tokens(stage, copied_);
      copied_.next(chunks_);
      if (copied_.left == signal_left) let_next_kernel_start();
    }
    commit_copies();
    if constexpr (!Shape::kReadsTokensLate) {
      __syncwarp();  // tensor cores want all lanes, which the copies may have led apart
      values.multiply(view, sums);
    }
  }

  template <typename Do>
  __device__ static void for_each_sum(const Do& act) {
#pragma unroll
    for (int i = 0; i < Shape::kM; ++i) {
#pragma unroll
      for (int n = 0; n < Shape::kN; ++n) {
#pragma unroll
        for (int c = 0; c < 4; ++c) act(i, n, c, ((i * Shape::kN + n) * 4 + c) * 32);
      }
    }
  }

  // Two places for the sums of a tile. 0: of one that an earlier warp began. 1: of any other; of
  // one that the next warp goes on with at the end.
  __device__ float* part(int warp, int which) const {
    return reinterpret_cast<float*>(memory_ + Shape::kWarps * Shape::kRingBytes +
                                    (2 * warp + which) * Shape::kPartBytes);
  }
  __device__ void store_part(float* part, const Sums& sums) const {
    for_each_sum([&](int i, int n, int c, int at) { part[at + lane_] = sums[i][n][c]; });
  }

  __device__ void consume(int signal_left) {
    Cursor at = copied_;
#pragma unroll 1
    for (int s = 0; s < Shape::kStages; ++s) {  // they have their weights already
      if (copied_.left > 0) {
        copy_tokens(s, copied_);
        copied_.next(chunks_);
      }
      if (!(kIsMx && Shape::kIsResident)) commit_copies();  // there start_mx() has
    }
    if (copied_.left <= signal_left) let_next_kernel_start();
    Sums sums[Shape::kSets];
    bool is_begun_by_other = begin_.chunk != 0;
    TileTokens tokens = {};
    uint32_t mx_tokens[Shape::kN] = {};
    int stage = 0;
#pragma unroll 1
    while (at.left > 0) {
      if (at.is_new) {
        tokens = job_.tokens(at.tile);
        if constexpr (kIsMx) find_mx_tokens(tokens, mx_tokens);
#pragma unroll
        for (int s = 0; s < Shape::kSets; ++s) {
          for_each_sum([&](int i, int n, int c, int) { sums[s][i][n][c] = 0; });
        }
      }
      if constexpr (kIsMx) {
        step_mx(stage, at, tokens.count, mx_tokens, signal_left, sums[0]);
      } else {
        step(stage, at, tokens, signal_left, sums);
      }
      stage = stage + 1 == Shape::kStages ? 0 : stage + 1;
      const int tile = at.tile;
      at.next(chunks_);
      if (!at.is_new && at.left > 0) continue;
#pragma unroll
      for (int s = 1; s < Shape::kSets; ++s) {
        for_each_sum([&](int i, int n, int c, int) { sums[0][i][n][c] += sums[s][i][n][c]; });
      }
      float* const to = part(warp_, is_begun_by_other ? 0 : 1);
      store_part(to, sums[0]);
      if (at.is_new && !is_begun_by_other) {
        __syncwarp();
        job_.template emit<Shape::kN>(tile, to, tokens_.scales);
        __syncwarp();
      }
      is_begun_by_other = false;
    }
  }

  // The warp that ends a tile which others began adds its parts up.
  __device__ void finish() {
    __syncthreads();
    if (begin_.chunk == 0 || end_.tile == begin_.tile) return;
    int warp = warp_;
    Place place = begin_;
#pragma unroll 1
    while (place.tile == begin_.tile && place.chunk != 0) place = begin_of(--warp);
    Sums sums;
    for_each_sum([&](int i, int n, int c, int) { sums[i][n][c] = 0; });
#pragma unroll 1
    for (; warp <= warp_; ++warp) {
      const Place next = begin_of(warp + 1);
      const bool is_empty = place.tile == next.tile && place.chunk == next.chunk;
      const float* from = part(warp, place.tile == begin_.tile && place.chunk != 0 ? 0 : 1) + lane_;
      if (!is_empty) for_each_sum([&](int i, int n, int c, int at) { sums[i][n][c] += from[at]; });
      place = next;
    }
    store_part(part(warp_, 0), sums);
    __syncwarp();
    job_.template emit<Shape::kN>(begin_.tile, part(warp_, 0), tokens_.scales);
  }

  const DecodeArgs& args_;
  const Plan& plan_;
  const Job& job_;
  TokenRows tokens_;
  int pieces_;  // of a row
  int chunks_;
  int lane_;
  int warp_;
  int lane_row_;  // of each kRowsAtOnce rows: the one whose piece this lane copies
  int lane_piece_;
  int groups_;  // of k, with scales of their own
  char* memory_;
  char* ring_;
  uint32_t copies_to_;
  Place begin_;  // this warp's chunks of the block's list
  Place end_;
  Cursor copied_;  // up to here; weights alone are ahead of it at first
  const char* low_ = nullptr;
  const char* high_ = nullptr;
  int64_t step_ = 0;
  int low_rows_ = 0;
  int high_rows_ = 0;
  bool is_full_ = false;
  int first_ = 0;
  int count_ = 0;
  RowScales row_scales_ = {};  // of the tile's row lane % kRows; null: no such row
  const char* kept_[kKeepsTokens ? kTokenCopies : 1] = {};
};

#endif

}  // namespace cadre::cuda

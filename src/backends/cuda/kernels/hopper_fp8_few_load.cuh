// The loading side of the kernel for few tokens, a warp for each role: pieces of work are taken,
// weights loaded as far ahead as the ring goes, tokens when they are there, and results announced.
#pragma once

#include "backends/cuda/kernels/hopper_fp8_few_tile.cuh"

namespace cadre::cuda::hopper {

__device__ inline BoxScales scales_of_box(const FewParams& p, const FewPiece& piece, int box) {
  const WeightScales& w = piece.down ? p.down_scales : box == 0 ? p.gate_scales : p.up_scales;
  const int32_t rows = piece.down ? p.few.args.hidden : p.few.args.intermediate;
  const int32_t at = piece.row + w.row_offset;
  const int32_t block = at / p.block_rows;
  const int32_t last = (rows - 1 + w.row_offset) / p.block_rows;
  const int32_t k = piece.block + (piece.down ? box : 0);
  BoxScales scales;
  scales.first = w.first + piece.expert * w.expert_stride + block * w.row_stride +
                 static_cast<int64_t>(k) * w.column_stride;
  scales.second = block < last ? w.row_stride : 0;
  scales.border = block < last ? min((block + 1) * p.block_rows - at, kFewRows) : kFewRows;
  scales.step = w.column_stride * (piece.down ? 2 : 1);
  return scales;
}

/// But its scales. All of gate and up come before those of down, so that whoever waits for h waits
/// for pieces that others have begun.
__device__ inline FewPiece find_piece(const FewParams& p, const Plan& plan, int32_t item) {
  FewPiece piece = {};
  const int32_t ups = plan.num_entries * p.up_tiles;
  piece.down = item >= ups;
  if (piece.down) {
    item -= ups;
    const int32_t each = p.down_tiles * p.few.parts;
    piece.entry = item / each;
    if (piece.entry >= plan.num_entries) return piece;
    const int32_t rest = item % each;
    piece.row = rest / p.few.parts * kFewRows;
    piece.part = rest % p.few.parts;
    piece.block = piece.part * p.few.down_blocks;
    piece.blocks = min(p.few.down_blocks, p.down_blocks - piece.block);
    piece.stages = (piece.blocks + 1) / 2;
  } else {
    piece.entry = item / p.up_tiles;
    piece.row = item % p.up_tiles * kFewRows;
    piece.blocks = piece.stages = p.up_blocks;
  }
  piece.expert = plan.entry_expert[piece.entry];
  piece.first = plan.entry_first[piece.entry];
  piece.count = plan.entry_count[piece.entry];
  return piece;
}

/// The number of another piece. One thread; the counter has been cleared before this kernel began.
__device__ inline int32_t take_number(const FewParams& p) {
  return static_cast<int32_t>(atomicAdd(p.few.counters, 1u));
}

/// One thread. `item` is the number of the first piece.
__device__ inline void take_pieces(const FewParams& p, const Plan& plan, FewShared& shared,
                                   int32_t item) {
  const int32_t total = plan.num_entries * (p.up_tiles + p.down_tiles * p.few.parts);
  const int32_t near_end = total - 2 * static_cast<int32_t>(gridDim.x);
  for (int32_t i = 0;; ++i) {
    FewPiece& piece = shared.mails[i % kFewMails];
    piece = find_piece(p, plan, item);
    const int32_t stages = piece.stages;
    ptx::arrive(ptx::shared_address(&shared.mail_there[i % kFewMails]));
    if (stages == 0) return;
    // Two pieces ahead where they are short, but not of the last ones.
    const int32_t taken = stages < kFewStagesLeft && item < near_end ? i - 1 : i;
    if (taken >= 0) {
      ptx::wait(ptx::shared_address(&shared.mail_taken[taken % kFewMails]),
                static_cast<uint32_t>(taken / kFewMails % 2));
    }
    item = take_number(p);
  }
}

/// One thread: finds the scales of a piece and waits for its h, ahead of the loader of tokens (an
/// answer takes 1 to 3 us while weights stream) and beside the one of weights.
__device__ inline void watch_h(const FewParams& p, FewShared& shared) {
  for (int32_t i = 0;; ++i) {
    FewPiece& piece = receive_piece(shared, i);
    if (piece.stages == 0) return;
    for (int box = 0; box < 2; ++box) piece.scales[box] = scales_of_box(p, piece, box);
    if (piece.down) {
      const uint32_t* const tiles = p.few.counters + 1 + piece.entry;
      while (ptx::load_acquire(tiles) < static_cast<uint32_t>(p.up_tiles)) {
      }
    }
    ptx::arrive(ptx::shared_address(&shared.h_there[i % kFewMails]));
  }
}

/// One thread.
__device__ inline void load_few_weights(const FewParams& p, FewShared& shared, uint32_t stages) {
  const uint64_t once = ptx::evict_first_policy();
  FewRing ring;
  for (int32_t i = 0;; ++i) {
    const FewPiece& piece = receive_piece(shared, i);
    const int32_t count = piece.stages, row = piece.row, expert = piece.expert;
    const int32_t block = piece.block, blocks = piece.blocks;
    const bool down = piece.down;
    if (count == 0) return;
    const bool gated = p.few.args.gate_function.has_gate;
    const CUtensorMap* const first = down ? &p.few.down : gated ? &p.few.gate : &p.few.up;
    const CUtensorMap* const second = down ? &p.few.down : &p.few.up;
    for (int32_t t = 0; t < count; ++t, ring.advance()) {
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      const uint32_t to = stages + static_cast<uint32_t>(ring.stage) * kFewStageBytes;
      const bool two = down ? 2 * t + 1 < blocks : gated;
      const int32_t k = (block + (down ? 2 * t : t)) * kFp8TileK;
      ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (t == max(0, count - kFewStagesLeft)) {
        ptx::arrive(ptx::shared_address(&shared.mail_taken[i % kFewMails]));
      }
      ptx::arrive_expect_bytes(full, (two ? 2 : 1) * kFewBoxBytes);
      ptx::load_3d(to, first, k, row, expert, full, once);
      if (two) {
        const int32_t second_k = down ? k + kFp8TileK : k;
        ptx::load_3d(to + kFewBoxBytes, second, second_k, row, expert, full, once);
      }
    }
  }
}

/// A lane's part of the tokens of a piece: 16 bytes of every fourth row, and the scale of one row.
class FewTokens {
 public:
  __device__ FewTokens(const FewParams& p, const Plan& plan, const FewPiece& piece)
      : count_(piece.count), lane_(static_cast<int32_t>(threadIdx.x % 32)) {
    const ActivationCodes& codes = piece.down ? p.few.args.h_codes : p.few.args.x_codes;
    const uint16_t* const rows = (piece.down ? plan.pair : plan.row) + piece.first;
    const int32_t chunk = lane_ % 8, first = lane_ / 8;
    codes_ = codes.codes + piece.block * kFp8TileK + chunk * 16;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t row = first + 4 * i;
      from_[i] = row < count_ ? static_cast<uint32_t>(rows[row] * codes.stride) : 0;
    }
    scales_ = codes.scales + (lane_ < count_ ? rows[lane_] * codes.groups : 0) + piece.block;
  }

  /// Block k of the piece.
  __device__ void load(int32_t k, uint32_t to, float* scales) const {
    const int32_t chunk = lane_ % 8, first = lane_ / 8;
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int32_t row = first + 4 * i;
      if (row >= count_) break;
      ptx::copy_16(to + static_cast<uint32_t>(row * 128 + ((chunk ^ (row % 8)) << 4)),
                   codes_ + from_[i] + k * kFp8TileK, 16);
    }
    if (lane_ < count_) ptx::copy_4(ptx::shared_address(scales + lane_), scales_ + k);
  }

 private:
  static constexpr int kCount = kMaxFewTokens / 4;
  int32_t count_;
  int32_t lane_;
  const uint8_t* codes_;
  const float* scales_;
  uint32_t from_[kCount];
};

/// One warp. The tokens are there when the kernel before this one has ended.
__device__ inline void load_few_tokens(const FewParams& p, const Plan& plan, FewShared& shared,
                                       uint32_t stages) {
  cudaGridDependencySynchronize();
  const auto lane = static_cast<int32_t>(threadIdx.x % 32);
  FewRing ring;
  for (int32_t i = 0;; ++i) {
    const FewPiece& piece = receive_piece(shared, i);
    const int32_t count = piece.stages;
    if (count == 0) return;
    const FewTokens tokens(p, plan, piece);
    const bool down = piece.down;
    const int32_t blocks = piece.blocks;
    wait_for_scales_and_h(shared, i);
    const BoxScales box = piece.scales[lane / 2 % 2];
    const char* scale = box.first + (lane % 2 == 0 ? 0 : box.second);
    const uint32_t second =
        2 * kFewBoxBytes + static_cast<uint32_t>(few_columns(piece.count) * kFp8TileK);
    for (int32_t t = 0; t < count; ++t, ring.advance()) {
      const uint32_t to = stages + static_cast<uint32_t>(ring.stage) * kFewStageBytes;
      FewScales& scales = shared.scales[ring.stage];
      const bool two = down && 2 * t + 1 < blocks;
      ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      __syncwarp();
      tokens.load(down ? 2 * t : t, to + 2 * kFewBoxBytes, scales.tokens[0]);
      if (two) tokens.load(2 * t + 1, to + second, scales.tokens[1]);
      if (lane < (down && !two ? 2 : 4)) {
        ptx::copy_4(ptx::shared_address(&scales.weights[lane]), word_of(scale));
      }
      scale += box.step;
      ptx::arrive_when_copied(ptx::shared_address(&shared.full[ring.stage]));
    }
  }
}

/// One thread: tells other CTAs of h when all its stores are done. It waits for them in the place
/// of the consumers, to which that would be 2 to 3 us a piece.
__device__ inline void announce_pieces(const FewParams& p, FewShared& shared) {
  for (int32_t i = 0;; ++i) {
    const FewPiece& piece = receive_piece(shared, i);
    if (piece.stages == 0) return;
    ptx::wait(ptx::shared_address(&shared.written[i % 2]), static_cast<uint32_t>(i / 2 % 2));
    if (!piece.down) ptx::add_release(p.few.counters + 1 + piece.entry);
    ptx::arrive(ptx::shared_address(&shared.announced[i % 2]));
  }
}

}  // namespace cadre::cuda::hopper

// What the parts of the kernel for few tokens share: pieces of work, shared memory, parameters.
//
// Weights are the 64-row operand of wgmma, tokens the operand of 8, 16 or 32 columns. A stage has
// two boxes of 128 rows x 128 of K: of gate and of up, or of down two neighbouring blocks of K.
#pragma once

#include "backends/cuda/kernels/decode/plan.cuh"
#include "backends/cuda/kernels/hopper_fp8_few_kernels.h"
#include "backends/cuda/kernels/hopper_fp8_tile.cuh"

namespace cadre::cuda::hopper {

inline constexpr int kFewStages = 3;
inline constexpr int kFewConsumers = 2;  // warpgroups
inline constexpr int kFewConsumerWarps = 4 * kFewConsumers;
inline constexpr int kFewLoaderWarps = 5;
inline constexpr int kFewThreads = 128 * kFewConsumers + 32 * kFewLoaderWarps;
inline constexpr int kFewRows = 128;  // of a box
inline constexpr uint32_t kFewBoxBytes = kFewRows * kFp8TileK;
inline constexpr uint32_t kFewTokenBytes = 2 * kMaxFewTokens * kFp8TileK;
inline constexpr uint32_t kFewStageBytes = 2 * kFewBoxBytes + kFewTokenBytes;
inline constexpr int kFewStagingPitch = kFewRows + 16;  // bytes
inline constexpr uint32_t kFewStagingBytes =
    8 * 4 * 128 * kFewConsumers;  // see apply_special_few()
static_assert(kFewStagingBytes >= kMaxFewTokens * kFewStagingPitch);

// A CTA takes its next piece when the loader has so many stages left to ask for. Late, because
// whoever takes a piece of gate and up long before it begins makes others wait; not later, because
// an answer takes 2 to 4 us while weights stream, and a stage 1 us.
inline constexpr int32_t kFewStagesLeft = 8;

// More than there are pieces between the first role to know of them and the last: two are taken
// beforehand, the ring has one a stage at most, two are written and not announced.
inline constexpr int kFewMails = 16;
static_assert(kFewMails >= kFewStages + 6);

struct FewScales {
  float tokens[2][kMaxFewTokens];  // of both blocks of K
  uint32_t weights[4];             // words, two blocks of rows of each box
};

/// The scales of a box along K. Blocks have 128 rows or more, so a box has at most two.
struct BoxScales {
  const char* first;
  int64_t second;  // bytes further on
  int32_t border;  // rows of the box under the first
  int32_t step;    // bytes from one stage's to the next's
};

/// A piece of work: 128 rows of h, or of y for a part of K, of one entry of the plan.
struct FewPiece {
  int32_t stages;  // 0: there is no more
  int32_t entry;
  int32_t expert;
  int32_t first;  // of the entry's pairs in the plan
  int32_t count;
  int32_t row;
  int32_t block;   // of K, the first
  int32_t blocks;  // of K
  int32_t part;
  bool down;
  BoxScales scales[2];
};

struct FewShared {
  uint64_t full[kFewStages];
  uint64_t empty[kFewStages];
  uint64_t mail_there[kFewMails];
  uint64_t mail_taken[kFewMails];  // the loader of weights is about to be done with it
  uint64_t h_there[kFewMails];     // what the piece multiplies; its scales are known
  uint64_t written[2];             // results of a piece
  uint64_t announced[2];
  FewPiece mails[kFewMails];
  FewScales scales[kFewStages];
  uint32_t largest[kFewConsumerWarps][kMaxFewTokens];
};

struct FewParams {
  HopperFp8Few few;
  WeightScales gate_scales;
  WeightScales up_scales;
  WeightScales down_scales;
  int32_t block_rows;
  bool e8m0;
  bool special;  // biases, or another gate function than plain SwiGLU
  int32_t up_tiles;
  int32_t down_tiles;
  int32_t up_blocks;  // of 128 of K
  int32_t down_blocks;
};

/// Columns of the products for so many tokens.
__device__ inline int32_t few_columns(int32_t count) {
  return count <= 8 ? 8 : count <= 16 ? 16 : 32;
}

/// The CTA's i-th piece, which take_pieces() wrote; its scales are there when its h is.
__device__ inline FewPiece& receive_piece(FewShared& shared, int32_t i) {
  ptx::wait(ptx::shared_address(&shared.mail_there[i % kFewMails]),
            static_cast<uint32_t>(i / kFewMails % 2));
  return shared.mails[i % kFewMails];
}

__device__ inline void wait_for_scales_and_h(FewShared& shared, int32_t i) {
  ptx::wait(ptx::shared_address(&shared.h_there[i % kFewMails]),
            static_cast<uint32_t>(i / kFewMails % 2));
}

struct FewRing {
  int stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kFewStages) {
      stage = 0;
      parity ^= 1;
    }
  }
};

}  // namespace cadre::cuda::hopper

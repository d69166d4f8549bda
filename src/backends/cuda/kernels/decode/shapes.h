// The shapes of the fast kernels: how many rows, tokens and bytes of k a warp has in shared memory
// at a time, for one, few and many tokens. Chosen by measurement on an H200 (docs/performance.md).
#pragma once

#include <algorithm>
#include <cstddef>

namespace cadre::cuda {

/// What rows of weights hold, and what their tokens are then: for kPlain numbers of the compute
/// dtype on both sides, for kFp8 e4m3 codes on both sides; for kFp4 and kMxFp8 codes with a scale
/// for each 32 of k, and tokens as float16 (half_rows.cuh).
enum class Kind { kPlain, kFp8, kFp4, kMxFp8 };

constexpr bool is_mx(Kind kind) { return kind == Kind::kFp4 || kind == Kind::kMxFp8; }

/// Bytes of a token beside one byte of weights.
constexpr int token_ratio(Kind kind) {
  return kind == Kind::kFp4 ? 4 : kind == Kind::kMxFp8 ? 2 : 1;
}

/// Of k under one scale of a token.
inline constexpr int kFp8Group = 128;

/// A ring of kStages stages for each of kWarps warps. A stage holds kChunk bytes (128 or 256) of
/// 16 * kM rows of weights, the upper 8 * kM of them a half of their own (up beside gate), and what
/// belongs to them of kTokens rows of tokens (1, or a multiple of 8). With quantised weights the
/// scales are there too; and resident tokens (one, by default) are not in the ring, but in shared
/// memory as a whole.
template <Kind kKind_, int kWarps_, int kM_, int kTokens_, int kChunk_, int kStages_,
          bool kIsResident_ = kKind_ != Kind::kPlain&& kTokens_ == 1>
struct StreamShape {
  static constexpr Kind kKind = kKind_;
  static constexpr int kWarps = kWarps_;
  static constexpr int kM = kM_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kN = (kTokens + 7) / 8;
  static constexpr int kChunk = kChunk_;
  static constexpr int kStages = kStages_;
  static constexpr bool kIsResident = kIsResident_;
  static constexpr bool kIsMx = is_mx(kKind);
  static constexpr int kPieces = kChunk / 16;       // of a row, each 16 bytes
  static constexpr int kRowsAtOnce = 32 / kPieces;  // that a warp copies in one instruction
  static constexpr int kRows = 16 * kM;
  static constexpr int kHalf = 8 * kM;
  // Rows of MX weights and tokens in a stage lie so that ldmatrix, and a load of 16 bytes by each
  // lane, meet every bank once.
  static constexpr int kPitch = kIsMx ? kChunk + 16 : kChunk;
  static constexpr int kTokenChunk = kChunk * token_ratio(kKind);
  static constexpr int kTokenPitch = kIsMx ? kTokenChunk + 64 : kTokenChunk;
  static constexpr int kHalfBytes = kHalf * kPitch;
  // kFp8: a word with the scale and one with its place in the word, for each group of each row.
  static constexpr int kGroups = kChunk / kFp8Group;
  static constexpr int kRowScaleBytes = kKind == Kind::kFp8 ? 8 * kGroups : 0;
  static constexpr int kTokenScaleBytes = kKind == Kind::kFp8 && !kIsResident ? 4 * kGroups : 0;
  static constexpr int kTokensAt = 2 * kHalfBytes;  // in a stage
  static constexpr int kScalesAt = kTokensAt + (kIsResident ? 0 : kTokens * kTokenPitch);
  static constexpr int kTokenScalesAt = kScalesAt + (kIsMx ? 32 * 16 : kRows * kRowScaleBytes);
  static constexpr int kStageBytes = (kTokenScalesAt + kTokens * kTokenScaleBytes + 15) / 16 * 16;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPartFloats = kM * kN * 4 * 32;
  static constexpr int kPartBytes = kPartFloats * 4;
  // MX: a float32 for each row and group of a stage, of the stage that is multiplied.
  static constexpr int kMxGroups = kKind == Kind::kFp4 ? kChunk / 16 : kChunk / 32;
  static constexpr int kMxScaleBytes = kIsMx ? kRows * kMxGroups * 4 : 0;
  static constexpr int kBytes = kWarps * (kRingBytes + 2 * kPartBytes + kMxScaleBytes);
  // Sums of one output that are kept apart, so that products need not wait for each other.
  static constexpr int kSets = kIsMx || kM * kN >= 4 ? 1 : 4 / (kM * kN);
  // The tokens of a stage are too many to be in registers at once: its place is free for the next
  // copies only when all is multiplied.
  static constexpr bool kReadsTokensLate = kKind == Kind::kFp8 && kN >= 4;
};

/// Where a tile's sum of row r (below 8 * kM, of the lower half) and a token lies among its sums;
/// the upper half's lies kUpperHalf behind it.
template <int kN>
__host__ __device__ constexpr int place_of_sum(int r, int token) {
  return ((r / 8 * kN + token / 8) * 4 + token % 2) * 32 + r % 8 * 4 + token % 8 / 2;
}
inline constexpr int kUpperHalf = 2 * 32;

inline constexpr int kSmallTokens = 8;
inline constexpr size_t kSharedOfTwo = 226 * 1024;  // Hopper's 228 KiB, less what two blocks cost
inline constexpr size_t kStaticShared = 1024;       // more than the kernels have
inline constexpr int kSignalLeft =
    2;  // chunks of a warp of `up`: with fewer, `down` starts too late

/// A call's class: one token, up to kSmallTokens, more, or any number on GPUs with little shared
/// memory. For one token, two blocks share a multiprocessor: `up`, and the `down` after it with its
/// first weights. For more, a block has all of the memory; for many, it takes its shape from the
/// largest number of tokens of an expert.
enum class Size { kOne, kFew, kMany, kLean };

inline constexpr int kStreamWarps = 8;
/// Codes of four bits take more instructions for a byte than two warps a scheduler can give.
inline constexpr int kMxWarps = 12;
template <Kind kKind>
inline constexpr int kStreamThreads = (is_mx(kKind) ? kMxWarps : kStreamWarps) * 32;

template <Kind kKind, int kM, int kTokens, int kChunk, int kStages>
using Shape = StreamShape<kKind, kStreamWarps, kM, kTokens, kChunk, kStages>;

/// Shapes by the largest number of tokens of an entry, ascending.
template <typename First, typename... Rest>
struct Choice {
  using Smallest = First;
  static constexpr int kBytes = std::max({First::kBytes, Rest::kBytes...});
  static constexpr int kMostTokens = std::max({First::kTokens, Rest::kTokens...});

  /// act(S{}) with the first shape S that takes so many tokens.
  template <typename Act>
  static constexpr void with(int tokens, const Act& act) {
    if constexpr (sizeof...(Rest) > 0) {
      if (tokens > First::kTokens) return Choice<Rest...>::with(tokens, act);
    }
    act(First{});
  }
};

/// Of a kind of operands; kM of `down` is 1 where a block has up to 16 columns.
template <Kind kKind, Size kSize>
struct UpShapes;
template <Kind kKind, Size kSize, int kM>
struct DownShapes;

// Tiles of few rows of h make even shares; tiles of many need fewer instructions for a byte.
template <>
struct UpShapes<Kind::kPlain, Size::kOne> : Choice<Shape<Kind::kPlain, 1, 1, 256, 2>> {};
template <>
struct DownShapes<Kind::kPlain, Size::kOne, 1> : Choice<Shape<Kind::kPlain, 1, 1, 256, 4>> {};
template <>
struct DownShapes<Kind::kPlain, Size::kOne, 2> : Choice<Shape<Kind::kPlain, 2, 1, 128, 3>> {};

template <>
struct UpShapes<Kind::kPlain, Size::kFew> : Choice<Shape<Kind::kPlain, 2, 8, 256, 2>> {};
template <>
struct DownShapes<Kind::kPlain, Size::kFew, 1> : Choice<Shape<Kind::kPlain, 1, 8, 256, 4>> {};
template <>
struct DownShapes<Kind::kPlain, Size::kFew, 2> : Choice<Shape<Kind::kPlain, 2, 8, 256, 2>> {};

/// Rows of 16-bit numbers.
template <Kind kKind>
using ManyWide = Choice<Shape<kKind, 2, 8, 256, 2>, StreamShape<kKind, 7, 2, 16, 256, 2>,
                        StreamShape<kKind, 6, 2, 24, 256, 2>, StreamShape<kKind, 5, 2, 32, 256, 2>,
                        StreamShape<kKind, 6, 1, 64, 128, 2>>;
template <Kind kKind, int kFirstStages>
using ManyNarrow = Choice<Shape<kKind, 1, 8, 256, kFirstStages>, Shape<kKind, 1, 16, 256, 2>,
                          Shape<kKind, 1, 24, 256, 2>, StreamShape<kKind, 7, 1, 32, 256, 2>,
                          StreamShape<kKind, 6, 1, 64, 128, 2>>;

template <>
struct UpShapes<Kind::kPlain, Size::kMany> : ManyWide<Kind::kPlain> {};
template <>
struct DownShapes<Kind::kPlain, Size::kMany, 1> : ManyNarrow<Kind::kPlain, 4> {};
template <>
struct DownShapes<Kind::kPlain, Size::kMany, 2> : ManyWide<Kind::kPlain> {};

template <>
struct UpShapes<Kind::kPlain, Size::kLean> : Choice<Shape<Kind::kPlain, 1, 8, 128, 3>> {};
template <>
struct DownShapes<Kind::kPlain, Size::kLean, 1> : Choice<Shape<Kind::kPlain, 1, 8, 128, 3>> {};

// Half the bytes of bfloat16: at one token all of `down` may lie in shared memory before h comes.
// More stages of `down` would find no room beside `up`. An expert with more than kSmallTokens
// tokens is several entries: shapes for more spilled registers and are slower for most
// (docs/performance_gpu.md).
template <>
struct UpShapes<Kind::kFp8, Size::kOne> : Choice<Shape<Kind::kFp8, 1, 1, 256, 2>> {};
template <>
struct DownShapes<Kind::kFp8, Size::kOne, 1> : Choice<Shape<Kind::kFp8, 1, 1, 256, 3>> {};
template <>
struct DownShapes<Kind::kFp8, Size::kOne, 2> : Choice<Shape<Kind::kFp8, 2, 1, 128, 3>> {};
template <>
struct UpShapes<Kind::kFp8, Size::kFew> : Choice<Shape<Kind::kFp8, 2, 8, 256, 2>> {};
template <>
struct DownShapes<Kind::kFp8, Size::kFew, 1> : Choice<Shape<Kind::kFp8, 1, 8, 256, 3>> {};
template <>
struct DownShapes<Kind::kFp8, Size::kFew, 2> : Choice<Shape<Kind::kFp8, 2, 8, 256, 2>> {};

// Few tokens lie in shared memory as a whole where they fit (kFew), else in the rings (kMany).
template <Kind kKind, int kM, int kTokens, int kStages, bool kIsResident>
using MxShape = Choice<StreamShape<kKind, kMxWarps, kM, kTokens, 128, kStages, kIsResident>>;

template <Kind kKind>
requires(is_mx(kKind)) struct UpShapes<kKind, Size::kOne> : MxShape<kKind, 1, 1, 3, true> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct DownShapes<kKind, Size::kOne, 1> : MxShape<kKind, 1, 1, 2, true> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct DownShapes<kKind, Size::kOne, 2> : MxShape<kKind, 2, 1, 2, true> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct UpShapes<kKind, Size::kFew> : MxShape<kKind, 2, 8, 2, true> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct DownShapes<kKind, Size::kFew, 1> : MxShape<kKind, 1, 8, 3, true> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct DownShapes<kKind, Size::kFew, 2> : MxShape<kKind, 2, 8, 2, true> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct UpShapes<kKind, Size::kMany>
    : Choice<StreamShape<kKind, 9, 2, 8, 128, 2, false>> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct DownShapes<kKind, Size::kMany, 1> : MxShape<kKind, 1, 8, 2, false> {
};
template <Kind kKind>
requires(is_mx(kKind)) struct DownShapes<kKind, Size::kMany, 2>
    : Choice<StreamShape<kKind, 9, 2, 8, 128, 2, false>> {
};

}  // namespace cadre::cuda

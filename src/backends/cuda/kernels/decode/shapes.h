// The shapes of the fast kernels: how many rows, tokens and bytes of k a warp has in shared memory
// at a time, for one, few and many tokens. Chosen by measurement on an H200 (docs/performance.md).
#pragma once

#include <algorithm>
#include <cstddef>

namespace cadre::cuda {

/// A ring of kStages stages for each of kWarps warps. A stage holds kChunk bytes (128 or 256) of
/// 16 * kM rows of weights, the upper 8 * kM of them a half of their own (up beside gate), and of
/// kTokens rows of tokens (1, or a multiple of 8).
template <int kWarps_, int kM_, int kTokens_, int kChunk_, int kStages_>
struct StreamShape {
  static constexpr int kWarps = kWarps_;
  static constexpr int kM = kM_;
  static constexpr int kTokens = kTokens_;
  static constexpr int kN = (kTokens + 7) / 8;
  static constexpr int kChunk = kChunk_;
  static constexpr int kStages = kStages_;
  static constexpr int kPieces = kChunk / 16;       // of a row, each 16 bytes
  static constexpr int kRowsAtOnce = 32 / kPieces;  // that a warp copies in one instruction
  static constexpr int kHalf = 8 * kM;
  static constexpr int kHalfBytes = kHalf * kChunk;
  static constexpr int kStageBytes = 2 * kHalfBytes + kTokens * kChunk;
  static constexpr int kRingBytes = kStages * kStageBytes;
  static constexpr int kPartFloats = kM * kN * 4 * 32;
  static constexpr int kPartBytes = kPartFloats * 4;
  static constexpr int kBytes = kWarps * (kRingBytes + 2 * kPartBytes);
  // Sums of one output that are kept apart, so that products need not wait for each other.
  static constexpr int kSets = kM * kN >= 4 ? 1 : 4 / (kM * kN);
};

/// Where a tile's sum of row r (below 8 * kM, of the lower half) and a token lies among its sums;
/// the upper half's lies kUpperHalf behind it.
template <int kN>
__host__ __device__ constexpr int place_of_sum(int r, int token) {
  return ((r / 8 * kN + token / 8) * 4 + token % 2) * 32 + r % 8 * 4 + token % 8 / 2;
}
inline constexpr int kUpperHalf = 2 * 32;

inline constexpr int kStreamWarps = 8;
inline constexpr int kStreamThreads = kStreamWarps * 32;
inline constexpr int kSmallTokens = 8;
inline constexpr int kMaxEntryTokens = 64;
inline constexpr size_t kSharedOfTwo = 226 * 1024;  // Hopper's 228 KiB, less what two blocks cost
inline constexpr size_t kStaticShared = 1024;       // more than the kernels have
inline constexpr int kSignalLeft =
    2;  // chunks of a warp of `up`: with fewer, `down` starts too late

/// A call's class: one token, up to kSmallTokens, more, or any number on GPUs with little shared
/// memory. For one token, two blocks share a multiprocessor: `up`, and the `down` after it with its
/// first weights. For more, a block has all of the memory; for many, it takes its shape from the
/// largest number of tokens of an expert.
enum class Size { kOne, kFew, kMany, kLean };

template <int kM, int kTokens, int kChunk, int kStages>
using Shape = StreamShape<kStreamWarps, kM, kTokens, kChunk, kStages>;

/// The shape of one path, for up to 8 tokens of an expert, or of five, for up to 8, 16, 24, 32
/// and 64.
template <typename One_>
struct Single {
  using One = One_;
  static constexpr int kBytes = One::kBytes;
};
template <typename One_, typename Two_, typename Three_, typename Four_, typename Eight_>
struct Choice {
  using One = One_;
  using Two = Two_;
  using Three = Three_;
  using Four = Four_;
  using Eight = Eight_;
  static constexpr int kBytes =
      std::max({One::kBytes, Two::kBytes, Three::kBytes, Four::kBytes, Eight::kBytes});
};

template <Size kSize>
struct UpShapes;
template <Size kSize, int kM>
struct DownShapes;

// Tiles of few rows of h make even shares; tiles of many need fewer instructions for a byte.
template <>
struct UpShapes<Size::kOne> : Single<Shape<1, 1, 256, 2>> {};
template <>
struct DownShapes<Size::kOne, 1> : Single<Shape<1, 1, 256, 4>> {};
template <>
struct DownShapes<Size::kOne, 2> : Single<Shape<2, 1, 128, 3>> {};

template <>
struct UpShapes<Size::kFew> : Single<Shape<2, 8, 256, 2>> {};
template <>
struct DownShapes<Size::kFew, 1> : Single<Shape<1, 8, 256, 4>> {};
template <>
struct DownShapes<Size::kFew, 2> : Single<Shape<2, 8, 256, 2>> {};

template <>
struct UpShapes<Size::kMany>
    : Choice<Shape<2, 8, 256, 2>, StreamShape<7, 2, 16, 256, 2>, StreamShape<6, 2, 24, 256, 2>,
             StreamShape<5, 2, 32, 256, 2>, StreamShape<6, 1, 64, 128, 2>> {};
template <>
struct DownShapes<Size::kMany, 1>
    : Choice<Shape<1, 8, 256, 4>, Shape<1, 16, 256, 2>, Shape<1, 24, 256, 2>,
             StreamShape<7, 1, 32, 256, 2>, StreamShape<6, 1, 64, 128, 2>> {};
template <>
struct DownShapes<Size::kMany, 2>
    : Choice<Shape<2, 8, 256, 2>, StreamShape<7, 2, 16, 256, 2>, StreamShape<6, 2, 24, 256, 2>,
             StreamShape<5, 2, 32, 256, 2>, StreamShape<6, 1, 64, 128, 2>> {};

template <>
struct UpShapes<Size::kLean> : Single<Shape<1, 8, 128, 3>> {};
template <>
struct DownShapes<Size::kLean, 1> : Single<Shape<1, 8, 128, 3>> {};

}  // namespace cadre::cuda

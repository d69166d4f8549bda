// Pieces cut along K. The pieces of a call rarely fill a whole number of rounds over the clusters;
// where a piece takes long, those of the last, broken round are cut into parts, which even it out.
// Parts of a piece add up one after the other, in the order of K, whoever multiplies them: the same
// bits on every run.
#pragma once

#include "backends/cuda/kernels/hopper_schedule.cuh"

namespace cadre::cuda::hopper {

/// The stages of K that a piece of work covers.
struct Part {
  int32_t first;  // tile of K
  int32_t count;
  int32_t number;  // kMaxParts * slot of its piece + parts before it, + kLast; -1: a whole piece
};

inline constexpr int32_t kMaxParts = 8;
inline constexpr int32_t kLast = 1 << 30;  // in a part's number

struct GemmShared : Shared {
  alignas(16) Part parts[kStages];
};

/// Numbers of pieces of work, whole pieces first, then all first parts, all second ones, and so on:
/// a part's predecessor has been taken some time before it.
class Parts {
 public:
  __device__ Parts() {}
  /// `pieces` of all experts.
  __device__ Parts(int32_t pieces, int32_t clusters) {
    if (pieces < clusters || pieces % clusters == 0) return;
    cut_ = pieces % clusters;
    whole_ = pieces - cut_;
    count_ = best_count(clusters);
  }

  /// The piece's number and its part of K.
  __device__ int32_t find(const Params& p, int32_t item, Part& part) const {
    part = {0, p.k_tiles, -1};
    if (cut_ == 0 || item < whole_) return item;
    const int32_t turn = (item - whole_) / cut_;
    if (turn >= count_) return whole_ + cut_;  // no such piece
    const int32_t piece = (item - whole_) % cut_;
    part.first = p.k_tiles * turn / count_;
    part.count = p.k_tiles * (turn + 1) / count_ - part.first;
    part.number = piece * kMaxParts + turn + (turn == count_ - 1 ? kLast : 0);
    return whole_ + piece;
  }

 private:
  // The number of parts with which the clusters are done first: rounds of parts, each as long as
  // its share of K and 1 / 64 of a piece for the sums.
  __device__ int32_t best_count(int32_t clusters) const {
    int32_t best = 1;
    int32_t least = INT32_MAX;
    for (int32_t count = 2; count <= kMaxParts; ++count) {
      const int32_t rounds = (cut_ * count + clusters - 1) / clusters;
      const int32_t time = rounds * (64 * 256 / count + 256);
      if (time < least) {
        least = time;
        best = count;
      }
    }
    return best;
  }

  int32_t cut_ = 0;
  int32_t whole_ = 0;
  int32_t count_ = 0;
};

/// A warp's sums of one part join those of the parts before it. False when more parts follow.
__device__ inline bool join_parts(const Params& p, const Part& part, float (&sums)[128]) {
  const uint32_t lane = threadIdx.x % 32;
  const int32_t number = part.number & ~kLast;
  const int32_t turn = number % kMaxParts;
  const int64_t cta = number / kMaxParts * kClusterSize + static_cast<int32_t>(ptx::cluster_rank());
  const int64_t place = cta * kConsumers * 4 + threadIdx.x / 32;
  float4* partial = reinterpret_cast<float4*>(p.partial_sums) + place * 1024 + lane;
  if (turn > 0) {
    while (ptx::load_acquire(p.partial_turns + place) < static_cast<uint32_t>(turn)) {
    }
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      const float4 before = __ldcg(partial + 32 * i);
      sums[4 * i] += before.x;
      sums[4 * i + 1] += before.y;
      sums[4 * i + 2] += before.z;
      sums[4 * i + 3] += before.w;
    }
  }
  if (number != part.number) return true;  // the last
#pragma unroll
  for (int i = 0; i < 32; ++i) {
    __stcg(partial + 32 * i,
           make_float4(sums[4 * i], sums[4 * i + 1], sums[4 * i + 2], sums[4 * i + 3]));
  }
  __syncwarp();
  if (lane == 0) ptx::add_release(p.partial_turns + place);
  return false;
}

}  // namespace cadre::cuda::hopper

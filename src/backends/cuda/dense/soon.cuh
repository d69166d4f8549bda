// Weights that are read soon, fetched into the L2 cache by blocks that a short kernel has beside
// its own: between products the memory would rest.
#pragma once

#include <algorithm>
#include <span>

#include "backends/cuda/dense/values.cuh"
#include "cadre/tensor.h"

namespace cadre::cuda {

/// Passed to kernels by value.
struct Soon {
  static constexpr int kMaxRanges = 3;
  static constexpr int64_t kPieceBytes = 8192;  // one instruction
  static constexpr int kBlocks = 32;            // of 128 threads or more
  // Of more than this little is left in the cache when it is read.
  static constexpr int64_t kMaxBytes = int64_t{24} << 20;

  const char* data[kMaxRanges] = {};
  int64_t bytes[kMaxRanges] = {};
};

/// What fits of `weights`; nothing for more than a few rows, whose products are not short of time.
inline Soon soon_of(std::span<const TensorView> weights, int64_t num_rows) {
  constexpr int64_t kMaxRows = 8;
  Soon soon;
  if (num_rows > kMaxRows) return soon;
  int64_t left = Soon::kMaxBytes;
  int used = 0;
  for (const TensorView& weight : weights) {
    const bool aligned = reinterpret_cast<uintptr_t>(weight.data()) % 16 == 0;
    if (used == Soon::kMaxRanges || !aligned || !weight.is_contiguous()) break;
    const int64_t bytes = std::min(left, static_cast<int64_t>(weight.nbytes())) / 16 * 16;
    soon.data[used] = static_cast<const char*>(weight.data());
    soon.bytes[used++] = bytes;
    left -= bytes;
  }
  return soon;
}

inline bool is_empty(const Soon& soon) { return soon.bytes[0] == 0; }

#ifdef __CUDACC__
/// By all threads of block `block` of Soon::kBlocks.
__device__ inline void fetch(const Soon& soon, int block) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  const int64_t thread = static_cast<int64_t>(block) * blockDim.x + threadIdx.x;
  const int64_t step = static_cast<int64_t>(Soon::kBlocks) * blockDim.x * Soon::kPieceBytes;
#pragma unroll
  for (int range = 0; range < Soon::kMaxRanges; ++range) {
    for (int64_t at = thread * Soon::kPieceBytes; at < soon.bytes[range]; at += step) {
      const int64_t left = soon.bytes[range] - at;
      const auto size = static_cast<uint32_t>(left < Soon::kPieceBytes ? left : Soon::kPieceBytes);
      asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(soon.data[range] + at),
                   "r"(size)
                   : "memory");
    }
  }
#endif
}
#endif

}  // namespace cadre::cuda

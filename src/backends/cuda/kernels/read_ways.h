// Kernels that do nothing but read memory, as fast as they can, and what timing them needs.
#pragma once

#include <cuda_runtime_api.h>

#include <cstdint>

#include "cadre/dtype.h"

namespace cadre::cuda {

struct ReadWay {
  const char* name;
  int compute_capability;  // 80, 90: from there on
  /// Reads [first, first + bytes) once; `first` and `bytes` are multiples of 16.
  void (*read)(const void* first, int64_t bytes, int num_multiprocessors, cudaStream_t stream);
};

struct ReadWays {
  const ReadWay* ways;
  int count;
};

ReadWays read_ways();

/// Keeps the stream busy with a single thread, so that what is put into it meanwhile runs back to
/// back.
void keep_busy(double seconds, cudaStream_t stream);

/// Uniform in (-1, 1): bf16, fp16 or f32.
void fill_uniform(void* to, DType dtype, int64_t count, uint32_t seed, cudaStream_t stream);

}  // namespace cadre::cuda

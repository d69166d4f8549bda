#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/read_ways.h"

namespace cadre::cuda {
namespace {

__device__ unsigned int sink;  // what was read must seem to be used

__device__ uint4 load_once(const uint4* address) {
  uint4 v;
  asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(address));
  return v;
}

__device__ void use(unsigned int value) {
  if (value == 0x9e3779b9u) sink = value;
}

constexpr int kThreads = 512;
constexpr int kLoads = 8;  // in flight, of a thread

// All threads side by side, then on by the width of the grid.
__global__ void __launch_bounds__(kThreads) read_interleaved(const uint4* first, int64_t count) {
  unsigned int value = 0;
  const int64_t width = int64_t{gridDim.x} * kThreads;
  int64_t i = int64_t{blockIdx.x} * kThreads + threadIdx.x;
  for (; i + (kLoads - 1) * width < count; i += kLoads * width) {
    uint4 v[kLoads];
#pragma unroll
    for (int j = 0; j < kLoads; ++j) v[j] = load_once(first + i + j * width);
#pragma unroll
    for (int j = 0; j < kLoads; ++j) value ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  }
  for (; i < count; i += width) {
    const uint4 v = load_once(first + i);
    value ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  use(value);
}

// Small blocks, one piece each: the hardware hands them out.
__global__ void __launch_bounds__(kThreads) read_pieces(const uint4* first, int64_t count) {
  unsigned int value = 0;
  const int64_t begin = int64_t{blockIdx.x} * kThreads * kLoads + threadIdx.x;
  uint4 v[kLoads];
#pragma unroll
  for (int j = 0; j < kLoads; ++j) {
    const int64_t i = begin + j * kThreads;
    v[j] = i < count ? load_once(first + i) : uint4{};
  }
#pragma unroll
  for (int j = 0; j < kLoads; ++j) value ^= v[j].x ^ v[j].y ^ v[j].z ^ v[j].w;
  use(value);
}

// The copy engine of each multiprocessor fills a ring in shared memory; nobody looks at it.
constexpr int kStages = 12;
constexpr int kStageBytes = 16 * 1024;

__global__ void __launch_bounds__(32) read_bulk(const char* first, int64_t bytes) {
#if __CUDA_ARCH__ >= 900
  extern __shared__ __align__(128) char ring[];
  __shared__ __align__(8) uint64_t barriers[kStages];
  if (threadIdx.x != 0) return;
  const auto shared = [](const void* p) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(p));
  };
  for (int s = 0; s < kStages; ++s) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared(barriers + s)));
  }
  asm volatile("fence.proxy.async.shared::cta;");
  const auto fetch = [&](int64_t piece, int s) {
    const int64_t begin = piece * kStageBytes;
    const auto size = static_cast<uint32_t>(min(int64_t{kStageBytes}, bytes - begin));
    asm volatile(
        "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared(barriers + s)),
        "r"(size));
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::
            "r"(shared(ring + s * kStageBytes)),
        "l"(first + begin), "r"(size), "r"(shared(barriers + s))
        : "memory");
  };
  const auto wait = [&](int s, uint32_t parity) {
    uint32_t done = 0;
    while (done == 0) {
      asm volatile(
          "{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; "
          "selp.u32 %0, 1, 0, p; }"
          : "=r"(done)
          : "r"(shared(barriers + s)), "r"(parity)
          : "memory");
    }
  };
  const int64_t pieces = (bytes + kStageBytes - 1) / kStageBytes;
  const int64_t mine = blockIdx.x < pieces ? (pieces - blockIdx.x - 1) / gridDim.x + 1 : 0;
  const auto piece = [&](int64_t i) { return blockIdx.x + i * gridDim.x; };
  for (int64_t i = 0; i < min(mine, int64_t{kStages}); ++i) fetch(piece(i), static_cast<int>(i));
  for (int64_t i = 0; i < mine; ++i) {
    const int s = static_cast<int>(i % kStages);
    wait(s, static_cast<uint32_t>(i / kStages) & 1u);
    if (i + kStages < mine) fetch(piece(i + kStages), s);
  }
#endif
}

void launch_interleaved(const void* first, int64_t bytes, int num_multiprocessors,
                        cudaStream_t stream) {
  launch("read_interleaved", read_interleaved, dim3(static_cast<unsigned>(4 * num_multiprocessors)),
         dim3(kThreads), 0, stream, Launch::kPlain, static_cast<const uint4*>(first), bytes / 16);
}

void launch_pieces(const void* first, int64_t bytes, int /*num_multiprocessors*/,
                   cudaStream_t stream) {
  const int64_t count = bytes / 16;
  constexpr int64_t kPiece = int64_t{kThreads} * kLoads;
  launch("read_pieces", read_pieces, dim3(static_cast<unsigned>((count + kPiece - 1) / kPiece)),
         dim3(kThreads), 0, stream, Launch::kPlain, static_cast<const uint4*>(first), count);
}

void launch_bulk(const void* first, int64_t bytes, int num_multiprocessors, cudaStream_t stream) {
  constexpr size_t kRing = size_t{kStages} * kStageBytes;
  allow_shared_memory(read_bulk, kRing);
  launch("read_bulk", read_bulk, dim3(static_cast<unsigned>(num_multiprocessors)), dim3(32), kRing,
         stream, Launch::kPlain, static_cast<const char*>(first), bytes);
}

constexpr ReadWay kReadWays[] = {
    {"16-byte loads, interleaved", 80, launch_interleaved},
    {"16-byte loads, a piece a block", 80, launch_pieces},
    {"bulk copies to shared memory", 90, launch_bulk},
};

__global__ void spin(long long nanoseconds) {
  unsigned long long start;
  unsigned long long now;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < static_cast<unsigned long long>(nanoseconds));
}

__device__ float uniform(uint64_t i, uint32_t seed) {
  uint64_t z = (i + 1) * 0x9e3779b97f4a7c15ull + seed;  // splitmix64
  z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
  z = (z ^ (z >> 27)) * 0x94d049bb133111ebull;
  return static_cast<float>((z ^ (z >> 31)) >> 40) * 0x1p-23f - 1.0f;
}

template <typename T>
__global__ void fill_uniform(T* to, int64_t count, uint32_t seed) {
  const int64_t width = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += width) {
    to[i] = static_cast<T>(uniform(static_cast<uint64_t>(i), seed));
  }
}

template <typename T>
void fill(void* to, int64_t count, uint32_t seed, cudaStream_t stream) {
  launch("fill_uniform", fill_uniform<T>, dim3(1024), dim3(256), 0, stream, Launch::kPlain,
         static_cast<T*>(to), count, seed);
}

}  // namespace

ReadWays read_ways() { return {kReadWays, sizeof kReadWays / sizeof *kReadWays}; }

void keep_busy(double seconds, cudaStream_t stream) {
  launch("spin", spin, dim3(1), dim3(1), 0, stream, Launch::kPlain,
         static_cast<long long>(seconds * 1e9));
}

void fill_uniform(void* to, DType dtype, int64_t count, uint32_t seed, cudaStream_t stream) {
  const auto run = dtype == DType::kBF16  ? fill<__nv_bfloat16>
                   : dtype == DType::kF16 ? fill<__half>
                                          : fill<float>;
  run(to, count, seed, stream);
}

}  // namespace cadre::cuda

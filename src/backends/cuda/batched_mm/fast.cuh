// The fast pair of decode kernels for one dtype. Blocks are as many as multiprocessors, each with
// an even share of the rows: `up` of the rows of all active experts, `down` of the output columns,
// so that it can sum over a token's experts by itself. `down` starts while `up` runs, and has its
// first weights in shared memory when h is ready.
#pragma once

#include <algorithm>

#include "backends/cuda/batched_mm/stream.cuh"
#include "backends/cuda/batched_mm/values.cuh"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {

inline constexpr int kStreamWarps = 8;
inline constexpr int kStreamThreads = kStreamWarps * 32;
inline constexpr int kSmallTokens = 8;
inline constexpr int kMaxEntryTokens = 64;
inline constexpr size_t kHalfOfShared = 113 * 1024;  // of Hopper's 228 KiB, for one block of two
inline constexpr int kPrefetchedStages = 8;

/// A call's class: one token, up to kSmallTokens, or more.
enum class Size { kOne, kFew, kMany };

/// For one or few tokens, two blocks share a multiprocessor: `up` and the `down` after it. For
/// many, one block has all of its memory, and takes its shape from the largest number of tokens of
/// an expert.
template <int kM, int kTokens, int kChunk, int kStages>
using Shape = StreamShape<kStreamWarps, kM, kTokens, kChunk, kStages>;

template <Size kSize, int kM>
struct Shapes;
template <>
struct Shapes<Size::kOne, 1> {
  using One = Shape<1, 1, 256, 3>;
  static constexpr int kBytes = One::kBytes;
};
template <>
struct Shapes<Size::kOne, 2> {
  using One = Shape<2, 1, 128, 3>;
  static constexpr int kBytes = One::kBytes;
};
template <>
struct Shapes<Size::kFew, 1> {
  using One = Shape<1, 8, 256, 2>;
  static constexpr int kBytes = One::kBytes;
};
template <>
struct Shapes<Size::kFew, 2> {
  using One = Shape<2, 8, 128, 2>;
  static constexpr int kBytes = One::kBytes;
};
template <>
struct Shapes<Size::kMany, 1> {
  using One = Shape<1, 8, 256, 3>;
  using Two = Shape<1, 16, 256, 2>;
  using Four = Shape<1, 32, 128, 3>;
  using Eight = Shape<1, 64, 128, 2>;
  static constexpr int kBytes =
      std::max(std::max(One::kBytes, Two::kBytes), std::max(Four::kBytes, Eight::kBytes));
};
template <>
struct Shapes<Size::kMany, 2> {
  using One = Shape<2, 8, 128, 4>;
  using Two = Shape<2, 16, 128, 3>;
  using Four = Shape<2, 32, 128, 2>;
  using Eight = Shape<1, 64, 128, 2>;
  static constexpr int kBytes =
      std::max(std::max(One::kBytes, Two::kBytes), std::max(Four::kBytes, Eight::kBytes));
};

#ifdef __CUDACC__

/// h[row] from the sums of gate and up. Not inlined: it stands in every place of a tile.
template <typename T>
__device__ __noinline__ void store_h(const DecodeArgs& a, T* h, int expert, int row, float gate,
                                     float up) {
  up += bias_of(a.up_bias, a.bias_dtype, expert, row);
  if (a.gate_function.has_gate) gate += bias_of(a.gate_bias, a.bias_dtype, expert, row);
  h[row] = from_float<T>(apply(a.gate_function, gate, up));
}

/// A share of the list of all entries' tiles of rows of h.
template <typename T, int kM>
class UpJob {
 public:
  __device__ UpJob(const DecodeArgs& a, const Plan& plan) : a_(a), plan_(plan) {
    has_gate_ = a.gate_function.has_gate;
    tile_rows_ = has_gate_ ? 8 * kM : 16 * kM;
    tiles_each_ = (a.intermediate + tile_rows_ - 1) / tile_rows_;
    first_tile_ = share(blockIdx.x);
    num_tiles_ = share(blockIdx.x + 1) - first_tile_;
  }

  __device__ int num_tiles() const { return num_tiles_; }

  __device__ TileRows rows(int index) const {
    const Tile tile = tile_at(index);
    const int expert = plan_.entry_expert[tile.entry];
    const DeviceMatrix up = a_.up.expert<T>(expert);
    TileRows rows;
    rows.stride = up.row_stride * static_cast<int64_t>(sizeof(T));
    rows.high = static_cast<const char*>(up.data) + tile.row * rows.stride;
    if (has_gate_) {
      const DeviceMatrix gate = a_.gate.expert<T>(expert);
      rows.low = static_cast<const char*>(gate.data) + tile.row * rows.stride;
      rows.low_rows = rows.high_rows = tile.rows;
    } else {
      rows.low = rows.high;
      rows.high += 8 * kM * rows.stride;
      rows.low_rows = min(tile.rows, 8 * kM);
      rows.high_rows = tile.rows - rows.low_rows;
    }
    return rows;
  }

  __device__ TileTokens tokens(int index) const {
    const int entry = tile_at(index).entry;
    return {plan_.entry_first[entry], plan_.entry_count[entry]};
  }

  template <int kN>
  __device__ void emit(int index, const float (&sums)[kM][kN][4]) const {
    const Tile tile = tile_at(index);
    const int expert = plan_.entry_expert[tile.entry];
    const int first = plan_.entry_first[tile.entry];
    const int count = plan_.entry_count[tile.entry];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const int r = 8 * i + lane / 4;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int token = 8 * n + 2 * (lane % 4) + c;
          if (token >= count) continue;
          T* h = static_cast<T*>(a_.h) + plan_.pair[first + token] * a_.h_stride;
          if (has_gate_) {
            if (r < tile.rows)
              store_h(a_, h, expert, tile.row + r, sums[i][n][c], sums[i][n][c + 2]);
          } else {
            if (r < tile.rows) store_h(a_, h, expert, tile.row + r, 0, sums[i][n][c]);
            if (8 * kM + r < tile.rows) {
              store_h(a_, h, expert, tile.row + 8 * kM + r, 0, sums[i][n][c + 2]);
            }
          }
        }
      }
    }
  }

 private:
  struct Tile {
    int entry;
    int row;
    int rows;
  };
  // Where the share of a block begins: tiles * block / blocks without the large numbers.
  __device__ int share(uint32_t block) const {
    const uint32_t tiles = static_cast<uint32_t>(plan_.num_entries * tiles_each_);
    return static_cast<int>(tiles / gridDim.x * block + tiles % gridDim.x * block / gridDim.x);
  }
  __device__ Tile tile_at(int index) const {
    const auto tile = static_cast<uint32_t>(first_tile_ + index);
    const uint32_t entry = tile / static_cast<uint32_t>(tiles_each_);
    const int row = static_cast<int>(tile - entry * tiles_each_) * tile_rows_;
    return {static_cast<int>(entry), row, min(tile_rows_, a_.intermediate - row)};
  }

  const DecodeArgs& a_;
  const Plan& plan_;
  bool has_gate_;
  int tile_rows_;
  int tiles_each_;
  int first_tile_;
  int num_tiles_;
};

/// Output columns [begin, end): all entries for each block of up to 16 * kM of them.
template <typename T, int kM>
class DownJob {
 public:
  __device__ DownJob(const DecodeArgs& a, const Plan& plan, float* shared_y) : a_(a), plan_(plan) {
    const auto hidden = static_cast<uint32_t>(a.hidden);
    begin = static_cast<int>(hidden * blockIdx.x / gridDim.x);
    end = static_cast<int>(hidden * (blockIdx.x + 1) / gridDim.x);
    const int columns = end - begin;
    const int blocks = (columns + 16 * kM - 1) / (16 * kM);
    block_rows_ = blocks == 0 ? 0 : (columns + blocks - 1) / blocks;
    num_tiles_ = blocks * plan.num_entries;
    y = shared_y != nullptr ? shared_y : a.y + begin;
    y_stride = shared_y != nullptr ? columns : a.hidden;
  }

  __device__ int num_tiles() const { return num_tiles_; }

  __device__ TileRows rows(int index) const {
    const Tile tile = tile_at(index);
    const DeviceMatrix down = a_.down.expert<T>(plan_.entry_expert[tile.entry]);
    TileRows rows;
    rows.stride = down.row_stride * static_cast<int64_t>(sizeof(T));
    rows.low = static_cast<const char*>(down.data) + tile.row * rows.stride;
    rows.high = rows.low + 8 * kM * rows.stride;
    rows.low_rows = min(tile.rows, 8 * kM);
    rows.high_rows = tile.rows - rows.low_rows;
    return rows;
  }

  __device__ TileTokens tokens(int index) const {
    const int entry = tile_at(index).entry;
    return {plan_.entry_first[entry], plan_.entry_count[entry]};
  }

  template <int kN>
  __device__ void emit(int index, const float (&sums)[kM][kN][4]) const {
    const Tile tile = tile_at(index);
    const int first = plan_.entry_first[tile.entry];
    const int count = plan_.entry_count[tile.entry];
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < kM; ++i) {
      const int r = 8 * i + lane / 4;
#pragma unroll
      for (int n = 0; n < kN; ++n) {
#pragma unroll
        for (int c = 0; c < 2; ++c) {
          const int token = 8 * n + 2 * (lane % 4) + c;
          if (token >= count) continue;
          float* to = y + plan_.pair[first + token] * y_stride + (tile.row - begin);
          if (r < tile.rows) to[r] = sums[i][n][c];
          if (8 * kM + r < tile.rows) to[8 * kM + r] = sums[i][n][c + 2];
        }
      }
    }
  }

  int begin;
  int end;
  float* y;  // [pair][column - begin]
  int64_t y_stride;

 private:
  struct Tile {
    int entry;
    int row;
    int rows;
  };
  __device__ Tile tile_at(int index) const {
    int row = begin;
    while (index >= plan_.num_entries) {  // a few times at most
      index -= plan_.num_entries;
      row += block_rows_;
    }
    return {index, row, min(block_rows_, end - row)};
  }

  const DecodeArgs& a_;
  const Plan& plan_;
  int block_rows_;
  int num_tiles_;
};

#ifdef CADRE_DECODE_TRACE
__device__ unsigned long long trace_times[2][256][12];
__device__ inline void trace(int kernel, int point) {
  if (threadIdx.x != 0) return;
  unsigned long long t;
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(t)::"memory");
  trace_times[kernel][blockIdx.x][point] = t;
}
#else
__device__ inline void trace(int, int) {}
#endif

template <typename T, typename Shape>
__device__ void up_of(const DecodeArgs& a, const Plan& plan, char* memory) {
  const UpJob<T, Shape::kM> job(a, plan);
  const TokenRows x = {static_cast<const char*>(a.x), a.x_stride * int64_t{sizeof(T)}};
  WeightStream<T, Shape, UpJob<T, Shape::kM>> stream(memory, plan, job, x, a.hidden);
  stream.start_weights(0);
  trace(0, 3);
  let_next_kernel_start();
  stream.run();
  trace(0, 4);
}

/// Of an entry.
template <Size kSize>
inline constexpr int kMostTokens = kSize == Size::kMany ? kMaxEntryTokens : kSmallTokens;

template <typename T, Size kSize>
__global__ void __launch_bounds__(kStreamThreads, kSize == Size::kMany ? 1 : 2)
    fast_up(const __grid_constant__ DecodeArgs a) {
  // Tiles of few rows of h make even shares.
  using Of = Shapes<kSize, kSize == Size::kMany ? 2 : 1>;
  extern __shared__ __align__(128) char memory[];
  trace(0, 0);
  wait_for_previous_kernel();
  trace(0, 1);
  const Plan plan = build_plan<kStreamThreads>(memory + Of::kBytes, a, true, kMostTokens<kSize>);
  trace(0, 2);
  if constexpr (kSize != Size::kMany) {
    up_of<T, typename Of::One>(a, plan, memory);
  } else {
    if (plan.largest_count <= 8) return up_of<T, typename Of::One>(a, plan, memory);
    if (plan.largest_count <= 16) return up_of<T, typename Of::Two>(a, plan, memory);
    if (plan.largest_count <= 32) return up_of<T, typename Of::Four>(a, plan, memory);
    up_of<T, typename Of::Eight>(a, plan, memory);
  }
}

template <typename T, typename Shape>
__device__ void down_of(const DecodeArgs& a, const Plan& plan, char* memory, float* shared_y,
                        int prefetched_stages) {
  const DownJob<T, Shape::kM> job(a, plan, shared_y);
  const TokenRows h = {static_cast<const char*>(a.h), a.h_stride * int64_t{sizeof(T)}};
  WeightStream<T, Shape, DownJob<T, Shape::kM>> stream(memory, plan, job, h, a.intermediate);
  trace(1, 1);
  stream.start_weights(prefetched_stages);
  load_routing_weights<T>(plan, a);
  trace(1, 2);
  wait_for_previous_kernel();
  trace(1, 3);
  let_next_kernel_start();
  stream.run();
  trace(1, 4);
  __syncthreads();
  const int columns = job.end - job.begin;
  for (int i = threadIdx.x; i < a.num_tokens * columns; i += kStreamThreads) {
    const int column = i % columns;
    combine_one<T>(a, plan, i / columns, job.begin + column, job.y + column, job.y_stride);
  }
  trace(1, 5);
}

template <typename T, Size kSize, int kM>
__global__ void __launch_bounds__(kStreamThreads, kSize == Size::kMany ? 1 : 2)
    fast_down(const __grid_constant__ DecodeArgs a, bool y_is_shared, int prefetched_stages) {
  using Of = Shapes<kSize, kM>;
  extern __shared__ __align__(128) char memory[];
  char* const behind = memory + Of::kBytes;
  trace(1, 0);
  // The routing is older than `up`, which began when it was there.
  const Plan plan = build_plan<kStreamThreads>(behind, a, false, kMostTokens<kSize>);
  float* y = nullptr;
  if (y_is_shared) {
    y = reinterpret_cast<float*>(behind + plan_bytes(a.num_tokens * a.top_k, a.num_experts));
  }
  if constexpr (kSize != Size::kMany) {
    down_of<T, typename Of::One>(a, plan, memory, y, prefetched_stages);
  } else {
    if (plan.largest_count <= 8) {
      return down_of<T, typename Of::One>(a, plan, memory, y, prefetched_stages);
    }
    if (plan.largest_count <= 16) {
      return down_of<T, typename Of::Two>(a, plan, memory, y, prefetched_stages);
    }
    if (plan.largest_count <= 32) {
      return down_of<T, typename Of::Four>(a, plan, memory, y, prefetched_stages);
    }
    down_of<T, typename Of::Eight>(a, plan, memory, y, prefetched_stages);
  }
}

/// False when the device has too little shared memory.
template <typename T, Size kSize, int kM>
bool launch_fast(const DecodeArgs& a, const DecodeDevice& device) {
  const int grid = device.num_sms;
  const auto limit = static_cast<size_t>(device.shared_bytes);
  const size_t plan = plan_bytes(a.num_tokens * a.top_k, a.num_experts);
  const size_t up_bytes = Shapes < kSize, kSize == Size::kMany ? 2 : 1 > ::kBytes + plan;
  size_t down_bytes = Shapes<kSize, kM>::kBytes + plan;
  if (std::max(up_bytes, down_bytes) > limit) return false;
  const size_t columns = (a.hidden + grid - 1) / grid;
  const size_t y_bytes = columns * a.num_tokens * a.top_k * sizeof(float);
  const size_t wanted = kSize == Size::kMany ? limit : std::min(limit, kHalfOfShared);
  const bool y_is_shared = down_bytes + y_bytes <= wanted;
  if (y_is_shared) down_bytes += y_bytes;
  const Launch mode = device.has_dependent_launch ? Launch::kDependent : Launch::kPlain;
  const auto up = fast_up<T, kSize>;
  const auto down = fast_down<T, kSize, kM>;
  allow_shared_memory(up, up_bytes);
  allow_shared_memory(down, down_bytes);
  launch("batched_mm fast_up", up, grid, kStreamThreads, up_bytes, device.stream, mode, a);
  launch("batched_mm fast_down", down, grid, kStreamThreads, down_bytes, device.stream, mode, a,
         y_is_shared, kSize == Size::kMany ? 0 : kPrefetchedStages);
  return true;
}

template <typename T, Size kSize>
bool launch_fast(const DecodeArgs& a, const DecodeDevice& device) {
  const bool is_narrow = (a.hidden + device.num_sms - 1) / device.num_sms <= 16;
  return is_narrow ? launch_fast<T, kSize, 1>(a, device) : launch_fast<T, kSize, 2>(a, device);
}

template <typename T>
bool launch_fast(const DecodeArgs& a, const DecodeDevice& device) {
  // One token is one entry for each slot, so an entry never has two.
  if (a.num_tokens == 1 && a.top_k <= 32) return launch_fast<T, Size::kOne>(a, device);
  if (a.num_tokens > kSmallTokens && launch_fast<T, Size::kMany>(a, device)) return true;
  return launch_fast<T, Size::kFew>(a, device);
}

#endif

}  // namespace cadre::cuda

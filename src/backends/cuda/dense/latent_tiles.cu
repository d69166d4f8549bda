// Latent attention on the tensor cores, for DeepSeek's shape. A block has 64 rows (heads of a
// token, or of some tokens) and takes 32 keys at a time, the next ones on their way meanwhile. Its
// eight warps share the scores by rows and keys, and the sums by columns: each has 64 columns of
// all rows.
#include "backends/cuda/dense/attention_tiles.cuh"
#include "backends/cuda/dense/latent_kernels.h"
#include "backends/cuda/dense/mma.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kRows = kLatentTileRows;
constexpr int kWidth = kLatentRank + kLatentRope;
constexpr int kPieces = kWidth / 8;  // 16-byte pieces of a row
constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int kBands = kRows / 16;
constexpr int kColumns = kLatentRank / kWarps;  // of a warp's sums
constexpr int kQueryBytes = kRows * kWidth * 2;
static_assert(kPieces % 8 == 0 && kColumns == 64);

// What warps tell each other of the rows.
struct Exchange {
  float max[2][kRows];  // of the scores of each half of the keys
  float factor[kRows];  // for what was summed before
  float sum[2][kRows];
};

// Of kKeys keys at a time.
template <int kKeys>
struct Shape {
  static constexpr int kKeyBytes = kKeys * kWidth * 2;
  static constexpr int kWeightBytes = kRows * kKeys * 2;
  static constexpr int kTiles = kKeys / 16;  // of 8 keys, of a warp's scores
  static constexpr size_t kSharedBytes =
      kQueryBytes + 2 * static_cast<size_t>(kKeyBytes) + kWeightBytes + sizeof(Exchange);
};

// Pieces 2 k + {0, 1} of a row, for a lane that has one of the two: pieces of a row change places
// as in piece_offset(), and a row is a whole number of eight pieces.
struct Place {
  uint32_t row;
  uint32_t swap;

  __device__ Place(uint32_t tile, int row, int piece)
      : row(tile + static_cast<uint32_t>(row * kWidth * 2)),
        swap(static_cast<uint32_t>(piece ^ (row & 7))) {}
  __device__ uint32_t at(int k) const {
    return row + static_cast<uint32_t>((k >> 2) * 128) +
           ((swap ^ static_cast<uint32_t>(2 * (k & 3))) << 4);
  }
};

__device__ inline uint32_t piece_address(uint32_t tile, int row, int piece) {
  return tile +
         static_cast<uint32_t>(row * kWidth * 2 + (piece & ~7) * 16 + (((piece ^ row) & 7) << 4));
}

// Weights: rows of kKeys elements.
template <int kKeys>
__device__ inline uint32_t weight_address(uint32_t tile, int row, int piece) {
  const int swap = kKeys == 32 ? row / 2 & 3 : row & 7;
  return tile + static_cast<uint32_t>(row * kKeys * 2 + ((piece ^ swap) << 4));
}

__device__ void request_queries(const LatentCall& call, const AttentionTile& tile, uint32_t to) {
  const AttentionCall& base = call.base;
  constexpr int kLatentPieces = kLatentRank / 8;
#pragma unroll 2
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    const int piece = index % kPieces;
    const int32_t row = tile.first_row + index / kPieces;
    const bool valid = row < tile.rows;
    const uint16_t* from = static_cast<const uint16_t*>(base.q);
    if (valid && piece < kLatentPieces) {
      from += row_offset(base, tile, 0, row) + 8 * piece;
    } else if (valid) {
      from = static_cast<const uint16_t*>(call.q_rope) +
             (tile.first_token + row / base.group) * call.token_stride +
             (row % base.group) * call.head_stride + 8 * (piece - kLatentPieces);
    }
    copy_async(piece_address(to, index / kPieces, piece), from, valid);
  }
}

// Keys [first, first + kKeys); those from `end` on become zeros.
template <int kKeys>
__device__ void request_keys(const uint16_t* rows, int32_t first, int32_t end, uint32_t to) {
#pragma unroll
  for (int i = 0; i < kKeys * kPieces / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    const int key = index / kPieces;
    const int piece = index % kPieces;
    const bool valid = first + key < end;
    const int64_t from = valid ? static_cast<int64_t>(first + key) * kWidth + 8 * piece : 0;
    copy_async(piece_address(to, key, piece), rows + from, valid);
  }
}

struct State {
  float acc[kBands][kColumns / 8][4] = {};  // all rows, the warp's columns
  // The warp's own scores: rows g and g + 8 of band warp / 2, keys of half warp % 2.
  float max[2] = {kMinusInfinity, kMinusInfinity};  // of all keys; scores times log2(e)
  float sum[2] = {};                                // of this lane's columns
  int32_t positions[2];
};

template <typename T, int kKeys>
__device__ void score_keys(uint32_t queries, uint32_t keys,
                           float (&scores)[Shape<kKeys>::kTiles][4]) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const Place q(queries, warp / 2 * 16 + (lane / 8 % 2) * 8 + lane % 8, lane / 16);
  const Place k(keys, warp % 2 * (kKeys / 2) + (lane / 16) * 8 + lane % 8, lane / 8 % 2);
  constexpr int kTiles = Shape<kKeys>::kTiles;
  // With few tiles, of every second step, so that products wait less for each other.
  float others[kTiles][4] = {};
#pragma unroll
  for (int step = 0; step < kWidth / 16; ++step) {
    uint32_t a[4];
    load_matrices<0>(q.at(step), a);
    auto& sums = kTiles > 2 || step % 2 == 0 ? scores : others;
    for_constants<0, kTiles / 2>([&](auto n) {
      uint32_t b[4];
      load_matrices<n * 16 * kWidth * 2>(k.at(step), b);
      mma<T>(sums[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
      mma<T>(sums[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
    });
  }
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) scores[i / 4][i % 4] += others[i / 4][i % 4];
}

// Scores become weights in shared memory; the running softmax moves on. All warps take part.
template <typename T, int kKeys>
__device__ void soften(const LatentCall& call, int32_t first, int32_t end,
                       float (&scores)[Shape<kKeys>::kTiles][4], uint32_t weights,
                       Exchange& exchange, State& state) {
  constexpr int kTiles = Shape<kKeys>::kTiles;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int half_of_keys = warp % 2;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float max = kMinusInfinity;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      const int32_t key = first + kKeys / 2 * half_of_keys + 8 * (i / 2) + 2 * (lane % 4) + i % 2;
      float& score = scores[i / 2][2 * half + i % 2];
      score *= call.base.scale * kLog2E;
      if (key >= end || key > state.positions[half]) score = kMinusInfinity;
      max = fmaxf(max, score);
    }
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 1));
    max = fmaxf(max, __shfl_xor_sync(~0u, max, 2));
    if (lane % 4 == 0) exchange.max[half_of_keys][warp / 2 * 16 + 8 * half + lane / 4] = max;
  }
  __syncthreads();
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp / 2 * 16 + 8 * half + lane / 4;
    const float max = fmaxf(state.max[half], fmaxf(exchange.max[0][row], exchange.max[1][row]));
    const float base = max == kMinusInfinity ? 0.0f : max;
    const float factor = exp2_fast(state.max[half] - base);
    state.max[half] = max;
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 2 * kTiles; ++i) {
      float& score = scores[i / 2][2 * half + i % 2];
      score = exp2_fast(score - base);
      sum += score;
    }
    state.sum[half] = state.sum[half] * factor + sum;
    if (half_of_keys == 0 && lane % 4 == 0) exchange.factor[row] = factor;
#pragma unroll
    for (int n = 0; n < kTiles; ++n) {
      const uint32_t two = narrow_two<T>(scores[n][2 * half], scores[n][2 * half + 1]);
      const uint32_t to = weight_address<kKeys>(weights, row, kTiles * half_of_keys + n) +
                          static_cast<uint32_t>(lane % 4 * 4);
      asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(two) : "memory");
    }
  }
  __syncthreads();
}

template <typename T, int kKeys>
__device__ void sum_values(uint32_t weights, uint32_t keys, const Exchange& exchange,
                           State& state) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int band = 0; band < kBands; ++band) {
    const float low = exchange.factor[16 * band + lane / 4];
    const float high = exchange.factor[16 * band + 8 + lane / 4];
    if (!__any_sync(~0u, low != 1.0f || high != 1.0f)) continue;
#pragma unroll
    for (int i = 0; i < kColumns / 8; ++i) {
      state.acc[band][i][0] *= low;
      state.acc[band][i][1] *= low;
      state.acc[band][i][2] *= high;
      state.acc[band][i][3] *= high;
    }
  }
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step) {
    uint32_t p[kBands][4];
#pragma unroll
    for (int band = 0; band < kBands; ++band) {
      load_matrices<0>(weight_address<kKeys>(weights, 16 * band + (lane / 8 % 2) * 8 + lane % 8,
                                             2 * step + lane / 16),
                       p[band]);
    }
    const Place value(keys, 16 * step + (lane / 8 % 2) * 8 + lane % 8, lane / 16);
#pragma unroll
    for (int d = 0; d < kColumns / 16; ++d) {
      uint32_t b[4];
      load_matrices_transposed<0>(value.at(kColumns / 16 * warp + d), b);
#pragma unroll
      for (int band = 0; band < kBands; ++band) {
        mma<T>(state.acc[band][2 * d], p[band][0], p[band][1], p[band][2], p[band][3], b[0], b[1]);
        mma<T>(state.acc[band][2 * d + 1], p[band][0], p[band][1], p[band][2], p[band][3], b[2],
               b[3]);
      }
    }
  }
}

// Results, or with splits what join_latent() needs.
template <typename T>
__device__ void leave(const LatentCall& call, const AttentionTile& tile, Exchange& exchange,
                      State& state) {
  const AttentionCall& base = call.base;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const int row = warp / 2 * 16 + 8 * half + lane / 4;
    float sum = state.sum[half];
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (lane % 4 == 0) {
      exchange.sum[warp % 2][row] = sum;
      if (warp % 2 == 0) exchange.max[0][row] = state.max[half];
    }
  }
  __syncthreads();
  const int64_t part = static_cast<int64_t>(blockIdx.x) * base.num_splits + blockIdx.y;
#pragma unroll
  for (int i = 0; i < 2 * kBands; ++i) {
    const int row = 8 * i + lane / 4;
    if (tile.first_row + row >= tile.rows) continue;
    const float divisor = exchange.sum[0][row] + exchange.sum[1][row];
    const int column = kColumns * warp + 2 * (lane % 4);
    if (base.partials == nullptr) {
      uint16_t* to = static_cast<uint16_t*>(base.out) +
                     row_offset(base, tile, 0, tile.first_row + row) + column;
      const float factor = 1.0f / divisor;
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float(&acc)[4] = state.acc[i / 2][n];
        *reinterpret_cast<uint32_t*>(to + 8 * n) =
            narrow_two<T>(acc[2 * (i % 2)] * factor, acc[2 * (i % 2) + 1] * factor);
      }
    } else {
      float* to = base.partials + (part * kRows + row) * (kLatentRank + 2);
#pragma unroll
      for (int n = 0; n < kColumns / 8; ++n) {
        const float(&acc)[4] = state.acc[i / 2][n];
        *reinterpret_cast<float2*>(to + column + 8 * n) = {acc[2 * (i % 2)], acc[2 * (i % 2) + 1]};
      }
      if (warp == 0 && lane % 4 == 0) {
        *reinterpret_cast<float2*>(to + kLatentRank) = {exchange.max[0][row], divisor};
      }
    }
  }
}

template <typename T, int kKeys>
__global__ void __launch_bounds__(kThreads, 1)
    latent_tiles_kernel(const __grid_constant__ LatentCall call) {
  using S = Shape<kKeys>;
  extern __shared__ __align__(1024) unsigned char memory[];
  begin_dependent();
  const AttentionCall& base = call.base;
  const AttentionTile tile = find_tile(base, static_cast<int32_t>(blockIdx.x), kRows);
  if (tile.rows == 0) return;
  const int32_t all = tile.key_end(kRows, base.group);
  const int32_t share = split_keys(base, all);
  const int32_t begin = static_cast<int32_t>(blockIdx.y) * share;
  const int32_t end = min(begin + share, all);
  if (begin >= end) return;
  const auto* rows = static_cast<const uint16_t*>(base.keys) +
                     static_cast<int64_t>(tile.slot) * base.max_tokens * kWidth;
  const uint32_t queries = shared_address(memory);
  const uint32_t keys = queries + kQueryBytes;
  const uint32_t weights = keys + 2 * S::kKeyBytes;
  auto& exchange =
      *reinterpret_cast<Exchange*>(memory + kQueryBytes + 2 * S::kKeyBytes + S::kWeightBytes);
  request_queries(call, tile, queries);
  request_keys<kKeys>(rows, begin, end, keys);
  commit_copies();
  State state;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    state.positions[half] =
        tile.position(tile.first_row + warp / 2 * 16 + 8 * half + lane / 4, base.group);
  }
  uint32_t stage = 0;
  for (int32_t first = begin; first < end; first += kKeys, stage ^= 1) {
    wait_for_copies<0>();
    __syncthreads();  // and the other stage has been read by all
    if (first + kKeys < end) {
      request_keys<kKeys>(rows, first + kKeys, end, keys + (stage ^ 1) * S::kKeyBytes);
      commit_copies();
    }
    const uint32_t block = keys + stage * S::kKeyBytes;
    float scores[S::kTiles][4] = {};
    score_keys<T, kKeys>(queries, block, scores);
    soften<T, kKeys>(call, first, end, scores, weights, exchange, state);
    sum_values<T, kKeys>(weights, block, exchange, state);
  }
  __syncthreads();
  leave<T>(call, tile, exchange, state);
}

template <typename T, int kKeys>
void run(const LatentCall& call, const Stream& stream) {
  const int64_t tiles = max_tiles(call.base, kRows);
  CADRE_ASSERT(tiles < INT32_MAX);
  const auto kernel = latent_tiles_kernel<T, kKeys>;
  allow_shared_memory(kernel, Shape<kKeys>::kSharedBytes);
  const dim3 grid(static_cast<unsigned>(tiles), static_cast<unsigned>(call.base.num_splits));
  launch("latent_tiles_kernel", kernel, grid, kThreads, Shape<kKeys>::kSharedBytes,
         stream_of(stream), dependent_launch(stream), call);
}

size_t shared_memory(const Stream& stream) {
  int bytes = 0;
  CADRE_CUDA_CHECK(
      cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, stream.device.index));
  return static_cast<size_t>(bytes);
}

template <typename T>
void run(const LatentCall& call, const Stream& stream) {
  if (shared_memory(stream) >= Shape<64>::kSharedBytes) return run<T, 64>(call, stream);
  run<T, 32>(call, stream);
}

}  // namespace

bool has_room_for_latent_tiles(const Stream& stream) {
  return shared_memory(stream) >= Shape<32>::kSharedBytes;
}

void latent_tiles(const LatentCall& call, const Stream& stream) {
  if (call.base.dtype == DType::kBF16) return run<__nv_bfloat16>(call, stream);
  run<__half>(call, stream);
}

}  // namespace cadre::cuda

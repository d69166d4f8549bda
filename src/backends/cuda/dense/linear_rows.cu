// The weights are the columns of the tensor cores' products and the rows of x their rows, so a tile
// is only eight or sixteen weight rows high and the work spreads evenly. There is one block for
// each multiprocessor; its warps take slices of k and stream their parts of all of the block's
// tiles, one after the other, through a ring of shared memory that runs ahead across tiles. A lane
// reads back what it has copied itself, so the ring needs no barrier; the products' order of k is
// ours to choose, as long as x follows it. The warps' sums of a tile meet in a fixed order. Weights
// are asked for before the kernels ahead have ended: only x depends on them.
#include <algorithm>

#include "backends/cuda/dense/linear_parts.cuh"
#include "backends/cuda/dense/mma.cuh"

namespace cadre::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int32_t kStep = 32;  // elements of k in one load of all lanes
constexpr int kUnitLoads = 4;  // loads of a lane in a unit: what is copied and used at a time
constexpr int kUnitBytes = kUnitLoads * 512;

// kRows: rows of x at most; kTiles: groups of eight weight rows; kHeld: units of a tile that a warp
// has at most, whose part of x it keeps in registers for all tiles; 0: any number, x is read each
// time.
template <int kRows, int kTiles, int kHeld>
struct Shape {
  // Most of an H200's shared memory: what a step's small kernels ahead leave time for is
  // prefetched.
  static constexpr int kStages = kRows <= 16 ? 10 : 6;
  static constexpr int kRingBytes = kStages * kUnitBytes;  // of a warp
  static constexpr int kHalves = kRows / 8;                // groups of eight rows of x
  static constexpr int kProducts = (kRows + 15) / 16;      // products over them
  static constexpr int kColumns = 8 * kTiles;              // weight rows of a tile
  static constexpr int kSteps = kUnitLoads / kTiles;
  static constexpr int32_t kChunk = kStep * kSteps;                      // elements of k in a unit
  static constexpr int kUnits = kHeld > 0 ? kHeld : 1;                   // of x in registers
  static constexpr int kAtOnce = kHeld >= 2 && kRows == 8 ? 2 : 1;       // units worked on together
  static constexpr int kSums = kRows * kColumns;                         // sums of a tile
  static constexpr int kBatch = kRows == 8 ? 8 : (kRows == 16 ? 4 : 2);  // tiles between barriers
  static constexpr int kOutputs = kBatch * kSums / kThreads;             // of a thread

  static constexpr size_t kSharedBytes =
      static_cast<size_t>(kWarps) * (kRingBytes + kBatch * kSums * sizeof(float));
};

// A warp's way through its units: tiles of the block, chunks of k in each.
template <int kTiles, int kStages>
struct Requests {
  const LinearRows& args;
  int32_t tile;
  int32_t num_tiles;
  int32_t k;        // of this lane
  int32_t first_k;  // of each tile
  int32_t stride;   // of k
  uint32_t ring;
  int stage = 0;
  const uint16_t* rows[kTiles] = {};
  bool valid[kTiles] = {};

  __device__ void set_tile() {
    if (tile >= num_tiles) return;
    const LinearPart& part = args.parts[part_of(args, tile)];
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int i = 0; i < kTiles; ++i) {
      const int64_t n =
          static_cast<int64_t>(tile - part.first_tile) * (8 * kTiles) + 8 * i + lane / 4;
      valid[i] = n < part.n;
      rows[i] = static_cast<const uint16_t*>(part.weight) + (valid[i] ? n : 0) * part.weight_stride;
    }
  }

  // Asks for the next unit; an empty one when there are no more.
  template <int kSteps>
  __device__ void next() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (tile < num_tiles) {
      const uint32_t to = ring + stage * kUnitBytes + 16 * lane;
      const auto end = static_cast<int32_t>(args.k);
#pragma unroll
      for (int s = 0; s < kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          const int32_t at = k + s * kStep;
          copy_async(to + (s * kTiles + i) * 512, rows[i] + (at < end ? at : 0),
                     valid[i] && at < end);
        }
      }
      k += stride;
      if (k - 8 * (lane % 4) >= end) {
        k = first_k;
        tile += static_cast<int32_t>(gridDim.x);
        set_tile();
      }
    }
    commit_copies();
    stage = stage == kStages - 1 ? 0 : stage + 1;
  }
};

template <typename T, int kRows, int kTiles, int kHeld>
__global__ void __launch_bounds__(kThreads, 1)
    linear_rows_kernel(const __grid_constant__ LinearRows args, int32_t num_tiles) {
  using S = Shape<kRows, kTiles, kHeld>;
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int q = lane % 4;
  const auto k_end = static_cast<int32_t>(args.k);
  const int active = min(kWarps, (k_end + S::kChunk - 1) / S::kChunk);  // warps with work
  const uint32_t ring = shared_address(memory) + warp * S::kRingBytes;
  auto* sums = reinterpret_cast<float*>(memory + kWarps * S::kRingBytes);  // [kBatch][warp][kSums]
  const int32_t first_k = warp * S::kChunk + 8 * q;
  constexpr int32_t kStride = kWarps * S::kChunk;
  const auto grid = static_cast<int32_t>(gridDim.x);
  const auto first_tile = static_cast<int32_t>(blockIdx.x);
  Requests<kTiles, S::kStages> requests{
      args, warp < active ? first_tile : num_tiles, num_tiles, first_k, first_k, kStride, ring};
  requests.set_tile();
#pragma unroll 1
  for (int s = 0; s < S::kStages - S::kAtOnce; ++s) requests.template next<S::kSteps>();
  begin_dependent();
  const uint16_t* x[S::kHalves];
  bool is_row[S::kHalves];
#pragma unroll
  for (int h = 0; h < S::kHalves; ++h) {
    const int64_t row = 8 * h + lane / 4;
    is_row[h] = row < args.rows;
    x[h] = static_cast<const uint16_t*>(args.x) + (is_row[h] ? row : 0) * args.x_stride;
  }
  uint4 a[S::kUnits][S::kSteps][2 * S::kProducts];
  const auto load_x = [&](uint4(&to)[S::kSteps][2 * S::kProducts], int32_t k) {
#pragma unroll
    for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
      for (int h = 0; h < 2 * S::kProducts; ++h) {
        to[s][h] = {0, 0, 0, 0};
        if (h < S::kHalves && is_row[h] && k + s * kStep < k_end) {
          to[s][h] = *reinterpret_cast<const uint4*>(x[h] + k + s * kStep);
        }
      }
    }
  };
  if constexpr (kHeld > 0) {
#pragma unroll
    for (int u = 0; u < kHeld; ++u) load_x(a[u], first_k + u * kStride);
  }
  int stage = 0;
  int in_batch = 0;
  int32_t batch = first_tile;  // first tile of the batch
  float bases[S::kOutputs];
  for (int32_t tile = first_tile; tile < num_tiles; tile += grid) {
    if (in_batch == 0) {
#pragma unroll
      for (int o = 0; o < S::kOutputs; ++o) {
        const Output<S> output(args, batch, num_tiles,
                               static_cast<int>(threadIdx.x) + o * kThreads);
        bases[o] = output.is_there ? output_base(*output.part, output.row, output.column) : 0.0f;
      }
    }
    float acc[2 * S::kAtOnce][S::kProducts][kTiles][4] = {};
    // kCount units from the ring times x_of[0], x_of[1].
    const auto multiply = [&](auto count, const auto* x_of) {
      constexpr int kCount = count;
      wait_for_copies<S::kStages - S::kAtOnce - kCount>();
      uint4 w[kCount][S::kSteps][kTiles];
#pragma unroll
      for (int c = 0; c < kCount; ++c) {
        requests.template next<S::kSteps>();
        const uint32_t from = ring + stage * kUnitBytes + 16 * lane;
        stage = stage == S::kStages - 1 ? 0 : stage + 1;
#pragma unroll
        for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
          for (int i = 0; i < kTiles; ++i) {
            w[c][s][i] = load_shared(from + (s * kTiles + i) * 512);
          }
        }
      }
#pragma unroll
      for (int s = 0; s < S::kSteps; ++s) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
#pragma unroll
          for (int p = 0; p < S::kProducts; ++p) {
#pragma unroll
            for (int c = 0; c < kCount; ++c) {
              const uint4 low = x_of[c][s][2 * p];
              const uint4 high = x_of[c][s][2 * p + 1];
              const uint4 v = w[c][s][i];
              mma<T>(acc[2 * c][p][i], low.x, high.x, low.y, high.y, v.x, v.y);
              mma<T>(acc[2 * c + 1][p][i], low.z, high.z, low.w, high.w, v.z, v.w);
            }
          }
        }
      }
    };
    if constexpr (kHeld > 0) {
      const auto has = [&](int u) { return first_k - 8 * q + u * kStride < k_end; };
#pragma unroll
      for (int u = 0; u < kHeld; u += S::kAtOnce) {
        if (S::kAtOnce == 2 && has(u + 1)) {
          multiply(std::integral_constant<int, S::kAtOnce>{}, &a[u]);
        } else if (has(u)) {
          multiply(std::integral_constant<int, 1>{}, &a[u]);
        }
      }
    } else {
      for (int32_t k = first_k; k - 8 * q < k_end; k += kStride) {
        load_x(a[0], k);
        multiply(std::integral_constant<int, 1>{}, &a[0]);
      }
    }
    float* mine = sums + (in_batch * kWarps + warp) * S::kSums;
#pragma unroll
    for (int p = 0; p < S::kProducts; ++p) {
#pragma unroll
      for (int i = 0; i < kTiles; ++i) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const int row = 16 * p + 8 * half + lane / 4;
          if (row >= kRows) continue;
          float2 sum = {0, 0};
#pragma unroll
          for (int c = 0; c < 2 * S::kAtOnce; ++c) {
            sum.x += acc[c][p][i][2 * half];
            sum.y += acc[c][p][i][2 * half + 1];
          }
          *reinterpret_cast<float2*>(mine + row * S::kColumns + 8 * i + 2 * q) = sum;
        }
      }
    }
    if (++in_batch < S::kBatch && tile + grid < num_tiles) continue;
    __syncthreads();
#pragma unroll
    for (int o = 0; o < S::kOutputs; ++o) {
      const int i = static_cast<int>(threadIdx.x) + o * kThreads;
      if (i >= in_batch * S::kSums) continue;
      const Output<S> output(args, batch, num_tiles, i);
      if (!output.is_there) continue;
      const float* from = sums + i / S::kSums * kWarps * S::kSums + i % S::kSums;
      float sum = 0;
#pragma unroll
      for (int j = 0; j < kWarps; ++j) sum += j < active ? from[j * S::kSums] : 0.0f;
      store_one(sum + bases[o], output.part->out, output.part->out_dtype,
                output.row * output.part->out_stride + output.column);
    }
    __syncthreads();  // before the sums of the next batch
    in_batch = 0;
    batch = tile + grid;
  }
  wait_for_copies<0>();
}

template <typename T, int kRows, int kTiles, int kHeld>
void run(LinearRows& args, const Stream& stream) {
  using S = Shape<kRows, kTiles, kHeld>;
  const int32_t tiles = set_tiles(args, S::kColumns);
  if (tiles == 0) return;
  // As few blocks as take no longer: what runs beside them, attention above all, has room at once.
  const int most = properties_of(stream.device.index).num_multiprocessors;
  const int rounds = (tiles + most - 1) / most;
  const int blocks = (tiles + rounds - 1) / rounds;
  const auto kernel = linear_rows_kernel<T, kRows, kTiles, kHeld>;
  allow_shared_memory(kernel, S::kSharedBytes);
  launch("linear_rows_kernel", kernel, static_cast<unsigned>(blocks), kThreads, S::kSharedBytes,
         stream_of(stream), dependent_launch(stream), args, tiles);
}

bool vectors_fit(const LinearRows& args, int64_t lanes) {
  const auto aligned = [&](const void* p, int64_t stride) {
    return reinterpret_cast<uintptr_t>(p) % 16 == 0 && stride % lanes == 0;
  };
  bool fits = args.k % lanes == 0 && aligned(args.x, args.x_stride);
  for (int p = 0; p < args.num_parts; ++p) {
    fits = fits && aligned(args.parts[p].weight, args.parts[p].weight_stride);
  }
  return fits;
}

template <typename T>
void run_rows(LinearRows& args, const Stream& stream) {
  if (args.rows <= 8) {
    if (args.k <= 2048) return run<T, 8, 1, 2>(args, stream);
    if (args.k <= 4096) return run<T, 8, 1, 4>(args, stream);
    return run<T, 8, 1, 0>(args, stream);
  }
  if (args.rows <= 16) {
    if (args.k <= 2048) return run<T, 16, 2, 4>(args, stream);
    return run<T, 16, 2, 0>(args, stream);
  }
  run<T, 32, 2, 0>(args, stream);
}

}  // namespace

int64_t max_linear_rows(DType dtype) { return dtype == DType::kF32 ? 8 : 32; }

void linear_rows(LinearRows args, const Stream& stream) {
  CADRE_ASSERT(args.rows <= max_linear_rows(args.dtype) && args.k < (int64_t{1} << 30));
  if (args.rows == 0) return;
  if (args.dtype == DType::kF32) return linear_rows_floats(args, vectors_fit(args, 4), stream);
  if (!vectors_fit(args, 8)) return linear_rows_unaligned(args, stream);
  if (args.dtype == DType::kBF16) return run_rows<__nv_bfloat16>(args, stream);
  run_rows<__half>(args, stream);
}

}  // namespace cadre::cuda

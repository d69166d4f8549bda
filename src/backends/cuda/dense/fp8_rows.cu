// The kernel of linear_rows.cu on e4m3 codes: the weights are the rows of the tensor cores'
// products and the rows of x their columns. A unit of a warp's ring is 16 weight rows x 128 of K, a
// group of activations, with the word in which their scale lies; codes become fp16 between ring and
// tensor cores. That takes F2FP, which gives 16 results a clock and multiprocessor: all codes of
// the weights at the speed of memory and little more, so x lies in shared memory as fp16 where
// there is room. Each warp brings its own slices of x there, while the first weights are on their
// way, and needs no other's.
#include <algorithm>
#include <limits>

#include "backends/cuda/dense/fp8_rows_x.cuh"

namespace cadre::cuda {
namespace {

using namespace fp8;

// Values of x that every block quantises for itself: more take longer than one more launch.
constexpr int64_t kMostQuantised = 16384;

// The aligned word in which a scale lies.
__device__ void copy_word(uint32_t to, const char* scale) {
  const uintptr_t from = reinterpret_cast<uintptr_t>(scale) & ~uintptr_t{3};
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}

// The scales of a tile's weight rows, which lie in one block, from K = 0 on.
__device__ const char* scales_of_tile(const Fp8LinearRows& args, int32_t tile) {
  const int p = part_of(args, tile);
  const BlockScales& scales = args.scales[p];
  const int32_t block = (tile - args.parts[p].first_tile) * kTileRows / scales.block_rows;
  return static_cast<const char*>(scales.first) + block * scales.row_bytes;
}

// A warp's way through its units: tiles of the block, slices of k in each.
template <typename S>
struct Requests {
  const Fp8LinearRows& args;
  int32_t tile;
  int32_t num_tiles;
  int32_t k;  // of the unit
  int32_t first_k;
  uint32_t ring;
  int stage = 0;
  const uint8_t* rows[2] = {};
  bool valid[2] = {};
  const char* scales = nullptr;
  int32_t column_bytes = 0;

  __device__ void set_tile() {
    if (tile >= num_tiles) return;
    const int p = part_of(args, tile);
    const LinearPart& part = args.parts[p];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int64_t n = int64_t{tile - part.first_tile} * kTileRows + 8 * i + threadIdx.x % 32 / 4;
      valid[i] = n < part.n;
      rows[i] = static_cast<const uint8_t*>(part.weight) + (valid[i] ? n : 0) * part.weight_stride;
    }
    scales = scales_of_tile(args, tile);
    column_bytes = args.scales[p].column_bytes;
  }

  // Asks for the next unit; an empty one when there are no more.
  __device__ void next() {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    if (tile < num_tiles) {
      const uint32_t to = ring + stage * kUnitBytes;
      const auto end = static_cast<int32_t>(args.k);
#pragma unroll
      for (int c = 0; c < kLoads; ++c) {
        const int32_t at = k + c * kLoad + lane % 4 * 16;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          copy_async(to + (i * kLoads + c) * 512 + 16 * lane, rows[i] + (at < end ? at : 0),
                     valid[i] && at < end);
        }
      }
      if (lane == 0) copy_word(to + kCodeBytes, scales + int64_t{k / kGroup} * column_bytes);
      k += kStride;
      if (k >= end) {
        k = first_k;
        tile += static_cast<int32_t>(gridDim.x);
        set_tile();
      }
    }
    commit_copies();
    stage = stage == S::kStages - 1 ? 0 : stage + 1;
  }
};

// Adds a unit from k on: sums of x and its weights, times the scales.
template <typename S>
__device__ void add_unit(const uint4 (&weights)[2][kLoads], const XRows<S>& x, int32_t k,
                         float weight_scale, float (&sums)[S::kHalves][4]) {
  float products[S::kHalves][kLoads][4] = {};
#pragma unroll
  for (int c = 0; c < kLoads; ++c) {
    uint32_t w[2][8];
    widen_codes(weights[0][c], w[0]);
    widen_codes(weights[1][c], w[1]);
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h) {
      uint32_t pairs[8];
      x.load(h, k + c * kLoad, pairs);
#pragma unroll
      for (int i = 0; i < 8; i += 2) {
        mma<__half>(products[h][c], w[0][i], w[1][i], w[0][i + 1], w[1][i + 1], pairs[i],
                    pairs[i + 1]);
      }
    }
  }
#pragma unroll
  for (int h = 0; h < S::kHalves; ++h) {
    const float2 of_x = x.load_scales(h, k / kGroup);
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float scale = (i % 2 == 0 ? of_x.x : of_x.y) * weight_scale;
      sums[h][i] += scale * (products[h][0][i] + products[h][1][i]);
    }
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads, 1)
    fp8_rows_kernel(const __grid_constant__ Fp8LinearRows args, int32_t num_tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto k_end = static_cast<int32_t>(args.k);
  const int active = min(kWarps, (k_end + kGroup - 1) / kGroup);  // warps with work
  const uint32_t ring = shared_address(memory) + warp * S::kRingBytes;
  auto* sums = reinterpret_cast<float*>(memory + kWarps * S::kRingBytes);  // [kBatch][warp][kSums]
  const XLayout<S> layout(args.k);
  unsigned char* x_values = memory + S::kSharedBytes;
  auto* x_scales = reinterpret_cast<float*>(x_values + args.rows * layout.row_bytes);
  const auto grid = static_cast<int32_t>(gridDim.x);
  const auto first_tile = static_cast<int32_t>(blockIdx.x);
  const int32_t first_k = warp * kGroup;
  Requests<S> requests{args, warp < active ? first_tile : num_tiles, num_tiles, first_k, first_k,
                       ring};
  requests.set_tile();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) requests.next();
  begin_dependent();
  SlicesOfX<S>(args, layout, x_values, x_scales).bring(warp);
  const XRows<S> x(args, layout, x_values, x_scales);

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
    const BlockScales& tile_scales = args.scales[part_of(args, tile)];
    const auto scale_byte =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(scales_of_tile(args, tile)));
    float tile_sums[S::kHalves][4] = {};
    for (int32_t k = first_k; k < k_end; k += kStride) {
      wait_for_copies<S::kStages - 2>();
      __syncwarp();  // the scale is read by all lanes
      requests.next();
      const uint32_t from = ring + stage * kUnitBytes;
      stage = stage == S::kStages - 1 ? 0 : stage + 1;
      uint4 weights[2][kLoads];
#pragma unroll
      for (int i = 0; i < 2 * kLoads; ++i) {
        weights[i / kLoads][i % kLoads] = load_shared(from + i * 512 + 16 * lane);
      }
      const uint32_t scale = load_shared(from + kCodeBytes).x;
      const uint32_t byte =
          scale_byte + static_cast<uint32_t>(k / kGroup * tile_scales.column_bytes);
      const float weight_scale = tile_scales.e8m0
                                     ? e8m0_value(static_cast<uint8_t>(scale >> (byte % 4 * 8)))
                                     : __uint_as_float(scale);
      add_unit<S>(weights, x, k, weight_scale, tile_sums);
    }
    float* mine = sums + (in_batch * kWarps + warp) * S::kSums;
#pragma unroll
    for (int i = 0; i < 4 * S::kHalves; ++i) {
      const int row = i / 4 * 8 + lane % 4 * 2 + i % 2;
      mine[row * kTileRows + i / 2 % 2 * 8 + lane / 4] = tile_sums[i / 4][i % 4];
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

template <typename S>
bool fits(int64_t rows, int64_t k) {
  return rows <= S::kRows && S::kSharedBytes + XLayout<S>(k).bytes(rows) <= kMostShared;
}

template <typename S>
void run(Fp8LinearRows& args, const Stream& stream) {
  const int32_t tiles = set_tiles(args, S::kColumns);
  if (tiles == 0) return;
  // As few blocks as take no longer: what runs beside them, attention above all, has room at once.
  const int most = properties_of(stream.device.index).num_multiprocessors;
  const int rounds = (tiles + most - 1) / most;
  const int blocks = (tiles + rounds - 1) / rounds;
  const size_t bytes = S::kSharedBytes + XLayout<S>(args.k).bytes(args.rows);
  const auto kernel = fp8_rows_kernel<S>;
  allow_shared_memory(kernel, kMostShared);
  launch("fp8_rows_kernel", kernel, static_cast<unsigned>(blocks), kThreads, bytes,
         stream_of(stream), dependent_launch(stream), args, tiles);
}

}  // namespace

int64_t max_fp8_rows(int64_t k, const Stream& stream) {
  const int capability = compute_capability(stream.device.index);
  if (capability < 90 || capability >= 110 || k >= int64_t{1} << 22) return 0;
  if (fits<Shape<16, false>>(16, k)) return 16;
  for (const int64_t rows : {8, 4, 2, 1}) {
    if (fits<Shape<8, false>>(rows, k)) return rows;
  }
  return 0;
}

bool wants_codes(int64_t rows, int64_t k) { return rows > 1 && rows * k > kMostQuantised; }

bool fits_fp8_rows(const ScaleLayout& layout) {
  return layout.block_rows % 16 == 0 && (layout.block_cols == 0 || layout.block_cols == kGroup);
}

BlockScales block_scales(const ScaleLayout& layout, const void* scales, int64_t row_stride,
                         int64_t column_stride) {
  const auto size = static_cast<int64_t>(size_of(layout.dtype));
  BlockScales result;
  result.first = scales;
  result.row_bytes = row_stride * size;
  result.column_bytes = layout.block_cols == 0 ? 0 : static_cast<int32_t>(column_stride * size);
  result.block_rows = layout.block_rows == 0 ? std::numeric_limits<int32_t>::max()
                                             : static_cast<int32_t>(layout.block_rows);
  result.e8m0 = layout.dtype == DType::kF8E8M0;
  return result;
}

void fp8_rows(Fp8LinearRows args, const Stream& stream) {
  CADRE_ASSERT(args.rows <= max_fp8_rows(args.k, stream));
  if (args.rows == 0) return;
  if (fits<Shape<8, true>>(args.rows, args.k)) return run<Shape<8, true>>(args, stream);
  if (fits<Shape<8, false>>(args.rows, args.k)) return run<Shape<8, false>>(args, stream);
  if (fits<Shape<16, true>>(args.rows, args.k)) return run<Shape<16, true>>(args, stream);
  run<Shape<16, false>>(args, stream);
}

}  // namespace cadre::cuda

// The kernel of linear_rows.cu on e4m3 codes. A unit of a warp's ring is 8 weight rows x 256 of K,
// two groups of activations, with the words in which its scales lie; codes become fp16 between
// ring and tensor cores. Each warp quantises its own slices of x into shared memory, while the
// first weights are on their way, and needs no other's.
#include <algorithm>
#include <limits>

#include "backends/cuda/dense/fp8_rows.h"
#include "backends/cuda/dense/linear_parts.cuh"
#include "backends/cuda/dense/mma.cuh"
#include "backends/cuda/kernels/activation_scale.cuh"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = 32 * kWarps;
constexpr int32_t kGroup = kActivationGroup;
constexpr int kUnitGroups = 2;
constexpr int32_t kUnit = kUnitGroups * kGroup;  // of k
constexpr int32_t kLoad = 64;                    // of k, in one load of all lanes
constexpr int kUnitLoads = kUnit / kLoad;
constexpr int kCodeBytes = kUnitLoads * 512;
constexpr int kUnitBytes = kCodeBytes + 16;  // with the words of kUnitGroups scales
constexpr int32_t kStride = kWarps * kUnit;  // of k, from a warp's unit to its next
constexpr size_t kMostShared = 227 << 10;    // of a block on the GPUs that have most

static_assert(kActivationGroup == 128);

// kRows: rows of x at most.
template <int kRows>
struct Shape {
  // Leaves room for the next kernel's block beside this one's where x is small: its weights are
  // asked for while this one ends. Twice as many stages and one block: 0 to 1.5 us slower.
  static constexpr int kStages = 4;
  static constexpr int kRingBytes = kStages * kUnitBytes;     // of a warp
  static constexpr int kHalves = kRows / 8;                   // groups of eight rows of x
  static constexpr int kColumns = 8;                          // weight rows of a tile
  static constexpr int kSums = kRows * kColumns;              // of a tile
  static constexpr int kBatch = 32 / kRows;                   // tiles between barriers
  static constexpr int kOutputs = kBatch * kSums / kThreads;  // of a thread
  static constexpr size_t kSharedBytes =
      static_cast<size_t>(kWarps) * (kRingBytes + kBatch * kSums * sizeof(float));
};

// Where the quantised rows lie behind Shape::kSharedBytes: whole units of codes, so that a load
// needs no look at K; rows begin 64 bytes apart modulo 128, so that two are read without conflict.
struct XLayout {
  int32_t code_stride;   // bytes
  int32_t scale_stride;  // floats; odd

  __host__ __device__ explicit XLayout(int64_t k) {
    const auto units = static_cast<int32_t>((k + kUnit - 1) / kUnit);
    code_stride = units * kUnit + 64;
    scale_stride = units * kUnitGroups + 1;
  }
  __host__ __device__ size_t bytes(int64_t rows) const {
    return static_cast<size_t>(rows) * (code_stride + scale_stride * sizeof(float));
  }
};

__device__ void copy_word(uint32_t to, const void* from, bool valid) {
  const int bytes = valid ? 4 : 0;
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes)
               : "memory");
}

// The scales of a tile's weight rows, which lie in one block, from K = 0 on.
__device__ const char* scales_of_tile(const Fp8LinearRows& args, int32_t tile) {
  const int p = part_of(args, tile);
  const BlockScales& scales = args.scales[p];
  const int32_t block = (tile - args.parts[p].first_tile) * 8 / scales.block_rows;
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
  const uint8_t* row = nullptr;
  bool valid = false;
  const char* scales = nullptr;
  int32_t column_bytes = 0;

  __device__ void set_tile() {
    if (tile >= num_tiles) return;
    const int p = part_of(args, tile);
    const LinearPart& part = args.parts[p];
    const int64_t n = int64_t{tile - part.first_tile} * S::kColumns + threadIdx.x % 32 / 4;
    valid = n < part.n;
    row = static_cast<const uint8_t*>(part.weight) + (valid ? n : 0) * part.weight_stride;
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
      for (int i = 0; i < kUnitLoads; ++i) {
        const int32_t at = k + i * kLoad + lane % 4 * 16;
        copy_async(to + i * 512 + 16 * lane, row + (at < end ? at : 0), valid && at < end);
      }
      if (lane < kUnitGroups) {
        const int32_t group = k / kGroup + lane;
        const bool is_there = group * kGroup < end;
        const char* scale = scales + int64_t{is_there ? group : 0} * column_bytes;
        copy_word(to + kCodeBytes + 4 * lane,
                  reinterpret_cast<const void*>(reinterpret_cast<uintptr_t>(scale) & ~uintptr_t{3}),
                  is_there);
      }
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

// A warp's slices of x to codes and scales, 16 values a lane: four groups of 128 at a time, those
// of `kAtOnce` rounds asked for together.
class Quantizer {
 public:
  __device__ Quantizer(const Fp8LinearRows& args, const XLayout& layout, uint8_t* codes,
                       float* scales)
      : args_(args), layout_(layout), codes_(codes), scales_(scales) {}

  __device__ void run(int warp) const {
    const auto rows = static_cast<int32_t>(args_.rows);
    const auto units = static_cast<int32_t>((args_.k + kUnit - 1) / kUnit);
    const int32_t items = (units - warp + kWarps - 1) / kWarps * kUnitGroups * rows;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    for (int32_t first = 0; first < items; first += 4 * kAtOnce) {
      Place places[kAtOnce];
      float values[kAtOnce][16];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t item = first + 4 * i + lane / 8;
        places[i].is_there = item < items;
        places[i].row = item % rows;
        const int32_t slice = item / rows;  // of the warp's groups
        places[i].group = (warp + slice / kUnitGroups * kWarps) * kUnitGroups + slice % kUnitGroups;
        load(places[i], values[i]);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) store(places[i], values[i]);
    }
    __syncwarp();
  }

 private:
  static constexpr int kAtOnce = 4;
  struct Place {
    int32_t row;
    int32_t group;
    bool is_there;

    __device__ int32_t k() const {
      return group * kGroup + static_cast<int32_t>(threadIdx.x) % 8 * 16;
    }
  };

  __device__ void load(const Place& place, float (&values)[16]) const {
    const int64_t at = place.row * args_.x_stride + place.k();
    float halves[2][8] = {};
    if (place.is_there && place.k() < args_.k) {
      load_eight(args_.x, args_.dtype, at, halves[0]);
      load_eight(args_.x, args_.dtype, at + 8, halves[1]);
    }
#pragma unroll
    for (int i = 0; i < 16; ++i) values[i] = halves[i / 8][i % 8];
  }

  __device__ void store(const Place& place, const float (&values)[16]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 16; ++i) largest = max(largest, magnitude_bits(values[i]));
#pragma unroll
    for (int step = 4; step > 0; step /= 2) {
      largest = max(largest, __shfl_xor_sync(~0u, largest, step));
    }
    const ActivationScale scale = activation_scale_of_bits(largest);
    uint32_t words[4] = {};
#pragma unroll
    for (int i = 0; i < 16; i += 2) {
      const float2 two = {scaled_activation(values[i], scale),
                          scaled_activation(values[i + 1], scale)};
      words[i / 4] |= uint32_t{__nv_cvt_float2_to_fp8x2(two, __NV_SATFINITE, __NV_E4M3)}
                      << i % 4 * 8;
    }
    if (!place.is_there) return;
    *reinterpret_cast<uint4*>(codes_ + place.row * layout_.code_stride + place.k()) =
        make_uint4(words[0], words[1], words[2], words[3]);
    if (threadIdx.x % 8 == 0) scales_[place.row * layout_.scale_stride + place.group] = scale.scale;
  }

  const Fp8LinearRows& args_;
  const XLayout& layout_;
  uint8_t* codes_;
  float* scales_;
};

__device__ uint32_t two_halves(uint32_t codes) {
  const __half2 pair = e4m3_pair(codes & 0xffffu);
  return *reinterpret_cast<const uint32_t*>(&pair);
}

__device__ uint32_t word(const uint4& v, int i) {
  return i == 0 ? v.x : i == 1 ? v.y : i == 2 ? v.z : v.w;
}

// What a lane reads of x: rows lane / 4 and, of sixteen, 8 further on. Rows beyond the last are the
// last once more.
template <int kHalves>
struct XRows {
  uint32_t codes[kHalves];
  const float* scales[kHalves];

  __device__ XRows(const Fp8LinearRows& args, const XLayout& layout, const uint8_t* first_codes,
                   const float* first_scales) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int h = 0; h < kHalves; ++h) {
      const int row = min(8 * h + lane / 4, static_cast<int>(args.rows) - 1);
      codes[h] = shared_address(first_codes) + row * layout.code_stride + 16 * (lane % 4);
      scales[h] = first_scales + row * layout.scale_stride;
    }
  }
};

// Adds a group of 128 of K of one tile: `weights` and `x` are the lane's codes, of which 4 i ... 4
// i
// + 3 enter one product.
template <int kHalves>
__device__ void add_group(const uint4 (&weights)[2], const uint4 (&x)[2][kHalves],
                          const float (&scales)[kHalves], float (&sums)[kHalves][2]) {
  float products[2][4] = {};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t w = word(weights[c], i);
      const uint32_t low = word(x[c][0], i);
      const uint32_t high = kHalves == 2 ? word(x[c][kHalves - 1], i) : 0;
      mma<__half>(products[c], two_halves(low), two_halves(high), two_halves(low >> 16),
                  two_halves(high >> 16), two_halves(w), two_halves(w >> 16));
    }
  }
#pragma unroll
  for (int h = 0; h < kHalves; ++h) {
    sums[h][0] += scales[h] * (products[0][2 * h] + products[1][2 * h]);
    sums[h][1] += scales[h] * (products[0][2 * h + 1] + products[1][2 * h + 1]);
  }
}

template <typename S>
__global__ void __launch_bounds__(kThreads)
    fp8_rows_kernel(const __grid_constant__ Fp8LinearRows args, int32_t num_tiles) {
  extern __shared__ __align__(128) unsigned char memory[];
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const auto k_end = static_cast<int32_t>(args.k);
  const int active = min(kWarps, (k_end + kUnit - 1) / kUnit);  // warps with work
  const uint32_t ring = shared_address(memory) + warp * S::kRingBytes;
  auto* sums = reinterpret_cast<float*>(memory + kWarps * S::kRingBytes);  // [kBatch][warp][kSums]
  const XLayout layout(args.k);
  uint8_t* codes = memory + S::kSharedBytes;
  auto* scales = reinterpret_cast<float*>(codes + args.rows * layout.code_stride);
  const auto grid = static_cast<int32_t>(gridDim.x);
  const auto first_tile = static_cast<int32_t>(blockIdx.x);
  const int32_t first_k = warp * kUnit;
  Requests<S> requests{args, warp < active ? first_tile : num_tiles, num_tiles, first_k, first_k,
                       ring};
  requests.set_tile();
#pragma unroll 1
  for (int s = 0; s < S::kStages - 1; ++s) requests.next();
  begin_dependent();
  Quantizer(args, layout, codes, scales).run(warp);
  const XRows<S::kHalves> x_rows(args, layout, codes, scales);

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
    const bool e8m0 = tile_scales.e8m0;
    const auto scale_byte =
        static_cast<uint32_t>(reinterpret_cast<uintptr_t>(scales_of_tile(args, tile)));
    const auto scale_of = [&](uint32_t value, int32_t group) {
      if (!e8m0) return __uint_as_float(value);
      const uint32_t byte = scale_byte + static_cast<uint32_t>(group * tile_scales.column_bytes);
      return e8m0_value(static_cast<uint8_t>(value >> (byte % 4 * 8)));
    };
    float tile_sums[S::kHalves][2] = {};
    for (int32_t k = first_k; k < k_end; k += kStride) {
      wait_for_copies<S::kStages - 2>();
      __syncwarp();  // scales are read by all lanes
      requests.next();
      const uint32_t from = ring + stage * kUnitBytes;
      stage = stage == S::kStages - 1 ? 0 : stage + 1;
      uint4 weights[kUnitGroups][2];
#pragma unroll
      for (int i = 0; i < kUnitLoads; ++i) {
        weights[i / 2][i % 2] = load_shared(from + i * 512 + 16 * lane);
      }
      const uint4 words = load_shared(from + kCodeBytes);
#pragma unroll
      for (int g = 0; g < kUnitGroups; ++g) {
        const int32_t group = k / kGroup + g;
        const float weight_scale = scale_of(word(words, g), group);
        uint4 x[2][S::kHalves];
        float group_scales[S::kHalves];
#pragma unroll
        for (int h = 0; h < S::kHalves; ++h) {
#pragma unroll
          for (int c = 0; c < 2; ++c) {
            x[c][h] = load_shared(x_rows.codes[h] + group * kGroup + c * kLoad);
          }
          group_scales[h] = x_rows.scales[h][group] * weight_scale;
        }
        add_group<S::kHalves>(weights[g], x, group_scales, tile_sums);
      }
    }
    float* mine = sums + (in_batch * kWarps + warp) * S::kSums;
#pragma unroll
    for (int h = 0; h < S::kHalves; ++h) {
      *reinterpret_cast<float2*>(mine + (8 * h + lane / 4) * S::kColumns + lane % 4 * 2) =
          make_float2(tile_sums[h][0], tile_sums[h][1]);
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
size_t shared_bytes(int64_t rows, int64_t k) {
  return S::kSharedBytes + XLayout(k).bytes(rows);
}

template <typename S>
void run(Fp8LinearRows& args, const Stream& stream) {
  const int32_t tiles = set_tiles(args, S::kColumns);
  if (tiles == 0) return;
  // As few blocks as take no longer: what runs beside them, attention above all, has room at once.
  const int most = properties_of(stream.device.index).num_multiprocessors;
  const int rounds = (tiles + most - 1) / most;
  const int blocks = (tiles + rounds - 1) / rounds;
  const size_t bytes = shared_bytes<S>(args.rows, args.k);
  const auto kernel = fp8_rows_kernel<S>;
  allow_shared_memory(kernel, kMostShared);
  launch("fp8_rows_kernel", kernel, static_cast<unsigned>(blocks), kThreads, bytes,
         stream_of(stream), dependent_launch(stream), args, tiles);
}

}  // namespace

int64_t max_fp8_rows(int64_t k, const Stream& stream) {
  const int capability = compute_capability(stream.device.index);
  if (capability < 90 || capability >= 110 || k >= int64_t{1} << 22) return 0;
  for (const int64_t rows : {16, 8, 4, 2, 1}) {
    const size_t bytes =
        rows > 8 ? shared_bytes<Shape<16>>(rows, k) : shared_bytes<Shape<8>>(rows, k);
    if (bytes <= kMostShared) return rows;
  }
  return 0;
}

bool fits_fp8_rows(const ScaleLayout& layout) {
  return layout.block_rows % 8 == 0 && (layout.block_cols == 0 || layout.block_cols == kGroup);
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
  if (args.rows <= 8) return run<Shape<8>>(args, stream);
  run<Shape<16>>(args, stream);
}

}  // namespace cadre::cuda

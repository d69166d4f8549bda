// The kernel of quantized_gemm.h for one dtype of products; each quantized_gemm_<dtype>.cu
// instantiates it. A block makes a tile of 64 rows x 128 sums as portable_gemm_kernel.cuh does.
//
// K is cut into pieces of up to 32 inside which all scales are constant. A stage of shared memory
// holds the values of one or two pieces (kStep values of K) as T, decoded on the way from
// registers, and their scales. Pieces with the same scales are summed from zero by the tensor
// cores; their sums times the scales are added to the tile's in float32.
#pragma once

#include <algorithm>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/portable_gemm_tile.cuh"
#include "backends/cuda/kernels/quantized_gemm.h"
#include "backends/cuda/kernels/small_floats.cuh"

namespace cadre::cuda::portable {

constexpr int kQuantizedRows = 64;
constexpr int kPieceValues = 32;  // of K, the smallest block of any format

/// A run of K with constant scales.
struct KPiece {
  int64_t begin = 0;
  int64_t end = 0;
  bool closes = false;  // the last one with these scales
};

template <typename T, bool kDual>
struct QuantizedShape : Shape<T, kQuantizedRows, kDual> {
  using Base = Shape<T, kQuantizedRows, kDual>;
  static constexpr int kPieces = Base::kStep / kPieceValues;  // in a stage
  static constexpr int kChunksOfPiece = kChunks / kPieces;
  static constexpr int kScales = kQuantizedRows + kTileColumns;  // of a piece
  static constexpr int kStageBytes = Base::kStageBytes + kPieces * kScales * 4;
  static constexpr int kSharedBytes =
      std::max(2 * kStageBytes, kQuantizedRows*(kTileColumns + 8) * 4);
  static_assert(Base::kThreads == kTileColumns);  // a thread has the scales of one column
};

__device__ inline int64_t block_of(int64_t i, int64_t block) { return block == 0 ? 0 : i / block; }

// Up to 8 codes or up to 16 bytes of plain values, as they lie in memory.
template <typename T>
__device__ inline uint4 load_plain(const T* from, int count) {
  constexpr int kValues = 16 / sizeof(T);
  if (count == kValues && reinterpret_cast<uintptr_t>(from) % 16 == 0) {
    return *reinterpret_cast<const uint4*>(from);
  }
  alignas(16) T values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = i < count ? from[i] : T(0.0f);
  return *reinterpret_cast<const uint4*>(values);
}

template <int kValues>
__device__ inline uint2 load_bytes(const uint8_t* from, int64_t stride, int count) {
  if (count == kValues && stride == 1 && reinterpret_cast<uintptr_t>(from) % kValues == 0) {
    if constexpr (kValues == 8) return *reinterpret_cast<const uint2*>(from);
    return make_uint2(*reinterpret_cast<const uint32_t*>(from), 0);
  }
  uint32_t words[2] = {};
#pragma unroll
  for (int i = 0; i < kValues; ++i) {
    if (i < count) words[i / 4] |= uint32_t{from[i * stride]} << i % 4 * 8;
  }
  return make_uint2(words[0], words[1]);
}

// Two e2m1 a byte, kValues from an even k on; what lies beyond `count` is zero.
template <int kValues>
__device__ inline uint2 load_nibbles(const uint8_t* from, int count) {
  constexpr int kBytes = kValues / 2;
  uint32_t word = 0;
  if (count == kValues && reinterpret_cast<uintptr_t>(from) % kBytes == 0) {
    word = kBytes == 4 ? *reinterpret_cast<const uint32_t*>(from)
                       : *reinterpret_cast<const uint16_t*>(from);
  } else {
#pragma unroll
    for (int i = 0; i < kBytes; ++i) {
      if (2 * i < count) word |= uint32_t{from[i]} << i * 8;
    }
    if (count < kValues) word &= (1u << count * 4) - 1;
  }
  return make_uint2(word, 0);
}

template <typename T>
__device__ inline uint4 decode_e4m3(uint2 codes) {
  constexpr int kValues = 16 / sizeof(T);
  if constexpr (std::is_same_v<T, __half>) {
    const auto two = [](uint32_t word) {
      const __half2 pair = e4m3_pair(word & 0xffffu);
      return *reinterpret_cast<const uint32_t*>(&pair);
    };
    return make_uint4(two(codes.x), two(codes.x >> 16), two(codes.y), two(codes.y >> 16));
  } else {
    alignas(16) T values[kValues];
#pragma unroll
    for (int i = 0; i < kValues; i += 2) {
      const __half2 two = e4m3_pair((i < 4 ? codes.x : codes.y) >> i % 4 * 8 & 0xffffu);
      values[i] = T(__low2float(two));
      values[i + 1] = T(__high2float(two));
    }
    return *reinterpret_cast<const uint4*>(values);
  }
}

template <typename T>
__device__ inline uint4 decode_e2m1(uint32_t codes) {
  constexpr int kValues = 16 / sizeof(T);
  alignas(16) T values[kValues];
#pragma unroll
  for (int i = 0; i < kValues; ++i) values[i] = T(e2m1_value(codes >> i * 4));
  return *reinterpret_cast<const uint4*>(values);
}

template <typename T, bool kDual>
__global__ void __launch_bounds__(QuantizedShape<T, kDual>::kThreads)
    quantized_gemm_kernel(const __grid_constant__ QuantizedGemm args) {
  using S = QuantizedShape<T, kDual>;
  constexpr int kThreads = S::kThreads;
  constexpr int kValues = 16 / static_cast<int>(sizeof(T));
  constexpr int kPieces = S::kPieces;
  const PortableGemm& gemm = args.gemm;
  wait_for_previous_kernel();
  let_next_kernel_start();
  Tile tile;
  if (!find_tile<kQuantizedRows, S::kColumns>(gemm, tile)) return;

  extern __shared__ __align__(128) char stages[];
  __shared__ int row_source[kQuantizedRows];
  find_row_sources<kThreads>(gemm, tile, row_source);

  const bool has_x_codes = args.x_scales != nullptr;
  const bool is_fp4 = args.format == StorageFormat::kFp4;
  const DeviceMatrix w = gemm.w.expert<uint8_t>(tile.group);
  const DeviceMatrix up = kDual ? gemm.up_w.expert<uint8_t>(tile.group) : w;
  // Row of the weights that the tile's column `c` is, or -1.
  const auto w_row = [&](int c) -> int64_t {
    const int64_t n = tile.first_column + (kDual && c >= S::kColumns ? c - S::kColumns : c);
    return n < gemm.n ? n : -1;
  };
  const auto matrix_of = [&](int c) -> const DeviceMatrix& {
    return kDual && c >= S::kColumns ? up : w;
  };
  const int64_t my_row = w_row(threadIdx.x);  // the column whose scales this thread loads
  const DeviceMatrix& my_matrix = matrix_of(threadIdx.x);
  const int64_t my_scales = block_of(my_row + my_matrix.scale_row_offset, args.layout.block_rows) *
                            my_matrix.scale_row_stride;

  const auto next_piece = [&](int64_t begin) {
    int64_t last = gemm.k;
    const auto stop_at = [&](int64_t block) {
      if (block != 0) last = min(last, (begin / block + 1) * block);
    };
    stop_at(args.layout.block_cols);
    if (has_x_codes) stop_at(args.x_group);
    const int64_t end = min(begin + kPieceValues, last);
    return KPiece{begin, end, end == last};
  };

  // What a thread brings from memory for a stage: 16-byte chunks of every kPass-th row, and scales.
  constexpr int kPass = kThreads / kChunks;
  constexpr int kCopiesX = kQuantizedRows / kPass;
  constexpr int kCopiesW = kTileColumns / kPass;
  const int copy_row = threadIdx.x / kChunks;
  const int copy_chunk = threadIdx.x % kChunks;
  // Where K is not the near dimension, neighbouring threads take neighbouring rows.
  const bool along_rows = !is_fp4 && w.col_stride > w.row_stride;
  const auto w_place = [&](int i, int& row, int& chunk) {
    const int at = static_cast<int>(threadIdx.x) + i * kThreads;
    row = along_rows ? at % kTileColumns : copy_row + i * kPass;
    chunk = along_rows ? at / kTileColumns : copy_chunk;
  };
  uint4 x_raw[kCopiesX];
  uint2 w_raw[kCopiesW];
  float w_scale[kPieces];
  float x_scale;

  const auto load_stage = [&](const KPiece(&pieces)[kPieces]) {
    // The chunk's values of K, and how many of them are there.
    const auto k_of = [&](int chunk, int64_t& k) {
      const KPiece& piece = pieces[chunk / S::kChunksOfPiece];
      k = piece.begin + chunk % S::kChunksOfPiece * kValues;
      const int64_t left = piece.end - k;
      return static_cast<int>(left < 0 ? 0 : (left < kValues ? left : kValues));
    };
    int64_t k;
    int count = k_of(copy_chunk, k);
#pragma unroll
    for (int i = 0; i < kCopiesX; ++i) {
      const int source = row_source[copy_row + i * kPass];
      x_raw[i] = make_uint4(0, 0, 0, 0);
      if (source < 0 || count == 0) continue;
      const int64_t at = source * gemm.x_stride + k;
      if (has_x_codes) {
        const uint2 codes = load_bytes<kValues>(static_cast<const uint8_t*>(gemm.x) + at, 1, count);
        x_raw[i].x = codes.x, x_raw[i].y = codes.y;
      } else {
        x_raw[i] = load_plain(static_cast<const T*>(gemm.x) + at, count);
      }
    }
#pragma unroll
    for (int i = 0; i < kCopiesW; ++i) {
      int row;
      int chunk;
      w_place(i, row, chunk);
      count = k_of(chunk, k);
      const int64_t n = w_row(row);
      w_raw[i] = make_uint2(0, 0);
      if (n < 0 || count == 0) continue;
      const DeviceMatrix& m = matrix_of(row);
      const auto* from = static_cast<const uint8_t*>(m.data) + n * m.row_stride;
      w_raw[i] = is_fp4 ? load_nibbles<kValues>(from + k / 2, count)
                        : load_bytes<kValues>(from + k * m.col_stride, m.col_stride, count);
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      w_scale[p] = 0;
      if (my_row < 0 || pieces[p].begin >= pieces[p].end) continue;
      const int64_t at = my_scales + block_of(pieces[p].begin, args.layout.block_cols) *
                                         my_matrix.scale_col_stride;
      w_scale[p] = args.layout.dtype == DType::kF32
                       ? static_cast<const float*>(my_matrix.scales)[at]
                       : e8m0_value(static_cast<const uint8_t*>(my_matrix.scales)[at]);
    }
    // Of x: a thread has one row, in the last piece where its number is beyond the rows.
    const KPiece& piece = pieces[static_cast<int>(threadIdx.x) / kQuantizedRows % kPieces];
    const int source = row_source[threadIdx.x % kQuantizedRows];
    x_scale = 1;
    if (has_x_codes && source >= 0 && piece.begin < piece.end) {
      x_scale = args.x_scales[source * args.x_scale_row_stride +
                              block_of(piece.begin, args.x_group) * args.x_scale_group_stride];
    }
  };

  const auto stage_at = [&](int slot) { return stages + slot * S::kStageBytes; };
  const auto scales_at = [&](int slot, int piece) {
    return reinterpret_cast<float*>(stage_at(slot) + S::Base::kStageBytes) + piece * S::kScales;
  };
  const auto store_stage = [&](int slot) {
    char* x_stage = stage_at(slot);
    char* w_stage = x_stage + kQuantizedRows * kRowBytes;
#pragma unroll
    for (int i = 0; i < kCopiesX; ++i) {
      const uint4 values =
          has_x_codes ? decode_e4m3<T>(make_uint2(x_raw[i].x, x_raw[i].y)) : x_raw[i];
      *reinterpret_cast<uint4*>(x_stage + chunk_offset(copy_row + i * kPass, copy_chunk)) = values;
    }
#pragma unroll
    for (int i = 0; i < kCopiesW; ++i) {
      int row;
      int chunk;
      w_place(i, row, chunk);
      *reinterpret_cast<uint4*>(w_stage + chunk_offset(row, chunk)) =
          is_fp4 ? decode_e2m1<T>(w_raw[i].x) : decode_e4m3<T>(w_raw[i]);
    }
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      scales_at(slot, p)[kQuantizedRows + threadIdx.x] = w_scale[p];
    }
    if (static_cast<int>(threadIdx.x) < kPieces * kQuantizedRows) {
      scales_at(slot, threadIdx.x / kQuantizedRows)[threadIdx.x % kQuantizedRows] = x_scale;
    }
  };

  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const int warp_row = warp % S::kWarpsM * S::kWarpRows;
  const int warp_column = warp / S::kWarpsM * (kDual ? S::kWarpColumns / 2 : S::kWarpColumns);
  // First of the 16 tile columns of a pair of column tiles.
  const auto pair_column = [&](int pair) {
    constexpr int kHalf = kDual ? S::kTilesN / 4 : S::kTilesN / 2;
    return warp_column + pair % kHalf * 16 + (pair >= kHalf ? S::kColumns : 0);
  };
  const int a_row = warp_row + lane % 16;
  const int b_row = kQuantizedRows + lane % 8 + lane / 16 * 8;
  float sums[S::kTilesM][S::kTilesN][4] = {};
  float part[S::kTilesM][S::kTilesN][4] = {};

  const auto multiply_piece = [&](int slot, int piece, bool closes) {
    const uint32_t stage = shared_address(stage_at(slot));
#pragma unroll
    for (int i = 0; i < S::kChunksOfPiece; i += 2) {
      const int c = piece * S::kChunksOfPiece + i;
      uint32_t a[S::kTilesM][4];
      uint32_t b[S::kTilesN][2];
#pragma unroll
      for (int m = 0; m < S::kTilesM; ++m) {
        load_matrices(a[m], stage + chunk_offset(a_row + m * 16, c + lane / 16));
      }
#pragma unroll
      for (int p = 0; p < S::kTilesN / 2; ++p) {
        uint32_t m[4];
        load_matrices(m, stage + chunk_offset(pair_column(p) + b_row, c + lane / 8 % 2));
        b[2 * p][0] = m[0], b[2 * p][1] = m[1];
        b[2 * p + 1][0] = m[2], b[2 * p + 1][1] = m[3];
      }
      multiply_step<T, S::kTilesM, S::kTilesN>(part, a, b);
    }
    if (!closes) return;
    const float* x_scales = scales_at(slot, piece) + warp_row + lane / 4;
    const float* w_scales = scales_at(slot, piece) + kQuantizedRows + lane % 4 * 2;
#pragma unroll
    for (int j = 0; j < S::kTilesN; ++j) {
      const float2 of_w =
          *reinterpret_cast<const float2*>(w_scales + pair_column(j / 2) + j % 2 * 8);
#pragma unroll
      for (int i = 0; i < S::kTilesM; ++i) {
        const float of_x[2] = {x_scales[i * 16], x_scales[i * 16 + 8]};
#pragma unroll
        for (int q = 0; q < 4; ++q) {
          sums[i][j][q] += of_x[q / 2] * (q % 2 == 0 ? of_w.x : of_w.y) * part[i][j][q];
          part[i][j][q] = 0;
        }
      }
    }
  };

  int64_t k = 0;
  const auto take_stage = [&](bool(&closes)[kPieces]) {
    KPiece pieces[kPieces];
#pragma unroll
    for (int p = 0; p < kPieces; ++p) {
      pieces[p] = next_piece(k);
      closes[p] = pieces[p].closes;
      k = pieces[p].end;
    }
    load_stage(pieces);
  };
  if (gemm.k > 0) {
    bool closes[kPieces];
    take_stage(closes);
    store_stage(0);
    __syncthreads();
    bool more = true;
    for (int slot = 0; more; slot ^= 1) {
      more = k < gemm.k;
      bool next_closes[kPieces] = {};
      if (more) take_stage(next_closes);
#pragma unroll
      for (int p = 0; p < kPieces; ++p) {
        multiply_piece(slot, p, closes[p]);
        closes[p] = next_closes[p];
      }
      if (more) store_stage(slot ^ 1);
      __syncthreads();
    }
  }

  auto* tile_sums = reinterpret_cast<float*>(stages);  // no longer read
#pragma unroll
  for (int i = 0; i < S::kTilesM; ++i) {
#pragma unroll
    for (int j = 0; j < S::kTilesN; ++j) {
      const int column = pair_column(j / 2) + j % 2 * 8 + lane % 4 * 2;
      float* to = tile_sums + (warp_row + i * 16 + lane / 4) * kPitch + column;
      *reinterpret_cast<float2*>(to) = make_float2(sums[i][j][0], sums[i][j][1]);
      *reinterpret_cast<float2*>(to + 8 * kPitch) = make_float2(sums[i][j][2], sums[i][j][3]);
    }
  }
  __syncthreads();
  write_tile<T, kQuantizedRows, kDual, std::is_same_v<T, __half>>(gemm, tile, tile_sums);
}

template <typename T, bool kDual>
void launch_quantized_tiles(const QuantizedGemm& args, cudaStream_t stream) {
  using S = QuantizedShape<T, kDual>;
  const PortableGemm& gemm = args.gemm;
  const int64_t row_tiles =
      gemm.offsets == nullptr
          ? (gemm.max_rows + kQuantizedRows - 1) / kQuantizedRows
          : gemm.max_rows / kQuantizedRows + std::min(gemm.num_groups, gemm.max_rows);
  const int64_t blocks = (row_tiles + 7) / 8 * 8 * ((gemm.n + S::kColumns - 1) / S::kColumns);
  auto* kernel = quantized_gemm_kernel<T, kDual>;
  allow_shared_memory(kernel, S::kSharedBytes);
  launch("quantized_gemm", kernel, dim3(static_cast<unsigned>(blocks)), dim3(S::kThreads),
         S::kSharedBytes, stream, Launch::kDependent, args);
}

template <typename T>
void run_quantized(const QuantizedGemm& args, cudaStream_t stream) {
  if (args.gemm.up_w.first.data != nullptr) {
    launch_quantized_tiles<T, true>(args, stream);
  } else {
    launch_quantized_tiles<T, false>(args, stream);
  }
}

void run_quantized_bf16(const QuantizedGemm& args, cudaStream_t stream);
void run_quantized_f16(const QuantizedGemm& args, cudaStream_t stream);
void run_quantized_f32(const QuantizedGemm& args, cudaStream_t stream);

}  // namespace cadre::cuda::portable

// Products with a matrix for every head: on the tensor cores where elements are of 16 bits and all
// is aligned, by plain multiply-adds otherwise.
#include "backends/cuda/dense/latent_kernels.h"
#include "backends/cuda/dense/mma.cuh"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kTile = 64;  // columns of a block, and k at a time
constexpr int kTileBytes = kTile * kTile * 2;
constexpr int kPieces = kTile / 8;  // 16-byte pieces of a row of a tile

// A tile of 64 x kTile elements on its way to shared memory, zeros beyond rows and columns.
template <int kRows>
__device__ void request_tile(const uint16_t* from, int64_t stride, int64_t rows, int64_t columns,
                             uint32_t to) {
#pragma unroll
  for (int i = 0; i < kRows * kPieces / kThreads; ++i) {
    const int index = i * kThreads + static_cast<int>(threadIdx.x);
    const int row = index / kPieces;
    const int piece = index % kPieces;
    const bool valid = row < rows && 8 * piece < columns;
    copy_async(to + piece_offset<kTile>(row, piece), from + (valid ? row * stride + 8 * piece : 0),
               valid);
  }
}

// kRows tokens times 64 columns of one head. A warp has all rows and 16 columns (few rows), or 16
// rows and all columns. kAcross: the weight's columns lie side by side, not its k.
template <typename T, int kRows, bool kAcross>
__global__ void __launch_bounds__(kThreads)
    heads_kernel(const __grid_constant__ HeadsProduct args) {
  constexpr bool kFew = kRows == 16;
  constexpr int kPairs = kFew ? 1 : kTile / 16;  // of 8 columns, of a warp
  constexpr int kStage = kRows * kTile * 2 + kTileBytes;
  __shared__ __align__(1024) unsigned char memory[2 * kStage];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t column = static_cast<int64_t>(blockIdx.x) * kTile;
  const int64_t token = static_cast<int64_t>(blockIdx.y) * kRows;
  const auto head = static_cast<int64_t>(blockIdx.z);
  const auto* x = static_cast<const uint16_t*>(args.x) + token * args.x_token + head * args.x_head;
  const auto* w = static_cast<const uint16_t*>(args.weight) + head * args.w_head;
  const uint32_t shared = shared_address(memory);
  const auto request = [&](int64_t k, int stage) {
    const uint32_t to = shared + stage * kStage;
    request_tile<kRows>(x + k, args.x_token, args.num_tokens - token, args.k - k, to);
    if constexpr (kAcross) {
      request_tile<kTile>(w + k * args.w_k + column, args.w_k, args.k - k, args.n - column,
                          to + kRows * kTile * 2);
    } else {
      request_tile<kTile>(w + column * args.w_n + k, args.w_n, args.n - column, args.k - k,
                          to + kRows * kTile * 2);
    }
    commit_copies();
  };
  float acc[2 * kPairs][4] = {};
  const int first_row = kFew ? 0 : 16 * warp;
  const int first_pair = kFew ? warp : 0;  // of 16 columns
  request(0, 0);
  int stage = 0;
  for (int64_t k = 0; k < args.k; k += kTile, stage ^= 1) {
    if (k + kTile < args.k) {
      request(k + kTile, stage ^ 1);
      wait_for_copies<1>();
    } else {
      wait_for_copies<0>();
    }
    __syncthreads();
    const uint32_t rows = shared + stage * kStage;
    const uint32_t weights = rows + kRows * kTile * 2;
#pragma unroll
    for (int step = 0; step < kTile / 16; ++step) {
      uint32_t a[4];
      load_matrices<0>(rows + piece_offset<kTile>(first_row + (lane / 8 % 2) * 8 + lane % 8,
                                                  2 * step + lane / 16),
                       a);
#pragma unroll
      for (int pair = 0; pair < kPairs; ++pair) {
        uint32_t b[4];
        if constexpr (kAcross) {
          load_matrices_transposed<0>(
              weights + piece_offset<kTile>(16 * step + (lane / 8 % 2) * 8 + lane % 8,
                                            2 * (first_pair + pair) + lane / 16),
              b);
        } else {
          load_matrices<0>(
              weights + piece_offset<kTile>(16 * (first_pair + pair) + (lane / 16) * 8 + lane % 8,
                                            2 * step + lane / 8 % 2),
              b);
        }
        mma<T>(acc[2 * pair], a[0], a[1], a[2], a[3], b[0], b[1]);
        mma<T>(acc[2 * pair + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
      }
    }
    __syncthreads();
  }
#pragma unroll
  for (int i = 0; i < 2 * kPairs; ++i) {
    const int64_t n = column + 16 * first_pair + 8 * i + 2 * (lane % 4);
    if (n >= args.n) continue;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const int64_t row = token + first_row + 8 * half + lane / 4;
      if (row >= args.num_tokens) continue;
      uint16_t* to =
          static_cast<uint16_t*>(args.out) + row * args.out_token + head * args.out_head + n;
      *reinterpret_cast<uint32_t*>(to) = narrow_two<T>(acc[i][2 * half], acc[i][2 * half + 1]);
    }
  }
}

constexpr int kAnyTokens = 4;  // of a block

// A thread has a column.
__global__ void __launch_bounds__(kThreads)
    heads_any_kernel(const __grid_constant__ HeadsProduct args) {
  begin_dependent();
  const int64_t n = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  const int64_t token = static_cast<int64_t>(blockIdx.y) * kAnyTokens;
  const auto head = static_cast<int64_t>(blockIdx.z);
  if (n >= args.n) return;
  const int64_t weight = head * args.w_head + n * args.w_n;
  float sums[kAnyTokens] = {};
  for (int64_t k = 0; k < args.k; ++k) {
    const float w = load_one(args.weight, args.dtype, weight + k * args.w_k);
#pragma unroll
    for (int t = 0; t < kAnyTokens; ++t) {
      const int64_t row = min(token + t, args.num_tokens - 1);
      sums[t] += w * load_one(args.x, args.dtype, row * args.x_token + head * args.x_head + k);
    }
  }
#pragma unroll
  for (int t = 0; t < kAnyTokens; ++t) {
    if (token + t >= args.num_tokens) continue;
    store_one(sums[t], args.out, args.dtype,
              (token + t) * args.out_token + head * args.out_head + n);
  }
}

dim3 grid_of(const HeadsProduct& args, int64_t columns, int64_t tokens) {
  const int64_t y = (args.num_tokens + tokens - 1) / tokens;
  CADRE_ASSERT(y < 65536 && args.num_heads < 65536);
  return {static_cast<unsigned>((args.n + columns - 1) / columns), static_cast<unsigned>(y),
          static_cast<unsigned>(args.num_heads)};
}

template <typename T, int kRows>
void run(const HeadsProduct& args, const Stream& stream) {
  const auto kernel = args.w_k == 1 ? heads_kernel<T, kRows, false> : heads_kernel<T, kRows, true>;
  launch("heads_kernel", kernel, grid_of(args, kTile, kRows), kThreads, 0, stream_of(stream),
         dependent_launch(stream), args);
}

template <typename T>
void run(const HeadsProduct& args, const Stream& stream) {
  if (args.num_tokens <= 16) return run<T, 16>(args, stream);
  run<T, 64>(args, stream);
}

bool fits_tensor_cores(const HeadsProduct& args) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const int64_t w_row = args.w_k == 1 ? args.w_n : args.w_k;
  const int64_t along = args.w_k == 1 ? args.k : args.n;
  return args.dtype != DType::kF32 && args.n % 8 == 0 && args.k % 8 == 0 && along % 8 == 0 &&
         w_row % 8 == 0 && args.w_head % 8 == 0 && args.x_token % 8 == 0 && args.x_head % 8 == 0 &&
         args.out_token % 2 == 0 && args.out_head % 2 == 0 && aligned(args.x) &&
         aligned(args.weight) && reinterpret_cast<uintptr_t>(args.out) % 4 == 0;
}

}  // namespace

void heads_product(const HeadsProduct& args, const Stream& stream) {
  if (!fits_tensor_cores(args)) {
    launch("heads_any_kernel", heads_any_kernel, grid_of(args, kThreads, kAnyTokens), kThreads, 0,
           stream_of(stream), dependent_launch(stream), args);
  } else if (args.dtype == DType::kBF16) {
    run<__nv_bfloat16>(args, stream);
  } else {
    run<__half>(args, stream);
  }
}

}  // namespace cadre::cuda

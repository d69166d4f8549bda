// The kernel of hopper_gemm_sm90a.cu with FP8 products. A warpgroup has 64 rows and 256 columns of
// a tile: the running sums take 128 registers of a thread, the products of 128 of K and one half of
// the columns 64 more. While one warpgroup scales and adds (64 multiply-adds), the other
// multiplies.
#include <limits>

#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/hopper_fp8_load.cuh"
#include "backends/cuda/kernels/hopper_fp8_write.cuh"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {
namespace hopper {
namespace {

// Registers of a thread; 128 * loader + 256 * consumer <= 65536.
constexpr int kFp8LoaderRegisters = 56;
constexpr int kFp8ConsumerRegisters = 224;

// What becomes of the sums.
enum class Result { kGated, kActivated, kF32, kBF16, kF16 };

constexpr bool is_gated(Result result) { return result == Result::kGated; }

__device__ void init_barriers(Shared& shared) {
  for (int s = 0; s < kStages; ++s) {
    // The loader's copies of tiles, and each of its lanes' copies of scales.
    ptx::barrier_init(ptx::shared_address(&shared.full[s]), 1 + 32);
    ptx::barrier_init(ptx::shared_address(&shared.empty[s]), kConsumers * 4 * kClusterSize);
  }
  for (int m = 0; m < kMails; ++m) {
    ptx::barrier_init(ptx::shared_address(&shared.mail_there[m]), 1);
  }
  ptx::fence_barrier_init();
}

__device__ void release(Shared& shared, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if (lane < kClusterSize) {
    ptx::arrive_in_cluster(ptx::address_in_cta(ptx::shared_address(&shared.empty[stage]), lane));
  }
}

__device__ void skip_tile(int32_t k_tiles, Shared& shared, Ring& ring) {
#pragma unroll 1
  for (int32_t t = 0; t < k_tiles; ++t, ring.advance()) {
    if (t > 0) ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    __syncwarp();
    release(shared, ring.stage);
  }
}

// 64 rows x 128 columns x 128 of K, from zero.
__device__ void start_half(float (&products)[64], uint32_t rows, uint32_t weights) {
  const uint64_t a = ptx::swizzled_tile(rows);
  const uint64_t b = ptx::swizzled_tile(weights);
  ptx::wgmma_fence();
  ptx::wgmma_e4m3_first(products, a, b);
#pragma unroll
  for (int i = 1; i < kFp8TileK / 32; ++i) ptx::wgmma_e4m3(products, a + 2 * i, b + 2 * i);
  ptx::wgmma_commit();
}

__device__ void finish_half(float (&products)[64]) {
  ptx::wgmma_wait<0>();
  ptx::pin(products);
}

// What a half's products are multiplied by: the row's scale times the block's.
struct Factors {
  float low, high;                // of the rows of even and odd pairs of products
  float second_low, second_high;  // beyond the border of two blocks of weight scales
};

template <bool kSplit>
__device__ Factors factors_of(const HalfReader& half, bool e8m0, int32_t k, const uint32_t* words,
                              float low, float high) {
  Factors f = {};
  const float first = half.first(e8m0, words[0], k);
  f.low = low * first;
  f.high = high * first;
  if (kSplit) {
    const float second = half.second(e8m0, words[1], k);
    f.second_low = low * second;
    f.second_high = high * second;
  }
  return f;
}

template <int kFirst, bool kSplit>
__device__ void add_scaled(float (&sums)[128], const float (&products)[64], const Factors& f,
                           int32_t border) {
  const auto column = static_cast<int32_t>(2 * (threadIdx.x % 4));
#pragma unroll
  for (int i = 0; i < 64; ++i) {
    const bool is_low = i / 2 % 2 == 0;
    float factor = is_low ? f.low : f.high;
    if (kSplit && column + i / 4 * 8 + i % 2 >= border) {
      factor = is_low ? f.second_low : f.second_high;
    }
    sums[kFirst + i] = fmaf(products[i], factor, sums[kFirst + i]);
  }
}

template <bool kGated>
__device__ HalfReader half_reader(const Fp8Params& p, const Piece& piece, int half) {
  return {half_scales<kGated>(p, piece.expert, piece.column, half),
          kGated && half == 1 ? p.up_scales : p.scales};
}

// All of K for one tile; the first stage is there already. kSplit: the border of two blocks of
// weight scales lies inside a half.
template <bool kSplit>
__device__ void multiply_stages(const Fp8Params& p, const HalfReader& left, const HalfReader& right,
                                Fp8Shared& shared, uint32_t stages, int warpgroup, Ring& ring,
                                float (&sums)[128]) {
  const auto row = threadIdx.x / 32 * 16 + threadIdx.x % 32 / 4;  // and 8 rows further on
  float products[64] = {};
  for (int32_t t = 0; t < p.k_tiles; ++t, ring.advance()) {
    if (t > 0) ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    // The same in all lanes, said so that descriptors are made once a warp.
    const uint32_t address = __shfl_sync(~0u, stage_address(stages, ring.stage), 0);
    const uint32_t rows = address + warpgroup * kRowBoxBytes;
    const StageScales& scales = shared.scales[ring.stage];
    start_half(products, rows, address + kRowBytes);
    const float low = scales.rows[row], high = scales.rows[row + 8];
    const Factors f = factors_of<kSplit>(left, p.e8m0, t, scales.weights, low, high);
    const Factors g = factors_of<kSplit>(right, p.e8m0, t, scales.weights + 2, low, high);
    finish_half(products);
    add_scaled<0, kSplit>(sums, products, f, left.border);
    start_half(products, rows, address + kRowBytes + kWeightBoxBytes);
    finish_half(products);
    release(shared, ring.stage);
    add_scaled<64, kSplit>(sums, products, g, right.border);
  }
}

template <bool kGated>
__device__ void multiply_tile(const Fp8Params& p, const Piece& piece, Fp8Shared& shared,
                              uint32_t stages, int warpgroup, Ring& ring, float (&sums)[128]) {
  const HalfReader left = half_reader<kGated>(p, piece, 0);
  const HalfReader right = half_reader<kGated>(p, piece, 1);
#pragma unroll
  for (int i = 0; i < 128; ++i) sums[i] = 0;
  if (left.is_split() || right.is_split()) {
    multiply_stages<true>(p, left, right, shared, stages, warpgroup, ring, sums);
  } else {
    multiply_stages<false>(p, left, right, shared, stages, warpgroup, ring, sums);
  }
}

template <Result kResult>
__device__ void write_result(const Fp8Params& p, const Piece& piece, int warpgroup, char* staging,
                             float (&sums)[128]) {
  if constexpr (kResult == Result::kGated || kResult == Result::kActivated) {
    write_quantized<is_gated(kResult)>(p, piece, warpgroup, staging, sums);
  } else if constexpr (kResult == Result::kF32) {
    write_floats(p, piece, warpgroup, staging, sums);
  } else if constexpr (kResult == Result::kBF16) {
    write_tile<__nv_bfloat16>(p, piece, warpgroup, staging, sums);
  } else {
    write_tile<__half>(p, piece, warpgroup, staging, sums);
  }
}

template <Result kResult>
__device__ void consume_all(const Fp8Params& p, Fp8Shared& shared, uint32_t stages, char* staging,
                            int warpgroup) {
  Ring ring;
  float sums[128];
  for (;;) {
    ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    const Piece piece = shared.pieces[ring.stage];
    if (piece.rows < 0) return;
    if (piece.rows <= warpgroup * 64) {
      skip_tile(p.k_tiles, shared, ring);
      continue;
    }
    if (kResult == Result::kF32 && p.accumulate) prefetch_floats(p, piece, warpgroup);
    multiply_tile<is_gated(kResult)>(p, piece, shared, stages, warpgroup, ring, sums);
    write_result<kResult>(p, piece, warpgroup, staging, sums);
  }
}

template <Result kResult>
__global__ void __cluster_dims__(kClusterSize, 1, 1) __launch_bounds__(kThreads, 1)
    fp8_gemm_kernel(const __grid_constant__ Fp8Params p) {
  extern __shared__ __align__(1024) char fp8_memory[];  // the swizzle counts from multiples of 1024
  const uint32_t stages = ptx::shared_address(fp8_memory);
  char* staging = fp8_memory + kStages * kStageBytes;
  Fp8Shared& shared = *reinterpret_cast<Fp8Shared*>(staging + kConsumers * 4 * kWarpStagingBytes);
  if (threadIdx.x == 0) init_barriers(shared);
  ptx::cluster_sync();

  const int warpgroup = __shfl_sync(~0u, static_cast<int>(threadIdx.x / 128), 0);
  if (warpgroup == kConsumers) {
    ptx::give_registers<kFp8LoaderRegisters>();
    if (threadIdx.x % 128 < 32) {
      load_with_scales<is_gated(kResult)>(p, shared, stages);
    }
  } else {
    ptx::take_registers<kFp8ConsumerRegisters>();
    if (!p.beside_previous) cudaGridDependencySynchronize();
    const auto warp = threadIdx.x / 32;
    consume_all<kResult>(p, shared, stages, staging + warp * kWarpStagingBytes, warpgroup);
  }
  __syncwarp();
  ptx::cluster_sync();  // the other CTA's arrivals must find these barriers
  // So that this kernel does not end before the one ahead.
  if (p.beside_previous && blockIdx.x == 0) cudaGridDependencySynchronize();
}

template <Result kResult>
void launch_gemm(const Fp8Params& p, const Stream& stream) {
  const auto kernel = fp8_gemm_kernel<kResult>;
  allow_shared_memory(kernel, kFp8SharedBytes);
  const int clusters = properties_of(stream.device.index).num_multiprocessors / kClusterSize;
  launch("hopper_fp8_gemm", kernel, dim3(static_cast<unsigned>(clusters * kClusterSize)),
         dim3(kThreads), kFp8SharedBytes, stream_of(stream), Launch::kDependent, p);
}

Result result_of(const HopperFp8Gemm& args) {
  if (args.gated) return Result::kGated;
  if (args.apply_gate) return Result::kActivated;
  if (args.out_dtype == DType::kF32) return Result::kF32;
  return args.out_dtype == DType::kBF16 ? Result::kBF16 : Result::kF16;
}

bool is_special(const HopperFp8Gemm& args) {
  const GateFunction& gate = args.gate;
  if (args.bias.first.data != nullptr || args.up_bias.first.data != nullptr) return true;
  return args.gated && (gate.activation != Activation::kSilu || gate.has_limit || gate.has_alpha);
}

void set_product(const HopperFp8Gemm& args, Fp8Params& p) {
  constexpr int kGroupPairs = 8;
  const int64_t columns = args.gated ? kHopperWeightBox : kTileColumns;
  p.rows = make_tensor_map(
      {DType::kU8, args.rows.codes, args.k, args.max_rows, 1, fp8_row_stride(args.k), 0},
      kHopperRowBox, false);
  p.row_scales = args.rows.scales;
  p.row_scale_stride = fp8_scale_stride(args.max_rows);
  p.max_rows = static_cast<int32_t>(args.max_rows);
  p.weights = args.weights;
  p.up_weights = args.up_weights;
  p.scales = to_scales(args.weight_scales, args.scale_layout);
  p.up_scales = to_scales(args.up_scales, args.scale_layout);
  p.block_rows = args.scale_layout.block_rows == 0
                     ? std::numeric_limits<int32_t>::max()
                     : static_cast<int32_t>(args.scale_layout.block_rows);
  p.e8m0 = args.scale_layout.dtype == DType::kF8E8M0;
  p.expert_offsets = args.expert_offsets;
  p.claimed = args.count;
  p.num_experts = static_cast<int32_t>(args.num_experts);
  p.n = static_cast<int32_t>(args.n);
  p.k = static_cast<int32_t>(args.k);
  p.column_tiles = static_cast<int32_t>((args.n + columns - 1) / columns);
  p.k_tiles = static_cast<int32_t>(fp8_groups(args.k));
  p.group_pairs = kGroupPairs;
}

Fp8Params to_params(const HopperFp8Gemm& args) {
  Fp8Params p = {};
  set_product(args, p);
  p.special = is_special(args);
  p.apply_gate = false;  // of write_tile()
  p.gate = args.gate;
  p.bias_dtype = args.bias_dtype;
  p.bias = args.bias;
  p.up_bias = args.up_bias;
  const bool quantized = args.gated || args.apply_gate;
  p.out = quantized ? args.out_rows.codes : args.out;
  p.out_stride = quantized ? fp8_row_stride(args.n) : args.out_stride;
  p.accumulate = args.accumulate;
  p.beside_previous = args.beside_previous;
  p.out_scales = args.out_rows.scales;
  p.out_scale_stride = fp8_scale_stride(args.max_rows);
  return p;
}

}  // namespace
}  // namespace hopper

void hopper_fp8_gemm(const HopperFp8Gemm& args, const Stream& stream) {
  using hopper::Result;
  const hopper::Fp8Params p = hopper::to_params(args);
  switch (hopper::result_of(args)) {
    case Result::kGated:
      return hopper::launch_gemm<Result::kGated>(p, stream);
    case Result::kActivated:
      return hopper::launch_gemm<Result::kActivated>(p, stream);
    case Result::kF32:
      return hopper::launch_gemm<Result::kF32>(p, stream);
    case Result::kBF16:
      return hopper::launch_gemm<Result::kBF16>(p, stream);
    case Result::kF16:
      return hopper::launch_gemm<Result::kF16>(p, stream);
  }
}

}  // namespace cadre::cuda

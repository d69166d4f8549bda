// The kernel of hopper_mx_gemm.h for one format; hopper_mx_<format>_sm90a.cu instantiate it.
// Persistent: a warp that loads through tensor maps and two warpgroups that decode, multiply and
// write. A tile is kColumns rows of tokens (the N of wgmma) by 256 rows of weights; a warpgroup has
// 64 of the first 128 and the same 64 of the second, gate and up where there is a gate. While
// products run, the next operands are decoded.
//
// FP8 with activations as codes: both are multiplied in fp16, which is exact; the sums of 128 of K
// leave the tensor cores and are scaled and added in float32.
#pragma once

#include <type_traits>

#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/hopper_mx_write.cuh"
#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/tensor_map.h"

namespace cadre::cuda {
namespace mx {

// ---- loading -----------------------------------------------------------------------------------

template <typename Weights, bool kGated, int kColumns>
__device__ void load_all(const Params& p, Shared<Tile<Weights, kColumns>::kStages>& shared,
                         uint32_t stages) {
  using T = Tile<Weights, kColumns>;
  const bool leader = threadIdx.x % 32 == 0;
  Schedule<kColumns> schedule(p, kGated ? kHalf : 2 * kHalf);
  Ring<T::kStages> ring;
  Piece piece;
  for (auto item = static_cast<int32_t>(blockIdx.x); schedule.find(item, piece);
       item += static_cast<int32_t>(gridDim.x)) {
    for (int32_t t = 0; t < p.k_tiles && leader; ++t, ring.advance()) {
      const uint32_t full = ptx::shared_address(&shared.full[ring.stage]);
      ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
      if (t == 0) shared.pieces[ring.stage] = piece;
      ptx::arrive_expect_bytes(full, T::kStageBytes);
      const uint32_t rows = stages + static_cast<uint32_t>(ring.stage) * T::kStageBytes;
      const uint32_t weights = rows + T::kRowBytes;
      const int32_t k = t * Weights::kRowBytes;
      ptx::load_3d(weights, &p.weights, k, piece.column, piece.expert, full);
      ptx::load_3d(weights + T::kBoxBytes, kGated ? &p.up_weights : &p.weights, k,
                   kGated ? piece.column : piece.column + kHalf, piece.expert, full);
      ptx::load_2d(rows, &p.rows, t * kTileK, piece.row, full);
    }
    __syncwarp();
  }
  if (leader) {
    ptx::wait(ptx::shared_address(&shared.empty[ring.stage]), ring.parity ^ 1);
    shared.pieces[ring.stage].rows = -1;
    ptx::arrive(ptx::shared_address(&shared.full[ring.stage]));
  }
}

// ---- products ----------------------------------------------------------------------------------

/// The scales of a thread's two rows of 16 in one half of a tile, 64 of K at a time.
class RowScales {
 public:
  __device__ RowScales(const Params& p, const Scales& scales, int32_t expert, int32_t row) {
    const int32_t last = p.n - 1;  // rows beyond N are zeros with any scale
    const uint8_t* of_expert = scales.first + expert * scales.expert_stride;
    first_ = of_expert + min(row, last) * scales.row_stride;
    second_ = of_expert + min(row + 8, last) * scales.row_stride;
  }
  /// Asked for ahead of their use.
  __device__ void ask(int32_t t) {
    next_[0] = reinterpret_cast<const uint16_t*>(first_)[t];
    next_[1] = reinterpret_cast<const uint16_t*>(second_)[t];
  }
  __device__ void take() {
    now_[0] = next_[0];
    now_[1] = next_[1];
  }
  /// Of half h of the 64.
  __device__ void get(int h, uint32_t (&scale)[2]) const {
    scale[0] = e8m0_bf16x2(now_[0] >> 8 * h & 0xffu);
    scale[1] = e8m0_bf16x2(now_[1] >> 8 * h & 0xffu);
  }

 private:
  const uint8_t* first_;
  const uint8_t* second_;
  uint32_t next_[2];
  uint32_t now_[2];
};

// Operands are made before what follows.
__device__ inline void keep(uint32_t (&a)[8]) {
#pragma unroll
  for (int i = 0; i < 8; ++i) asm volatile("" : "+r"(a[i])::"memory");
}

// The warp's 16 rows at `tile` as operands of the two products of half h.
template <typename Weights>
__device__ void operands(uint32_t tile, int h, const RowScales& scales, uint32_t (&raw)[4],
                         uint32_t (&a)[8]) {
  uint32_t scale[2];
  scales.get(h, scale);
  if constexpr (Weights::kIsFp4) {
    if (h == 0) Weights::load(tile, raw);
    Weights::decode(raw, h, scale, a);
  } else {
    Weights::load_half(tile, h, raw);
    Weights::decode(raw, scale, a);
  }
}

template <int kStages>
__device__ void release(Shared<kStages>& shared, int stage) {
  if (threadIdx.x % 32 == 0) ptx::arrive(ptx::shared_address(&shared.empty[stage]));
}

// All of K for one tile; the first stage is there already. A stage is given back when the products
// of the next one have begun.
template <typename Weights, int kColumns>
__device__ void multiply_tile(const Params& p, Shared<Tile<Weights, kColumns>::kStages>& shared,
                              uint32_t stages, int weight_row, RowScales& scales,
                              RowScales& up_scales, Ring<Tile<Weights, kColumns>::kStages>& ring,
                              float (&sums)[kColumns / 2], float (&up_sums)[kColumns / 2]) {
  using T = Tile<Weights, kColumns>;
  uint32_t a[2][8];
  uint32_t up_a[2][8];
  int before = 0;
  for (int32_t t = 0; t < p.k_tiles; ++t, ring.advance()) {
    scales.take();
    up_scales.take();
    if (t + 1 < p.k_tiles) {
      scales.ask(t + 1);
      up_scales.ask(t + 1);
    }
    if (t > 0) ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    const uint32_t rows = stages + static_cast<uint32_t>(ring.stage) * T::kStageBytes;
    const uint32_t tile = rows + T::kRowBytes + weight_row * Weights::kRowBytes;
    const uint64_t b = ptx::swizzled_tile(rows);
    uint32_t raw[4];
    uint32_t up_raw[4];
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      // The products before last have read these operands.
      ptx::wgmma_wait<1>();
      if (h == 1 && t > 0) release(shared, before);
      operands<Weights>(tile, h, scales, raw, a[h]);
      operands<Weights>(tile + T::kBoxBytes, h, up_scales, up_raw, up_a[h]);
      keep(a[h]);
      keep(up_a[h]);
      ptx::wgmma_fence();
#pragma unroll
      for (int j = 0; j < 2; ++j) {
        const uint64_t columns = b + 4 * h + 2 * j;
        const bool add = t > 0 || h > 0 || j > 0;
        wgmma_registers<typename Weights::Operand, kColumns>(sums, a[h] + 4 * j, columns, add);
        wgmma_registers<typename Weights::Operand, kColumns>(up_sums, up_a[h] + 4 * j, columns,
                                                             add);
      }
      ptx::wgmma_commit();
    }
    before = ring.stage;
  }
  ptx::wgmma_wait<0>();
  ptx::pin(sums);
  ptx::pin(up_sums);
  release(shared, before);
}

// Of FP8: the scales of a thread's two rows of weights in one half of a tile.
class BlockScales {
 public:
  __device__ BlockScales(const Params& p, const Scales& scales, int64_t row_offset, int32_t expert,
                         int32_t row)
      : is_e8m0_(p.fp8.is_e8m0), step_(p.fp8.scale_col_stride) {
    const uint8_t* of_expert = scales.first + expert * scales.expert_stride;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const int64_t at = min(row + 8 * h, p.n - 1) + row_offset;
      const int64_t block = p.fp8.block_rows == 0 ? 0 : at / p.fp8.block_rows;
      first_[h] = of_expert + block * p.fp8.scale_row_stride * (is_e8m0_ ? 1 : 4);
    }
  }
  /// Of group g of 128 of K.
  __device__ float at(int h, int32_t g) const {
    const int64_t index = g * step_;
    return is_e8m0_ ? e8m0_value(first_[h][index])
                    : reinterpret_cast<const float*>(first_[h])[index];
  }

 private:
  bool is_e8m0_;
  int64_t step_;
  const uint8_t* first_[2];
};

// multiply_tile() for FP8. Two stages are a group of K with constant scales.
template <int kColumns>
__device__ void multiply_scaled_tile(const Params& p, const Piece& piece,
                                     Shared<Tile<hopper::Fp8Weights, kColumns>::kStages>& shared,
                                     uint32_t stages, int weight_row, const BlockScales& scales,
                                     const BlockScales& up_scales,
                                     Ring<Tile<hopper::Fp8Weights, kColumns>::kStages>& ring,
                                     float (&sums)[kColumns / 2], float (&up_sums)[kColumns / 2]) {
  using Weights = hopper::Fp8Weights;
  using T = Tile<Weights, kColumns>;
  uint32_t a[2][8];
  uint32_t up_a[2][8];
  float part[kColumns / 2];
  float up_part[kColumns / 2];
#pragma unroll
  for (int i = 0; i < kColumns / 2; ++i) sums[i] = up_sums[i] = 0;
  const float* row_scales = p.fp8.rows + piece.row + threadIdx.x % 4 * 2;
  for (int32_t first = 0; first < p.k_tiles; first += 2) {
    const int32_t end = min(first + 2, p.k_tiles);
    const int32_t group = first / 2;
    const float* of_group = row_scales + group * p.fp8.row_stride;
    const float scale[2] = {scales.at(0, group), scales.at(1, group)};
    const float up_scale[2] = {up_scales.at(0, group), up_scales.at(1, group)};
    float of_rows[kColumns / 4];
#pragma unroll
    for (int j = 0; j < kColumns / 8; ++j) {
      of_rows[2 * j] = of_group[8 * j];
      of_rows[2 * j + 1] = of_group[8 * j + 1];
    }
    int before = 0;
    for (int32_t t = first; t < end; ++t, ring.advance()) {
      if (t > 0) ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
      const uint32_t rows = stages + static_cast<uint32_t>(ring.stage) * T::kStageBytes;
      const uint32_t tile = rows + T::kRowBytes + weight_row * Weights::kRowBytes;
      const uint64_t b = ptx::swizzled_tile(rows);
#pragma unroll
      for (int h = 0; h < 2; ++h) {
        ptx::wgmma_wait<1>();
        if (h == 1 && t > first) release(shared, before);
        uint32_t raw[4];
        Weights::load_half(tile, h, raw);
        Weights::decode(raw, a[h]);
        Weights::load_half(tile + T::kBoxBytes, h, raw);
        Weights::decode(raw, up_a[h]);
        keep(a[h]);
        keep(up_a[h]);
        ptx::wgmma_fence();
#pragma unroll
        for (int j = 0; j < 2; ++j) {
          const uint64_t columns = b + 4 * h + 2 * j;
          const bool add = t > first || h > 0 || j > 0;
          wgmma_registers<__half, kColumns>(part, a[h] + 4 * j, columns, add);
          wgmma_registers<__half, kColumns>(up_part, up_a[h] + 4 * j, columns, add);
        }
        ptx::wgmma_commit();
      }
      before = ring.stage;
    }
    ptx::wgmma_wait<0>();
    ptx::pin(part);
    ptx::pin(up_part);
    release(shared, before);
#pragma unroll
    for (int i = 0; i < kColumns / 2; ++i) {
      const float x = of_rows[i / 4 * 2 + i % 2];
      sums[i] = fmaf(part[i], x * scale[i / 2 % 2], sums[i]);
      up_sums[i] = fmaf(up_part[i], x * up_scale[i / 2 % 2], up_sums[i]);
    }
  }
}

// ---- the kernel --------------------------------------------------------------------------------

template <typename Weights, bool kGated, int kColumns>
__device__ void consume_all(const Params& p, Shared<Tile<Weights, kColumns>::kStages>& shared,
                            uint32_t stages, char* staging, int warpgroup) {
  Ring<Tile<Weights, kColumns>::kStages> ring;
  const int warp_row = warpgroup * 64 + static_cast<int>(threadIdx.x / 32 % 4) * 16;
  const int lane_row = warp_row + static_cast<int>(threadIdx.x % 32) / 4;
  float sums[kColumns / 2];
  float up_sums[kColumns / 2];
  for (;;) {
    ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    const Piece piece = shared.pieces[ring.stage];
    if (piece.rows < 0) return;
    const int32_t row = piece.column + lane_row;
    if constexpr (std::is_same_v<Weights, hopper::Fp8Weights>) {
      const BlockScales scales(p, p.scales, p.fp8.row_offset, piece.expert, row);
      const BlockScales up_scales(p, kGated ? p.up_scales : p.scales,
                                  kGated ? p.fp8.up_row_offset : p.fp8.row_offset, piece.expert,
                                  kGated ? row : row + kHalf);
      multiply_scaled_tile<kColumns>(p, piece, shared, stages, warp_row, scales, up_scales, ring,
                                     sums, up_sums);
    } else {
      RowScales scales(p, p.scales, piece.expert, row);
      RowScales up_scales(p, kGated ? p.up_scales : p.scales, piece.expert,
                          kGated ? row : row + kHalf);
      scales.ask(0);
      up_scales.ask(0);
      multiply_tile<Weights, kColumns>(p, shared, stages, warp_row, scales, up_scales, ring, sums,
                                       up_sums);
    }
    write_tile<Weights, kGated, kColumns>(p, piece, warpgroup, staging, sums, up_sums);
  }
}

template <typename Weights, bool kGated, int kColumns>
__global__ void __launch_bounds__(kThreads, 1) gemm_kernel(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char mx_memory[];  // the swizzle counts from multiples of 1024
  using T = Tile<Weights, kColumns>;
  const uint32_t stages = ptx::shared_address(mx_memory);
  char* staging = mx_memory + T::kStages * T::kStageBytes;
  auto& shared = *reinterpret_cast<Shared<T::kStages>*>(staging + kConsumers * T::kStagingBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < T::kStages; ++s) {
      ptx::barrier_init(ptx::shared_address(&shared.full[s]), 1);
      ptx::barrier_init(ptx::shared_address(&shared.empty[s]), kConsumers * 4);
    }
    ptx::fence_barrier_init();
  }
  __syncthreads();
  cudaGridDependencySynchronize();
  ptx::launch_dependents();
  const int warpgroup = static_cast<int>(threadIdx.x / 128);
  if (warpgroup == kConsumers) {
    ptx::give_registers<kLoaderRegisters>();
    if (threadIdx.x % 128 < 32) load_all<Weights, kGated, kColumns>(p, shared, stages);
  } else {
    ptx::take_registers<kConsumerRegisters>();
    consume_all<Weights, kGated, kColumns>(p, shared, stages,
                                           staging + warpgroup * T::kStagingBytes, warpgroup);
  }
}

// ---- host --------------------------------------------------------------------------------------

// With one row of weights a block the rows that lie before row 0 are skipped here.
inline Scales to_scales(const HopperMxGemm& args, const DeviceMatrices& m) {
  const auto* first = static_cast<const uint8_t*>(m.first.scales);
  if (first != nullptr && args.row_scales == nullptr) {
    first += m.first.scale_row_offset * m.first.scale_row_stride;
  }
  return {first, m.scale_expert_bytes, m.first.scale_row_stride};
}

inline Fp8Scales to_fp8_scales(const HopperMxGemm& args) {
  const DeviceMatrix& w = args.scales.first;
  return {args.row_scales,
          args.row_scale_stride,
          args.layout.block_rows,
          args.layout.dtype == DType::kF8E8M0,
          w.scale_row_stride,
          args.layout.block_cols == 0 ? 0 : w.scale_col_stride,
          args.up_scales.first.scale_row_offset,
          w.scale_row_offset};
}

inline bool is_plain(const HopperMxGemm& args) {
  const GateFunction& gate = args.gate;
  if (args.bias.first.data != nullptr || args.up_bias.first.data != nullptr) return false;
  if (!args.gated) return !args.apply_gate;
  return gate.activation == Activation::kSilu && !gate.has_limit && !gate.has_alpha;
}

inline Params to_params(const HopperMxGemm& args, int box_rows) {
  const int64_t columns = args.gated ? kHalf : 2 * kHalf;
  Params p = {};
  p.rows = make_tensor_map({args.row_scales == nullptr ? DType::kBF16 : DType::kF16, args.rows,
                            args.k, args.max_rows, 1, args.k, 0},
                           box_rows, false);
  p.weights = args.weights;
  p.up_weights = args.up_weights;
  p.scales = to_scales(args, args.scales);
  p.up_scales = to_scales(args, args.up_scales);
  p.expert_offsets = args.expert_offsets;
  p.num_experts = static_cast<int32_t>(args.num_experts);
  p.n = static_cast<int32_t>(args.n);
  p.column_tiles = static_cast<int32_t>((args.n + columns - 1) / columns);
  p.k_tiles = static_cast<int32_t>(args.k / kTileK);
  p.plain = is_plain(args);
  p.apply_gate = args.apply_gate;
  p.out_placed = args.out_placed;
  p.gate = args.gate;
  p.bias_dtype = args.bias_dtype;
  p.bias = args.bias;
  p.up_bias = args.up_bias;
  p.fp8 = to_fp8_scales(args);
  p.out = args.out;
  p.out_dtype = args.out_dtype;
  return p;
}

template <typename Weights, bool kGated, int kColumns>
void launch_gemm(const HopperMxGemm& args, const Stream& stream) {
  using T = Tile<Weights, kColumns>;
  const auto kernel = gemm_kernel<Weights, kGated, kColumns>;
  allow_shared_memory(kernel, kSharedBytes<T>);
  const int blocks = properties_of(stream.device.index).num_multiprocessors;
  launch("hopper_mx_gemm", kernel, dim3(static_cast<unsigned>(blocks)), dim3(kThreads),
         kSharedBytes<T>, stream_of(stream), Launch::kDependent, to_params(args, kColumns));
}

template <typename Weights, int kColumns>
void launch_gemm(const HopperMxGemm& args, const Stream& stream) {
  args.gated ? launch_gemm<Weights, true, kColumns>(args, stream)
             : launch_gemm<Weights, false, kColumns>(args, stream);
}

/// Rows an expert, on average, decide how many are multiplied at a time: decoding is done for each
/// tile, products for whole tiles.
template <typename Weights>
void launch_format(const HopperMxGemm& args, const Stream& stream) {
  const int64_t rows = args.max_rows / args.num_experts;
  if (rows <= 24) return launch_gemm<Weights, 32>(args, stream);
  if constexpr (std::is_same_v<Weights, hopper::Fp8Weights>) {
    launch_gemm<Weights, 64>(args, stream);  // sums are held twice
  } else {
    if (rows <= 48) return launch_gemm<Weights, 64>(args, stream);
    launch_gemm<Weights, 128>(args, stream);
  }
}

void run_fp4(const HopperMxGemm& args, const Stream& stream);
void run_mxfp8(const HopperMxGemm& args, const Stream& stream);
void run_fp8(const HopperMxGemm& args, const Stream& stream);

}  // namespace mx
}  // namespace cadre::cuda

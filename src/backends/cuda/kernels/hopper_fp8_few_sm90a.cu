// Gate, up and down of few tokens in one kernel: its CTAs take pieces of work from a counter, all
// of gate and up first. Weights are the 64-row operand of wgmma, so that a product has as many
// columns as there are tokens; a warpgroup has 64 of the 128 rows of each box of a stage.
#include <algorithm>
#include <limits>

#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/hopper_fp8_few_load.cuh"
#include "backends/cuda/kernels/hopper_fp8_few_write.cuh"
#include "backends/cuda/kernels/launch.h"
#include "core/check.h"

namespace cadre::cuda {
namespace hopper {
namespace {

constexpr size_t kStagesEnd = kFewStages * kFewStageBytes;
constexpr size_t kStagingEnd = kStagesEnd + kFewStagingBytes;
constexpr size_t kPlanBegin = kStagingEnd + (sizeof(FewShared) + 127) / 128 * 128;

__device__ void init_barriers(FewShared& shared) {
  for (int s = 0; s < kFewStages; ++s) {
    // The loader of weights, and each lane's copies of tokens and scales.
    ptx::barrier_init(ptx::shared_address(&shared.full[s]), 1 + 32);
    ptx::barrier_init(ptx::shared_address(&shared.empty[s]), kFewConsumerWarps);
  }
  for (int m = 0; m < kFewMails; ++m) {
    ptx::barrier_init(ptx::shared_address(&shared.mail_there[m]), 1);
    ptx::barrier_init(ptx::shared_address(&shared.mail_taken[m]), 1);
    ptx::barrier_init(ptx::shared_address(&shared.h_there[m]), 1);
  }
  for (int i = 0; i < 2; ++i) {
    ptx::barrier_init(ptx::shared_address(&shared.written[i]), kFewConsumerWarps);
    ptx::barrier_init(ptx::shared_address(&shared.announced[i]), 1);
  }
  ptx::fence_barrier_init();
}

// Where a thread finds the scales of its two rows of a box.
struct RowScales {
  uint32_t word[2];
  uint32_t byte[2];  // of E8M0, in its word, at the first stage
  uint32_t step;

  __device__ RowScales(const FewPiece& piece, int box) {
    const BoxScales& scales = piece.scales[box];
    step = static_cast<uint32_t>(scales.step);
#pragma unroll
    for (int h = 0; h < 2; ++h) {
      const bool second = few_row(2 * h) >= scales.border;
      word[h] = 2 * static_cast<uint32_t>(box) + (second ? 1 : 0);
      byte[h] = static_cast<uint32_t>(reinterpret_cast<uintptr_t>(scales.first) +
                                      (second ? scales.second : 0));
    }
  }

  __device__ float at(bool e8m0, const FewScales& scales, int h, int32_t t) const {
    const uint32_t w = scales.weights[word[h]];
    if (!e8m0) return __uint_as_float(w);
    const uint32_t place = byte[h] + static_cast<uint32_t>(t) * step;
    return e8m0_value(static_cast<uint8_t>(w >> (place % 4 * 8)));
  }
};

// 64 rows x kN tokens x 128 of K, from zero.
template <int kN>
__device__ void start_products(float (&products)[kN / 2], uint32_t weights, uint32_t tokens) {
  const uint64_t a = ptx::swizzled_tile(weights);
  const uint64_t b = ptx::swizzled_tile(tokens);
  ptx::wgmma_e4m3_few_first<kN>(products, a, b);
#pragma unroll
  for (int i = 1; i < kFp8TileK / 32; ++i) ptx::wgmma_e4m3_few<kN>(products, a + 2 * i, b + 2 * i);
}

template <int kN>
__device__ void add_scaled(float (&sums)[kN / 2], const float (&products)[kN / 2],
                           const float (&tokens)[kN / 4], const float (&rows)[2]) {
#pragma unroll
  for (int v = 0; v < kN / 2; ++v) {
    sums[v] = fmaf(products[v], tokens[v / 4 * 2 + v % 2] * rows[v / 2 % 2], sums[v]);
  }
}

template <int kN>
__device__ void read_token_scales(const float* from, float (&scales)[kN / 4]) {
#pragma unroll
  for (int j = 0; j < kN / 8; ++j) {
    const float2 two = *reinterpret_cast<const float2*>(from + 8 * j + threadIdx.x % 4 * 2);
    scales[2 * j] = two.x;
    scales[2 * j + 1] = two.y;
  }
}

template <int kN>
__device__ void multiply(const FewParams& p, const FewPiece& piece, FewShared& shared,
                         uint32_t stages, FewRing& ring, float (&sums)[2][kN / 2]) {
  const RowScales rows[2] = {{piece, 0}, {piece, 1}};
  const uint32_t half = threadIdx.x / 128 * (kFewBoxBytes / 2);
  const uint32_t second_tokens = piece.down ? kN * kFp8TileK : 0;
  const bool gated = p.few.args.gate_function.has_gate;
#pragma unroll
  for (int v = 0; v < kN / 2; ++v) sums[0][v] = sums[1][v] = 0;
  const int32_t count = piece.stages, blocks = piece.blocks;
  const bool down = piece.down;
#pragma unroll 1
  for (int32_t t = 0; t < count; ++t, ring.advance()) {
    const uint32_t stage = stages + static_cast<uint32_t>(ring.stage) * kFewStageBytes;
    const uint32_t tokens = stage + 2 * kFewBoxBytes;
    const FewScales& scales = shared.scales[ring.stage];
    const bool two = down ? 2 * t + 1 < blocks : gated;
    ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    ptx::fence_async_proxy();
    float products[2][kN / 2];
    ptx::wgmma_fence();
    start_products<kN>(products[0], stage + half, tokens);
    start_products<kN>(products[1], stage + kFewBoxBytes + half, tokens + second_tokens);
    ptx::wgmma_commit();
    float token[2][kN / 4];
    float row[2][2];
    read_token_scales<kN>(scales.tokens[0], token[0]);
    read_token_scales<kN>(scales.tokens[down ? 1 : 0], token[1]);
#pragma unroll
    for (int i = 0; i < 4; ++i) row[i / 2][i % 2] = rows[i / 2].at(p.e8m0, scales, i % 2, t);
    ptx::wgmma_wait<0>();
    ptx::pin(products[0]);
    ptx::pin(products[1]);
    __syncwarp();
    if (threadIdx.x % 32 == 0) ptx::arrive(ptx::shared_address(&shared.empty[ring.stage]));
    add_scaled<kN>(sums[0], products[0], token[0], row[0]);
    if (two) add_scaled<kN>(sums[1], products[1], token[1], row[1]);
  }
}

template <int kN>
__device__ void consume_piece(const FewParams& p, const Plan& plan, const FewPiece& piece,
                              FewShared& shared, uint32_t stages, char* staging, FewRing& ring) {
  float sums[2][kN / 2];
  multiply<kN>(p, piece, shared, stages, ring, sums);
  if (piece.down) {
    write_y<kN>(p, plan, piece, sums);
  } else {
    write_h<kN>(p, plan, piece, shared, staging, sums);
  }
}

__device__ void consume_few(const FewParams& p, const Plan& plan, FewShared& shared,
                            uint32_t stages, char* staging) {
  FewRing ring;
#pragma unroll 1
  for (int32_t i = 0;; ++i) {
    const FewPiece& piece = receive_piece(shared, i);
    if (piece.stages == 0) return;
    wait_for_scales_and_h(shared, i);
    const int32_t columns = few_columns(piece.count);
    if (columns == 8) {
      consume_piece<8>(p, plan, piece, shared, stages, staging, ring);
    } else if (columns == 16) {
      consume_piece<16>(p, plan, piece, shared, stages, staging, ring);
    } else {
      consume_piece<32>(p, plan, piece, shared, stages, staging, ring);
    }
    __syncwarp();
    if (threadIdx.x % 32 == 0) {
      if (i >= 2) {
        ptx::wait(ptx::shared_address(&shared.announced[i % 2]),
                  static_cast<uint32_t>((i - 2) / 2 % 2));
      }
      ptx::arrive(ptx::shared_address(&shared.written[i % 2]));
    }
    __syncwarp();
  }
}

__global__ void __launch_bounds__(kFewThreads, 1)
    fp8_few_kernel(const __grid_constant__ FewParams p) {
  extern __shared__ __align__(1024) char few_memory[];  // the swizzle counts from multiples of 1024
  const uint32_t stages = ptx::shared_address(few_memory);
  FewShared& shared = *reinterpret_cast<FewShared*>(few_memory + kStagingEnd);
  const int warp = static_cast<int>(threadIdx.x / 32);
  const bool leader = threadIdx.x % 32 == 0;
  int32_t first_item = 0;
  if (threadIdx.x == 0) init_barriers(shared);
  if (warp == kFewConsumerWarps && leader) {
    ptx::prefetch_map(&p.few.gate);
    ptx::prefetch_map(&p.few.up);
    ptx::prefetch_map(&p.few.down);
  }
  if (warp == kFewConsumerWarps + 3 && leader) first_item = take_number(p);
  ptx::launch_dependents();
  const Plan plan =
      build_plan<kFewThreads>(few_memory + kPlanBegin, p.few.args, true, kMaxFewTokens);
  switch (warp - kFewConsumerWarps) {
    case 0:
      if (leader) load_few_weights(p, shared, stages);
      break;
    case 1:
      load_few_tokens(p, plan, shared, stages);
      break;
    case 2:
      if (leader) announce_pieces(p, shared);
      break;
    case 3:
      if (leader) take_pieces(p, plan, shared, first_item);
      break;
    case 4:
      if (leader) watch_h(p, shared);
      break;
    default:
      cudaGridDependencySynchronize();  // y and h: what came before has read them
      consume_few(p, plan, shared, stages, few_memory + kStagesEnd);
  }
}

bool is_special(const DecodeArgs& a) {
  const GateFunction& gate = a.gate_function;
  return a.gate_bias.first.data != nullptr || a.up_bias.first.data != nullptr || !gate.has_gate ||
         gate.activation != Activation::kSilu || gate.has_limit || gate.has_alpha;
}

int32_t tiles_of(int32_t rows) { return (rows + kFewRows - 1) / kFewRows; }

FewParams to_params(const HopperFp8Few& few) {
  const DecodeArgs& a = few.args;
  const ScaleLayout& layout = few.scale_layout;
  FewParams p = {};
  p.few = few;
  p.gate_scales = to_scales(a.gate_function.has_gate ? a.gate : a.up, layout);
  p.up_scales = to_scales(a.up, layout);
  p.down_scales = to_scales(a.down, layout);
  p.block_rows = layout.block_rows == 0 ? std::numeric_limits<int32_t>::max()
                                        : static_cast<int32_t>(layout.block_rows);
  p.e8m0 = layout.dtype == DType::kF8E8M0;
  p.special = is_special(a);
  p.up_tiles = tiles_of(a.intermediate);
  p.down_tiles = tiles_of(a.hidden);
  p.up_blocks = static_cast<int32_t>(fp8_groups(a.hidden));
  p.down_blocks = static_cast<int32_t>(fp8_groups(a.intermediate));
  return p;
}

size_t shared_bytes(int64_t pairs, int64_t num_experts) {
  return kPlanBegin + plan_bytes(static_cast<int>(pairs), static_cast<int>(num_experts));
}

}  // namespace
}  // namespace hopper

bool hopper_fp8_few_fits(int64_t pairs, int64_t num_experts) {
  constexpr size_t kSharedBytes = 227 * 1024;  // of a block of compute capability 9.0
  constexpr size_t kStatic = 1024;             // what the compiler and the driver take
  return pairs <= kMaxDecodePairs && num_experts <= kMaxDecodeExperts &&
         hopper::shared_bytes(pairs, num_experts) + kStatic <= kSharedBytes;
}

void hopper_fp8_few_products(const HopperFp8Few& few, const Stream& stream) {
  const int64_t pairs = int64_t{few.args.num_tokens} * few.args.top_k;
  CADRE_ASSERT(hopper_fp8_few_fits(pairs, few.args.num_experts));
  const size_t bytes = hopper::shared_bytes(pairs, few.args.num_experts);
  allow_shared_memory(hopper::fp8_few_kernel, bytes);
  const int blocks = properties_of(stream.device.index).num_multiprocessors;
  launch("hopper_fp8_few", hopper::fp8_few_kernel, dim3(static_cast<unsigned>(blocks)),
         dim3(hopper::kFewThreads), bytes, stream_of(stream), Launch::kDependent,
         hopper::to_params(few));
}

}  // namespace cadre::cuda

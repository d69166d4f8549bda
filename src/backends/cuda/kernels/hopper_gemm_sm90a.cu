// One persistent kernel: CTAs, each with a warpgroup that loads (hopper_load.cuh) and two that
// multiply 64 rows x 256 columns each and write (hopper_write.cuh), in the order of
// hopper_schedule.cuh. Unless rows are gathered, clusters of two CTAs share either weights or rows,
// loaded once for both.
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/hopper_gather.cuh"
#include "backends/cuda/kernels/hopper_load.cuh"
#include "backends/cuda/kernels/hopper_write_behind.cuh"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {
namespace hopper {
namespace {

// Registers of a thread; 128 * loader + 256 * consumer <= 384 * 168, which the CTA starts with.
constexpr int kLoaderRegisters = 56;
constexpr int kConsumerRegisters = 224;

constexpr size_t kGemmSharedBytes = kSharedBytes + sizeof(GemmShared) - sizeof(Shared);

// Few rows an expert rarely fill the boxes of 16 rows that are sent.
template <Rows kRows>
constexpr bool kWritesBehind = kRows != Rows::kGather;
template <bool kGated, Rows kRows>
constexpr bool kHasRest = kWritesBehind<kRows> && !kGated;

template <Rows kRows>
__device__ void release(Shared& shared, int stage) {
  const uint32_t lane = threadIdx.x % 32;
  if (kClusterOf<kRows> == 1) {
    if (lane == 0) ptx::arrive(ptx::shared_address(&shared.empty[stage]));
  } else if (lane < kClusterOf<kRows>) {
    ptx::arrive_in_cluster(ptx::address_in_cta(ptx::shared_address(&shared.empty[stage]), lane));
  }
}

template <typename T>
__device__ void multiply_stage(float (&sums)[128], uint32_t rows, uint32_t weights, bool add) {
  const uint64_t a = ptx::swizzled_tile(rows);
  const uint64_t b = ptx::swizzled_tile(weights);
  ptx::wgmma_fence();
#pragma unroll
  for (int i = 0; i < kTileK / 16; ++i) {
    ptx::wgmma_n256<T>(sums, a + 2 * i, b + 2 * i, add || i > 0);
  }
  ptx::wgmma_commit();
}

// k_tiles of K for one tile; the first stage is there already. A stage is given back when the
// products of the next one have been issued. Beside them the rest of the tile before is sent.
template <Rows kRows, typename T, bool kGated>
__device__ void multiply_tile(int32_t k_tiles, Shared& shared, uint32_t stages, int warpgroup,
                              Ring& ring, Writer<T, kGated>& writer, float (&sums)[128]) {
  int before = 0;
#pragma unroll 1
  for (int32_t t = 0; t < k_tiles; ++t, ring.advance()) {
    if (t > 0) ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    if (kRows == Rows::kGather) ptx::fence_async_proxy();
    const uint32_t address = stage_address(stages, ring.stage);
    multiply_stage<T>(sums, address + warpgroup * kRowBoxBytes, address + kRowBytes, t > 0);
    if (t > 0) {
      ptx::wgmma_wait<1>();
      release<kRows>(shared, before);
    }
    before = ring.stage;
    if (kHasRest<kGated, kRows>) writer.step();
  }
  if (kHasRest<kGated, kRows>) writer.send_rest();
  ptx::wgmma_wait<0>();
  ptx::pin(sums);
  release<kRows>(shared, before);
}

template <Rows kRows>
__device__ void skip_tile(int32_t k_tiles, Shared& shared, Ring& ring) {
  for (int32_t t = 0; t < k_tiles; ++t, ring.advance()) {
    if (t > 0) ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    __syncwarp();
    release<kRows>(shared, ring.stage);
  }
}

template <typename T, bool kGated, Rows kRows>
__device__ void consume_all(const Params& p, GemmShared& shared, uint32_t stages, char* staging,
                            int warpgroup) {
  Ring ring;
  float sums[128];
  Writer<T, kGated> writer(p, staging);
  for (;;) {
    ptx::wait(ptx::shared_address(&shared.full[ring.stage]), ring.parity);
    const Piece piece = shared.pieces[ring.stage];
    if (piece.rows < 0) break;
    Part part = {0, p.k_tiles, -1};
    if (kRows == Rows::kCut) part = shared.parts[ring.stage];
    if (piece.rows <= warpgroup * 64) {
      if (kHasRest<kGated, kRows>) writer.send_rest();
      skip_tile<kRows>(part.count, shared, ring);
      continue;
    }
    multiply_tile<kRows>(part.count, shared, stages, warpgroup, ring, writer, sums);
    if (kRows == Rows::kCut && part.number >= 0 && !join_parts(p, part, sums)) continue;
    if (p.special) {
      write_special<T, kGated>(p, piece, target_of(p, piece, warpgroup), staging, sums);
    } else if constexpr (kWritesBehind<kRows>) {
      writer.begin(piece, warpgroup, sums);
    } else if constexpr (kGated) {
      write_gated<T>(target_of(p, piece, warpgroup), staging, sums);
    } else {
      write_plain<T>(target_of(p, piece, warpgroup), staging, sums);
    }
  }
  if (kWritesBehind<kRows>) writer.finish();
}

template <typename T, bool kGated, Rows kRows>
__global__ void __cluster_dims__(kClusterOf<kRows>, 1, 1) __launch_bounds__(kThreads, 1)
    gemm_kernel(const __grid_constant__ Params p) {
  extern __shared__ char raw[];
  const uint32_t raw_address = ptx::shared_address(raw);
  const uint32_t stages = (raw_address + 1023) / 1024 * 1024;
  char* staging = raw + (stages - raw_address) + kStages * kStageBytes;
  GemmShared& shared = *reinterpret_cast<GemmShared*>(staging + kConsumers * 4 * kWarpStagingBytes);
  if (threadIdx.x == 0) {
    for (int s = 0; s < kStages; ++s) {
      ptx::barrier_init(ptx::shared_address(&shared.full[s]), kRows == Rows::kGather ? 1 + 128 : 1);
      ptx::barrier_init(ptx::shared_address(&shared.empty[s]), kConsumers * 4 * kClusterOf<kRows>);
    }
    for (int m = 0; m < kMails; ++m) {
      ptx::barrier_init(ptx::shared_address(&shared.mail_there[m]), 1);
    }
    ptx::fence_barrier_init();
  }
  ptx::cluster_sync();

  const int warpgroup = static_cast<int>(threadIdx.x / 128);
  if (warpgroup == kConsumers) {
    ptx::give_registers<kLoaderRegisters>();
    if (kRows == Rows::kGather) {
      gather_all<kGated>(p, shared, stages);
    } else if (threadIdx.x % 128 < 32) {
      load_all<kGated, kRows>(p, shared, stages);
    } else if (kRows == Rows::kSort) {
      cudaGridDependencySynchronize();
      Sorter(p).run();
    }
  } else {
    ptx::take_registers<kConsumerRegisters>();
    cudaGridDependencySynchronize();
    const auto warp = threadIdx.x / 32;
    consume_all<T, kGated, kRows>(p, shared, stages, staging + warp * kWarpStagingBytes, warpgroup);
  }
  __syncwarp();
  ptx::cluster_sync();  // the other CTA's arrivals must find these barriers
}

bool is_special(const HopperGemm& args) {
  const GateFunction& gate = args.gate;
  if (args.bias.first.data != nullptr || args.up_bias.first.data != nullptr) return true;
  if (!args.gated) return args.apply_gate;
  return gate.activation != Activation::kSilu || gate.has_limit || gate.has_alpha;
}

template <typename T, bool kGated, Rows kRows>
void launch_gemm(const Params& p, const Stream& stream) {
  const auto kernel = gemm_kernel<T, kGated, kRows>;
  allow_shared_memory(kernel, kGemmSharedBytes);
  const int clusters = properties_of(stream.device.index).num_multiprocessors / kClusterOf<kRows>;
  launch("hopper_gemm", kernel, dim3(static_cast<unsigned>(clusters * kClusterOf<kRows>)),
         dim3(kThreads), kGemmSharedBytes, stream_of(stream), Launch::kDependent, p);
}

Rows rows_of(const HopperGemm& args, const Params& p) {
  // Rows an expert, on average. Above it loading from where they lie costs more than sorting.
  constexpr int64_t kGatherUpTo = 96;
  if (args.pair_of_row == nullptr) {
    return p.partial_sums != nullptr && !args.gated ? Rows::kCut : Rows::kSorted;
  }
  return p.x_aligned && args.max_rows <= kGatherUpTo * args.num_experts ? Rows::kGather
                                                                        : Rows::kSort;
}

template <typename T, bool kGated>
void launch_gemm(const HopperGemm& args, const Params& p, const Stream& stream) {
  switch (rows_of(args, p)) {
    case Rows::kSorted:
      return launch_gemm<T, kGated, Rows::kSorted>(p, stream);
    case Rows::kCut:
      if constexpr (!kGated) return launch_gemm<T, kGated, Rows::kCut>(p, stream);
      break;
    case Rows::kSort:
      return launch_gemm<T, kGated, Rows::kSort>(p, stream);
    case Rows::kGather:
      return launch_gemm<T, kGated, Rows::kGather>(p, stream);
  }
}

template <typename T>
void launch_gemm(const HopperGemm& args, const Params& p, const Stream& stream) {
  args.gated ? launch_gemm<T, true>(args, p, stream) : launch_gemm<T, false>(args, p, stream);
}

Params to_params(const HopperGemm& args, int device) {
  constexpr int kGroupPairs = 8;
  const int64_t columns = args.gated ? kHopperWeightBox : kTileColumns;
  Params p = {};
  p.rows = args.rows;
  p.weights = args.weights;
  p.up_weights = args.up_weights;
  p.x = static_cast<const char*>(args.x);
  p.x_stride = args.x_stride * 2;
  p.pair_of_row = args.pair_of_row;
  p.x_aligned = reinterpret_cast<uintptr_t>(args.x) % 16 == 0 && args.x_stride % 8 == 0;
  p.sorted = static_cast<char*>(args.sorted);
  p.sort_taken = args.counts + 1;
  p.sorted_rows = args.counts + 2;
  p.claimed = args.counts;
  p.top_k = static_cast<int32_t>(args.top_k);
  p.expert_offsets = args.expert_offsets;
  p.max_rows = static_cast<int32_t>(args.max_rows);
  p.num_experts = static_cast<int32_t>(args.num_experts);
  p.n = static_cast<int32_t>(args.n);
  p.k = static_cast<int32_t>(args.k);
  p.column_tiles = static_cast<int32_t>((args.n + columns - 1) / columns);
  p.k_tiles = static_cast<int32_t>((args.k + kTileK - 1) / kTileK);
  p.group_pairs = kGroupPairs;
  p.special = is_special(args);
  p.apply_gate = args.apply_gate;
  p.gate = args.gate;
  p.bias_dtype = args.bias_dtype;
  p.bias = args.bias;
  p.up_bias = args.up_bias;
  p.out = args.out;
  p.out_stride = args.out_stride;
  p.out_boxes = args.out_boxes;
  if (properties_of(device).num_multiprocessors <= kHopperMaxCtas) {
    p.partial_sums = args.partial_sums;
    p.partial_turns = args.partial_turns;
  }
  return p;
}

}  // namespace
}  // namespace hopper

void hopper_gemm(const HopperGemm& args, const Stream& stream) {
  const hopper::Params p = hopper::to_params(args, stream.device.index);
  if (args.dtype == DType::kBF16) {
    hopper::launch_gemm<__nv_bfloat16>(args, p, stream);
  } else {
    hopper::launch_gemm<__half>(args, p, stream);
  }
}

}  // namespace cadre::cuda

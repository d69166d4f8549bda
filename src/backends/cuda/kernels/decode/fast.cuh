// The fast pair of decode kernels for one dtype. Blocks are as many as multiprocessors, each with
// an even share of the rows: `up` of the rows of all active experts, `down` of the output columns,
// so that it can sum over a token's experts by itself. `down` starts while `up` runs, and has its
// first weights in shared memory when h is ready.
#pragma once

#include <algorithm>
#include <climits>

#include "backends/cuda/kernels/decode/resident.cuh"
#include "backends/cuda/kernels/decode/stream.cuh"
#include "backends/cuda/kernels/decode/values.cuh"
#include "backends/cuda/kernels/launch.h"

namespace cadre::cuda {

#ifdef __CUDACC__

/// Where the scales of a row of quantised weights of [rows, k] begin. `readable` is for MX weights.
__device__ inline RowScales scales_at(const DecodeArgs& a, const DeviceMatrix& matrix, int row,
                                      int rows, int k) {
  const int64_t block = (row + matrix.scale_row_offset) >> a.format.row_shift;
  const int64_t rest = (rows - 1 - row) * matrix.scale_row_stride;
  return {static_cast<const char*>(matrix.scales) +
              block * matrix.scale_row_stride * a.format.scale_bytes(),
          static_cast<int>(min(rest, int64_t{16}) + (k + 31) / 32)};
}

/// A share of the rows of h of all entries, in tiles from the share's first row on.
template <typename Operands, int kM>
class UpJob {
  using T = typename Operands::Weight;
  using H = typename Operands::H;
  static constexpr bool kIsMx = is_mx(Operands::kKind);

 public:
  __device__ UpJob(const DecodeArgs& a, const Plan& plan)
      : a_(a), plan_(plan), has_gate_(a.gate_function.has_gate) {
    tile_rows_ = has_gate_ ? 8 * kM : 16 * kM;
    tiles_each_ = tiles_of(a.intermediate);
    share_rows();
    first_tiles_ = tiles_of(min(end_, a.intermediate) - first_row_);
    const int rest = max(0, end_ - a.intermediate);
    num_tiles_ =
        first_tiles_ + rest / a.intermediate * tiles_each_ + tiles_of(rest % a.intermediate);
  }

  __device__ int num_tiles() const { return num_tiles_; }

  __device__ TileRows rows(int index) const {
    const Tile tile = tile_at(index);
    const int expert = plan_.entry_expert[tile.entry];
    const DeviceMatrix up = a_.up.expert<T>(expert);
    TileRows rows;
    rows.stride = up.row_stride * static_cast<int64_t>(sizeof(T));
    rows.high = static_cast<const char*>(up.data) + tile.row * rows.stride;
    if (has_gate_) {
      const DeviceMatrix gate = a_.gate.expert<T>(expert);
      rows.low = static_cast<const char*>(gate.data) + tile.row * rows.stride;
      rows.low_rows = rows.high_rows = tile.rows;
    } else {
      rows.low = rows.high;
      rows.high += 8 * kM * rows.stride;
      rows.low_rows = min(tile.rows, 8 * kM);
      rows.high_rows = tile.rows - rows.low_rows;
    }
    return rows;
  }

  /// Of row r of the tile, the upper half's behind the lower's; null: there is no such row.
  __device__ RowScales scales(int index, int r) const {
    const Tile tile = tile_at(index);
    const bool is_gate = has_gate_ && r < 8 * kM;
    const int row = has_gate_ ? r % (8 * kM) : r;
    if (row >= tile.rows) return {};
    const DeviceMatrices& matrices = is_gate ? a_.gate : a_.up;
    return scales_at(a_, matrices.expert<T>(plan_.entry_expert[tile.entry]), tile.row + row,
                     a_.intermediate, a_.hidden);
  }

  __device__ TileTokens tokens(int index) const {
    const int entry = tile_at(index).entry;
    return {plan_.entry_first[entry], plan_.entry_count[entry]};
  }

  /// By one warp, from the tile's sums in shared memory. `factors`: beside MX weights, of the sums
  /// of each row of tokens.
  template <int kN>
  __device__ void emit(int index, const float* sums, const float* factors) const {
    const Tile tile = tile_at(index);
    const int expert = plan_.entry_expert[tile.entry];
    const int first = plan_.entry_first[tile.entry];
    const int elements = 8 * kM * plan_.entry_count[tile.entry];
#pragma unroll 1
    for (int e = threadIdx.x % 32; e < elements; e += 32) {
      const int token = e / (8 * kM);
      int r = e % (8 * kM);
      const float* at = sums + place_of_sum<kN>(r, token);
      const int64_t h = plan_.pair[first + token] * a_.h_stride + tile.row;
      const float factor = kIsMx ? factors[plan_.row[first + token]] : 1;
#pragma unroll 1
      for (; r < tile.rows; r += 8 * kM) {  // without a gate, the upper half is rows of its own
        float up = has_gate_ ? at[kUpperHalf] : at[0];
        float gate = has_gate_ ? at[0] : 0;
        if constexpr (kIsMx) {
          up = up * factor * kMxUnbias;
          gate = gate * factor * kMxUnbias;
        }
        if (a_.up_bias.first.data != nullptr) {
          up += bias_of(a_.up_bias, a_.bias_dtype, expert, tile.row + r);
          if (has_gate_) gate += bias_of(a_.gate_bias, a_.bias_dtype, expert, tile.row + r);
        }
        write_number<H>(a_.h, h + r, a_.compute_dtype, apply(a_.gate_function, gate, up));
        at += kUpperHalf;
      }
    }
  }

 private:
  struct Tile {
    int entry;
    int row;
    int rows;
  };
  __device__ int tiles_of(int rows) const { return (rows + tile_rows_ - 1) / tile_rows_; }
  // rows * part / parts without the large numbers.
  __device__ static int share_of(int rows, int part, int parts) {
    return rows / parts * part + rows % parts * part / parts;
  }
  __device__ void share_rows() {
    const int blocks = static_cast<int>(gridDim.x);
    const int block = static_cast<int>(blockIdx.x);
    const int rows = plan_.num_entries * a_.intermediate;
    const int begin = share_of(rows, block, blocks);
    first_entry_ = begin / a_.intermediate;
    first_row_ = begin - first_entry_ * a_.intermediate;
    end_ = share_of(rows, block + 1, blocks) - begin + first_row_;
  }
  __device__ Tile tile_at(int index) const {
    Tile tile = {first_entry_, first_row_ + index * tile_rows_, 0};
    int end = end_;
    if (index >= first_tiles_) {
      index -= first_tiles_;
      const int entry =
          static_cast<int>(static_cast<uint32_t>(index) / static_cast<uint32_t>(tiles_each_));
      tile.entry += 1 + entry;
      tile.row = (index - entry * tiles_each_) * tile_rows_;
      end -= (1 + entry) * a_.intermediate;
    }
    tile.rows = min(tile_rows_, min(end, a_.intermediate) - tile.row);
    return tile;
  }

  const DecodeArgs& a_;
  const Plan& plan_;
  bool has_gate_;
  int tile_rows_;
  int tiles_each_;
  int first_entry_ = 0;
  int first_row_ = 0;
  int end_ = 0;  // rows from the first entry's beginning
  int first_tiles_;
  int num_tiles_;
};

/// Output columns [begin, end): all entries for each block of up to 16 * kM of them.
template <typename Operands, int kM>
class DownJob {
  using T = typename Operands::Weight;
  static constexpr bool kIsMx = is_mx(Operands::kKind);

 public:
  __device__ DownJob(const DecodeArgs& a, const Plan& plan) : a_(a), plan_(plan) {
    const auto hidden = static_cast<uint32_t>(a.hidden);
    begin = static_cast<int>(hidden * blockIdx.x / gridDim.x);
    end = static_cast<int>(hidden * (blockIdx.x + 1) / gridDim.x);
    const int columns = end - begin;
    const int blocks = (columns + 16 * kM - 1) / (16 * kM);
    block_rows_ = blocks == 0 ? 0 : (columns + blocks - 1) / blocks;
    num_tiles_ = blocks * plan.num_entries;
    y = a.y + begin;
    y_stride = a.hidden;
  }

  // The results of each pair may lie in shared memory.
  __device__ int64_t y_bytes() const {
    return int64_t{end - begin} * a_.num_tokens * a_.top_k * int64_t{sizeof(float)};
  }
  __device__ void place_y(float* shared) {
    y = shared;
    y_stride = end - begin;
  }

  __device__ int num_tiles() const { return num_tiles_; }

  __device__ TileRows rows(int index) const {
    const Tile tile = tile_at(index);
    const DeviceMatrix down = a_.down.expert<T>(plan_.entry_expert[tile.entry]);
    TileRows rows;
    rows.stride = down.row_stride * static_cast<int64_t>(sizeof(T));
    rows.low = static_cast<const char*>(down.data) + tile.row * rows.stride;
    rows.high = rows.low + 8 * kM * rows.stride;
    rows.low_rows = min(tile.rows, 8 * kM);
    rows.high_rows = tile.rows - rows.low_rows;
    return rows;
  }

  __device__ RowScales scales(int index, int r) const {
    const Tile tile = tile_at(index);
    if (r >= tile.rows) return {};
    return scales_at(a_, a_.down.expert<T>(plan_.entry_expert[tile.entry]), tile.row + r, a_.hidden,
                     a_.intermediate);
  }

  __device__ TileTokens tokens(int index) const {
    const int entry = tile_at(index).entry;
    return {plan_.entry_first[entry], plan_.entry_count[entry]};
  }

  template <int kN>
  __device__ void emit(int index, const float* sums, const float* factors) const {
    const Tile tile = tile_at(index);
    const int first = plan_.entry_first[tile.entry];
    const int elements = 8 * kM * plan_.entry_count[tile.entry];
#pragma unroll 1
    for (int e = threadIdx.x % 32; e < elements; e += 32) {
      const int token = e / (8 * kM);
      const int r = e % (8 * kM);
      const float* at = sums + place_of_sum<kN>(r, token);
      float* to = y + plan_.pair[first + token] * y_stride + (tile.row - begin);
      const float factor = kIsMx ? factors[plan_.row[first + token]] : 1;
      const auto value = [&](float sum) { return kIsMx ? sum * factor * kMxUnbias : sum; };
      if (r < tile.rows) to[r] = value(at[0]);
      if (8 * kM + r < tile.rows) to[8 * kM + r] = value(at[kUpperHalf]);
    }
  }

  int begin;
  int end;
  float* y;  // [pair][column - begin]
  int64_t y_stride;

 private:
  struct Tile {
    int entry;
    int row;
    int rows;
  };
  __device__ Tile tile_at(int index) const {
    int row = begin;
    while (index >= plan_.num_entries) {  // a few times at most
      index -= plan_.num_entries;
      row += block_rows_;
    }
    return {index, row, min(block_rows_, end - row)};
  }

  const DecodeArgs& a_;
  const Plan& plan_;
  int block_rows_;
  int num_tiles_;
};

/// Brings the arguments near, while there is nothing else to do.
__device__ inline void touch(const DecodeArgs& a) {
  asm volatile("" ::"l"(a.ids), "l"(a.x), "l"(a.gate.table), "l"(a.up.table), "l"(a.down.table),
               "l"(a.gate_bias.table), "l"(a.down_bias.table), "l"(a.h), "l"(a.y));
}

/// Of one token: ids, routing weights and x in L2, which the weights of other layers have emptied.
__device__ inline void bring_token_to_l2(const DecodeArgs& a) {
  const auto i = static_cast<int>(threadIdx.x);
  const auto bring = [&](const void* data, int count, int bytes) {
    if (i * 128 < count * bytes) bring_to_l2(static_cast<const char*>(data) + i * 128);
  };
  bring(a.ids, a.top_k, a.ids_are_64 ? 8 : 4);
  bring(a.routing_weights, a.top_k, 4);
  bring(a.x, a.hidden, a.compute_dtype == DType::kF32 ? 4 : 2);
}

/// Of an entry.
template <typename Shapes>
inline constexpr int kMostTokens = std::max(Shapes::kMostTokens, kSmallTokens);

/// Whether a kernel of its own makes codes or float16 of the activations, ahead of `up` and of
/// `down`. For one token, and beside MX weights for few, each block does.
template <Kind kKind, Size kSize>
inline constexpr bool kHasCodes = is_mx(kKind) ? kSize == Size::kMany
                                               : kKind == Kind::kFp8&& kSize != Size::kOne;

__device__ inline TokenRows rows_of(const ActivationCodes& rows, const float* /*factors*/) {
  return {reinterpret_cast<const char*>(rows.codes), rows.stride, rows.scales, rows.groups};
}
/// `factors` in shared memory: load_factors() fills them.
__device__ inline TokenRows rows_of(const HalfRows& rows, const float* factors) {
  return {static_cast<const char*>(rows.data), rows.stride, factors};
}
__device__ inline void load_factors(const HalfRows& rows, int count, float* factors) {
  for (int i = threadIdx.x; i < count; i += blockDim.x) factors[i] = __ldcg(rows.factors + i);
}
/// What a kernel of its own made of x, and of h.
template <Kind kKind>
__device__ const auto& prepared_x(const DecodeArgs& a) {
  if constexpr (is_mx(kKind)) {
    return a.x_halves;
  } else {
    return a.x_codes;
  }
}
template <Kind kKind>
__device__ const auto& prepared_h(const DecodeArgs& a) {
  if constexpr (is_mx(kKind)) {
    return a.h_halves;
  } else {
    return a.h_codes;
  }
}

template <typename Operands, Size kSize, typename Shape>
__device__ void up_of(const DecodeArgs& a, const Plan& plan, char* memory) {
  constexpr bool kIsPlain = Operands::kKind == Kind::kPlain;
  using Job = UpJob<Operands, Shape::kM>;
  const Job job(a, plan);
  auto* const factors = reinterpret_cast<float*>(memory + Shape::kBytes);
  const auto x = [&]() -> TokenRows {
    if constexpr (Shape::kIsResident) {
      return resident_rows<Shape>(memory + Shape::kBytes, a.num_tokens, a.hidden);
    } else if constexpr (kHasCodes<Operands::kKind, kSize>) {
      return rows_of(prepared_x<Operands::kKind>(a), factors);
    } else {
      return {static_cast<const char*>(a.x),
              a.x_stride * int64_t{sizeof(typename Operands::Number)}};
    }
  }();
  WeightStream<Operands, Shape, Job> stream(a, memory, plan, job, x, a.hidden);
  stream.start_weights();
  if constexpr (Shape::kIsResident) {
    place_x<Shape>(a, x);
    __syncthreads();
  } else if constexpr (!kIsPlain && kHasCodes<Operands::kKind, kSize>) {
    wait_for_previous_kernel();
    if constexpr (Shape::kIsMx) {
      load_factors(a.x_halves, a.num_tokens, factors);
      __syncthreads();
    }
  }
  stream.run(kSignalLeft);
}

template <typename Operands, Size kSize>
__global__ void __launch_bounds__(kStreamThreads<Operands::kKind>, kSize == Size::kOne ? 2 : 1)
    fast_up(const __grid_constant__ DecodeArgs a) {
  using Shapes = UpShapes<Operands::kKind, kSize>;
  extern __shared__ __align__(128) char memory[];
  touch(a);
  if constexpr (kSize == Size::kOne) bring_token_to_l2(a);
  // Before the codes of x are made, the routing is there.
  if constexpr (!kHasCodes<Operands::kKind, kSize>) wait_for_previous_kernel();
  char* const ring = memory + plan_bytes(a.num_tokens * a.top_k, a.num_experts);
  if constexpr (is_mx(Operands::kKind) && !kHasCodes<Operands::kKind, kSize>) {
    using Shape = typename Shapes::Smallest;
    copy_rows(a.x, a.x_stride, a.num_tokens, a.hidden,
              resident_rows<Shape>(ring + Shape::kBytes, a.num_tokens, a.hidden));
  }
  const Plan plan =
      build_plan<kStreamThreads<Operands::kKind>>(memory, a, true, kMostTokens<Shapes>);
  Shapes::with(plan.largest_count,
               [&](auto shape) { up_of<Operands, kSize, decltype(shape)>(a, plan, ring); });
}

template <typename Operands, Size kSize, typename Shape>
__device__ void down_of(const DecodeArgs& a, const Plan& plan, char* memory, int behind) {
  using Job = DownJob<Operands, Shape::kM>;
  Job job(a, plan);
  const int pairs = a.num_tokens * a.top_k;
  const auto resident = static_cast<int>(resident_bytes<Shape>(pairs, a.intermediate));
  auto* const factors = reinterpret_cast<float*>(memory + Shape::kBytes);
  if (Shape::kBytes + resident + job.y_bytes() <= behind) {
    job.place_y(reinterpret_cast<float*>(memory + Shape::kBytes + resident));
  }
  const auto h = [&]() -> TokenRows {
    if constexpr (Shape::kIsResident) {
      return resident_rows<Shape>(memory + Shape::kBytes, pairs, a.intermediate);
    } else if constexpr (kHasCodes<Operands::kKind, kSize>) {
      return rows_of(prepared_h<Operands::kKind>(a), factors);
    } else {
      return {static_cast<const char*>(a.h), a.h_stride * int64_t{sizeof(typename Operands::H)}};
    }
  }();
  WeightStream<Operands, Shape, Job> stream(a, memory, plan, job, h, a.intermediate);
  if (Shape::kTokens == 1) {
    stream.start_weights_slowly();  // the last chunks of `up` and its h go first
  } else {
    stream.start_weights();
  }
  load_routing_weights<typename Operands::Output>(plan, a);
  wait_for_previous_kernel();
  if constexpr (Shape::kIsResident) {
    place_h<Shape>(a, h);
    __syncthreads();
  } else if constexpr (Shape::kIsMx) {
    load_factors(a.h_halves, pairs, factors);
    __syncthreads();
  }
  stream.run(INT_MAX);
  __syncthreads();
  combine<typename Operands::Output>(a, plan, job.begin, job.end - job.begin, job.y, job.y_stride);
}

template <typename Operands, Size kSize, int kM>
__global__ void __launch_bounds__(kStreamThreads<Operands::kKind>, kSize == Size::kOne ? 2 : 1)
    fast_down(const __grid_constant__ DecodeArgs a, int shared_bytes) {
  using Shapes = DownShapes<Operands::kKind, kSize, kM>;
  extern __shared__ __align__(128) char memory[];
  touch(a);
  // The routing is older than `up`, which began when it was there.
  const Plan plan =
      build_plan<kStreamThreads<Operands::kKind>>(memory, a, false, kMostTokens<Shapes>);
  const int used = static_cast<int>(plan_bytes(a.num_tokens * a.top_k, a.num_experts));
  char* const ring = memory + used;
  const int left = shared_bytes - used;
  Shapes::with(plan.largest_count,
               [&](auto shape) { down_of<Operands, kSize, decltype(shape)>(a, plan, ring, left); });
}

/// All of the memory that is L1 or shared is shared, so that a kernel finds room beside another.
template <typename Kernel>
void take_shared_memory(Kernel kernel) {
  CADRE_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
}

template <Kind kKind>
void prepare_x(const DecodeArgs& a, const DecodeDevice& device) {
  is_mx(kKind) ? make_x_halves(a, device) : make_x_codes(a, device);
}
template <Kind kKind>
void prepare_h(const DecodeArgs& a, const DecodeDevice& device) {
  is_mx(kKind) ? make_h_halves(a, device) : make_h_codes(a, device);
}

/// False when the device has too little shared memory.
template <typename Operands, Size kSize, int kM>
bool launch_fast(const DecodeArgs& a, const DecodeDevice& device) {
  const int grid = device.num_sms;
  const size_t limit = static_cast<size_t>(device.shared_bytes) - kStaticShared;
  const size_t plan = plan_bytes(a.num_tokens * a.top_k, a.num_experts);
  using Up = UpShapes<Operands::kKind, kSize>;
  using Down = DownShapes<Operands::kKind, kSize, kM>;
  const int pairs = a.num_tokens * a.top_k;
  const size_t up_bytes =
      Up::kBytes + resident_bytes<typename Up::Smallest>(a.num_tokens, a.hidden) + plan;
  const size_t down_bytes =
      Down::kBytes + resident_bytes<typename Down::Smallest>(pairs, a.intermediate) + plan;
  if (std::max(up_bytes, down_bytes) > limit) return false;
  // For what `down` finds, shared or not: the results of all pairs for its columns.
  const size_t columns = (a.hidden + grid - 1) / grid;
  const size_t y_bytes = columns * a.num_tokens * a.top_k * sizeof(float);
  const size_t wanted =
      kSize == Size::kOne ? kSharedOfTwo - std::min(up_bytes, kSharedOfTwo) : limit;
  const size_t shared_bytes = std::max(down_bytes, std::min({down_bytes + y_bytes, wanted, limit}));
  const Launch mode = device.has_dependent_launch ? Launch::kDependent : Launch::kPlain;
  const auto up = fast_up<Operands, kSize>;
  const auto down = fast_down<Operands, kSize, kM>;
  take_shared_memory(up);
  take_shared_memory(down);
  allow_shared_memory(up, up_bytes);
  allow_shared_memory(down, shared_bytes);
  if constexpr (kHasCodes<Operands::kKind, kSize>) prepare_x<Operands::kKind>(a, device);
  launch("batched_mm fast_up", up, grid, kStreamThreads<Operands::kKind>, up_bytes,
         stream_of(*device.stream), mode, a);
  if constexpr (kHasCodes<Operands::kKind, kSize>) prepare_h<Operands::kKind>(a, device);
  launch("batched_mm fast_down", down, grid, kStreamThreads<Operands::kKind>, shared_bytes,
         stream_of(*device.stream), mode, a, static_cast<int>(shared_bytes));
  return true;
}

template <typename Operands, Size kSize>
bool launch_fast(const DecodeArgs& a, const DecodeDevice& device) {
  const bool is_narrow = (a.hidden + device.num_sms - 1) / device.num_sms <= 16;
  return is_narrow ? launch_fast<Operands, kSize, 1>(a, device)
                   : launch_fast<Operands, kSize, 2>(a, device);
}

/// Whether the call may go through Size::kOne: one token is one entry for each slot.
inline bool is_one(const DecodeArgs& a) { return a.num_tokens == 1 && a.top_k <= 32; }

template <Kind kKind>
bool launch_fast_mx(const DecodeArgs& a, const DecodeDevice& device) {
  using Operands = MxOperands<kKind>;
  if (is_one(a) && launch_fast<Operands, Size::kOne>(a, device)) return true;
  if (a.num_tokens <= kSmallTokens && launch_fast<Operands, Size::kFew>(a, device)) return true;
  return launch_fast<Operands, Size::kMany>(a, device);
}

#endif

}  // namespace cadre::cuda

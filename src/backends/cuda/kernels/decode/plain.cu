// The plain decode kernels: any strides, alignment and dtype, one product at a time in float32. An
// expert's weights are read once for each eight of its tokens.
#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "backends/cuda/kernels/decode/values.cuh"
#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/small_floats.cuh"
#include "quant/activations.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr int kTokens = 8;  // of an entry
constexpr int kRows = 32;   // of an item

// What one block multiplies at a time: rows [row, row + kRows) of an entry's expert.
struct Item {
  int expert;
  const uint16_t* pairs;
  const uint16_t* rows;
  int count;
  int row;
};

__device__ Item item_of(const Plan& plan, int64_t index, int row_blocks) {
  const int entry = static_cast<int>(index / row_blocks);
  const int first = plan.entry_first[entry];
  return {plan.entry_expert[entry], plan.pair + first, plan.row + first, plan.entry_count[entry],
          static_cast<int>(index % row_blocks) * kRows};
}

// sums[n][row of the item] = W x_n, by all threads of the block. weight(row, i) and token(row, i)
// are numbers as float32. Lanes lie along k when rows are dense, else along rows.
template <typename Weight, typename Token>
__device__ void multiply(bool along_k, const Item& item, int num_rows, int k, const Weight& weight,
                         const Token& token, float (*sums)[kRows]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  if (along_k) {
    for (int r = warp; r < kRows; r += kWarps) {
      float acc[kTokens] = {};
      if (item.row + r < num_rows) {
        for (int i = lane; i < k; i += 32) {
          const float value = weight(item.row + r, i);
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {
            if (n < item.count) acc[n] += value * token(item.rows[n], i);
          }
        }
      }
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        for (int d = 16; d > 0; d /= 2) acc[n] += __shfl_xor_sync(~0u, acc[n], d);
        if (lane == 0) sums[n][r] = acc[n];
      }
    }
    __syncthreads();
    return;
  }
  __shared__ float parts[kWarps][kTokens][kRows];
  float acc[kTokens] = {};
  if (item.row + lane < num_rows) {
    for (int i = warp; i < k; i += kWarps) {
      const float value = weight(item.row + lane, i);
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        if (n < item.count) acc[n] += value * token(item.rows[n], i);
      }
    }
  }
#pragma unroll
  for (int n = 0; n < kTokens; ++n) parts[warp][n][lane] = acc[n];
  __syncthreads();
  float sum = 0;  // threads are kTokens x kRows
  for (int i = 0; i < kWarps; ++i) sum += parts[i][warp][lane];
  sums[warp][lane] = sum;
  __syncthreads();
}
static_assert(kThreads == kTokens * kRows);

// What the kernels read and write, by the type of the numbers; void: quantised weights.
template <typename T>
struct Numbers {
  using Weight = T;
  using Output = T;
  const DecodeArgs& a;

  __device__ float weight(const DeviceMatrix& w, int row, int i) const {
    return to_float(static_cast<const T*>(w.data)[row * w.row_stride + i * w.col_stride]);
  }
  __device__ float x(int64_t row, int i) const {
    return to_float(static_cast<const T*>(a.x)[row * a.x_stride + i]);
  }
  __device__ float h(int64_t row, int i) const {
    return to_float(static_cast<const T*>(a.h)[row * a.h_stride + i]);
  }
  __device__ void write_h(int64_t row, int i, float value) const {
    static_cast<T*>(a.h)[row * a.h_stride + i] = from_float<T>(value);
  }
};

template <>
struct Numbers<void> {
  using Weight = uint8_t;
  using Output = void;
  const DecodeArgs& a;

  __device__ float scale(const DeviceMatrix& w, int64_t row, int i) const {
    const DecodeFormat& f = a.format;
    const int64_t down = f.block_rows == 0 ? 0 : (row + w.scale_row_offset) / f.block_rows;
    const int64_t along = f.block_cols == 0 ? 0 : i / f.block_cols;
    const int64_t at = down * w.scale_row_stride + along * w.scale_col_stride;
    return f.is_e8m0 ? e8m0_value(static_cast<const uint8_t*>(w.scales)[at])
                     : static_cast<const float*>(w.scales)[at];
  }
  __device__ float weight(const DeviceMatrix& w, int64_t row, int i) const {
    const auto* const codes = static_cast<const uint8_t*>(w.data) + row * w.row_stride;
    const float value = a.format.format == StorageFormat::kFp4
                            ? e2m1_value(codes[i / 2] >> i % 2 * 4)
                            : __low2float(e4m3_pair(codes[i * w.col_stride]));
    return value * scale(w, row, i);
  }
  __device__ static float decoded(const ActivationCodes& rows, int64_t row, int i) {
    return __low2float(e4m3_pair(rows.codes[row * rows.stride + i])) *
           rows.scales[row * rows.groups + i / kActivationGroup];
  }
  __device__ float x(int64_t row, int i) const {
    if (a.x_codes.codes != nullptr) return decoded(a.x_codes, row, i);
    return read_number<void>(a.x, row * a.x_stride + i, a.compute_dtype);
  }
  __device__ float h(int64_t row, int i) const {
    if (a.h_codes.codes != nullptr) return decoded(a.h_codes, row, i);
    return read_number<void>(a.h, row * a.h_stride + i, a.compute_dtype);
  }
  __device__ void write_h(int64_t row, int i, float value) const {
    const DType dtype = a.h_codes.codes != nullptr ? DType::kF32 : a.compute_dtype;
    write_number<void>(a.h, row * a.h_stride + i, dtype, value);
  }
};

template <typename T>
__device__ void multiply_x(const DecodeArgs& a, const DeviceMatrix& w, const Item& item,
                           float (*sums)[kRows]) {
  const Numbers<T> numbers{a};
  multiply(
      w.col_stride <= w.row_stride || w.col_stride == 1, item, a.intermediate, a.hidden,
      [&](int row, int i) { return numbers.weight(w, row, i); },
      [&](int row, int i) { return numbers.x(row, i); }, sums);
}
template <typename T>
__device__ void multiply_h(const DecodeArgs& a, const DeviceMatrix& w, const Item& item,
                           float (*sums)[kRows]) {
  const Numbers<T> numbers{a};
  multiply(
      w.col_stride <= w.row_stride || w.col_stride == 1, item, a.hidden, a.intermediate,
      [&](int row, int i) { return numbers.weight(w, row, i); },
      [&](int row, int i) { return numbers.h(row, i); }, sums);
}

template <typename T>
__global__ void __launch_bounds__(kThreads) plain_up(DecodeArgs a) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float gates[kTokens][kRows];
  __shared__ float ups[kTokens][kRows];
  const Plan plan = build_plan<kThreads>(memory, a, true, kTokens);
  const int row_blocks = (a.intermediate + kRows - 1) / kRows;
  const int64_t items = int64_t{plan.num_entries} * row_blocks;
  using Weight = typename Numbers<T>::Weight;
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item = item_of(plan, i, row_blocks);
    if (a.gate_function.has_gate) {
      multiply_x<T>(a, a.gate.expert<Weight>(item.expert), item, gates);
    }
    multiply_x<T>(a, a.up.expert<Weight>(item.expert), item, ups);
    const int n = threadIdx.x / kRows;
    const int r = threadIdx.x % kRows;
    const int row = item.row + r;
    if (n < item.count && row < a.intermediate) {
      const float gate = a.gate_function.has_gate
                             ? gates[n][r] + bias_of(a.gate_bias, a.bias_dtype, item.expert, row)
                             : 0;
      const float up = ups[n][r] + bias_of(a.up_bias, a.bias_dtype, item.expert, row);
      Numbers<T>{a}.write_h(item.pairs[n], row, apply(a.gate_function, gate, up));
    }
    __syncthreads();
  }
}

// A block owns kRows output columns, so that it can sum over their pairs itself.
template <typename T>
__global__ void __launch_bounds__(kThreads) plain_down(DecodeArgs a) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float sums[kTokens][kRows];
  const Plan plan = build_plan<kThreads>(memory, a, false, kTokens);
  load_routing_weights<typename Numbers<T>::Output>(plan, a);
  __syncthreads();
  const int row_blocks = (a.hidden + kRows - 1) / kRows;
  using Weight = typename Numbers<T>::Weight;
  for (int block = blockIdx.x; block < row_blocks; block += gridDim.x) {
    for (int entry = 0; entry < plan.num_entries; ++entry) {
      const Item item = item_of(plan, int64_t{entry} * row_blocks + block, row_blocks);
      multiply_h<T>(a, a.down.expert<Weight>(item.expert), item, sums);
      const int n = threadIdx.x / kRows;
      const int row = item.row + threadIdx.x % kRows;
      if (n < item.count && row < a.hidden) {
        a.y[int64_t{item.pairs[n]} * a.hidden + row] = sums[n][threadIdx.x % kRows];
      }
      __syncthreads();
    }
    const int column = block * kRows + threadIdx.x % kRows;
    for (int t = threadIdx.x / kRows; t < a.num_tokens && column < a.hidden; t += kTokens) {
      combine_one<typename Numbers<T>::Output>(a, plan, t, column, a.y + column, a.hidden);
    }
    __syncthreads();
  }
}

template <typename T>
void run(const DecodeArgs& args, const DecodeDevice& device) {
  const size_t shared = plan_bytes(args.num_tokens * args.top_k, args.num_experts);
  allow_shared_memory(plain_up<T>, shared);
  allow_shared_memory(plain_down<T>, shared);
  const auto grid = static_cast<unsigned>(device.num_sms * 4);
  const cudaStream_t stream = stream_of(*device.stream);
  if (args.x_codes.codes != nullptr) make_x_codes(args, device);
  launch("batched_mm plain_up", plain_up<T>, grid, kThreads, shared, stream, Launch::kPlain, args);
  if (args.h_codes.codes != nullptr) make_h_codes(args, device);
  launch("batched_mm plain_down", plain_down<T>, grid, kThreads, shared, stream, Launch::kPlain,
         args);
}

}  // namespace

void decode_plain(const DecodeArgs& args, const DecodeDevice& device) {
  if (args.compute_dtype == DType::kBF16) return run<__nv_bfloat16>(args, device);
  if (args.compute_dtype == DType::kF16) return run<__half>(args, device);
  run<float>(args, device);
}

void decode_plain_quantized(const DecodeArgs& args, const DecodeDevice& device) {
  run<void>(args, device);
}

}  // namespace cadre::cuda

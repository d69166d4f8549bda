// The plain decode kernels: any strides, alignment and dtype, one product at a time in float32. An
// expert's weights are read once for each eight of its tokens.
#include "backends/cuda/kernels/decode/decode_kernels.h"
#include "backends/cuda/kernels/decode/values.cuh"
#include "backends/cuda/kernels/launch.h"
#include "cadre/error.h"

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

// sums[n][row of the item] = W x_n, by all threads of the block. Lanes lie along k when rows are
// dense, else along rows.
template <typename T>
__device__ void multiply(const DeviceMatrix& w, const Item& item, int num_rows, int k, const T* x,
                         int64_t x_stride, float (*sums)[kRows]) {
  const int lane = threadIdx.x % 32;
  const int warp = threadIdx.x / 32;
  const T* data = static_cast<const T*>(w.data);
  const bool along_k = w.col_stride <= w.row_stride || w.col_stride == 1;
  if (along_k) {
    for (int r = warp; r < kRows; r += kWarps) {
      float acc[kTokens] = {};
      if (item.row + r < num_rows) {
        const T* row = data + (item.row + r) * w.row_stride;
        for (int i = lane; i < k; i += 32) {
          const float value = to_float(row[i * w.col_stride]);
#pragma unroll
          for (int n = 0; n < kTokens; ++n) {
            if (n < item.count) acc[n] += value * to_float(x[item.rows[n] * x_stride + i]);
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
    const T* row = data + (item.row + lane) * w.row_stride;
    for (int i = warp; i < k; i += kWarps) {
      const float value = to_float(row[i * w.col_stride]);
#pragma unroll
      for (int n = 0; n < kTokens; ++n) {
        if (n < item.count) acc[n] += value * to_float(x[item.rows[n] * x_stride + i]);
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

template <typename T>
__global__ void __launch_bounds__(kThreads) plain_up(DecodeArgs a) {
  extern __shared__ __align__(16) char memory[];
  __shared__ float gates[kTokens][kRows];
  __shared__ float ups[kTokens][kRows];
  const Plan plan = build_plan<kThreads>(memory, a, true, kTokens);
  const int row_blocks = (a.intermediate + kRows - 1) / kRows;
  const int64_t items = int64_t{plan.num_entries} * row_blocks;
  const T* x = static_cast<const T*>(a.x);
  for (int64_t i = blockIdx.x; i < items; i += gridDim.x) {
    const Item item = item_of(plan, i, row_blocks);
    if (a.gate_function.has_gate) {
      multiply(a.gate.expert<T>(item.expert), item, a.intermediate, a.hidden, x, a.x_stride, gates);
    }
    multiply(a.up.expert<T>(item.expert), item, a.intermediate, a.hidden, x, a.x_stride, ups);
    const int n = threadIdx.x / kRows;
    const int r = threadIdx.x % kRows;
    const int row = item.row + r;
    if (n < item.count && row < a.intermediate) {
      const float gate = a.gate_function.has_gate
                             ? gates[n][r] + bias_of(a.gate_bias, a.bias_dtype, item.expert, row)
                             : 0;
      const float up = ups[n][r] + bias_of(a.up_bias, a.bias_dtype, item.expert, row);
      static_cast<T*>(a.h)[item.pairs[n] * a.h_stride + row] =
          from_float<T>(apply(a.gate_function, gate, up));
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
  load_routing_weights<T>(plan, a);
  __syncthreads();
  const int row_blocks = (a.hidden + kRows - 1) / kRows;
  const T* h = static_cast<const T*>(a.h);
  for (int block = blockIdx.x; block < row_blocks; block += gridDim.x) {
    for (int entry = 0; entry < plan.num_entries; ++entry) {
      const Item item = item_of(plan, int64_t{entry} * row_blocks + block, row_blocks);
      multiply(a.down.expert<T>(item.expert), item, a.hidden, a.intermediate, h, a.h_stride, sums);
      const int n = threadIdx.x / kRows;
      const int row = item.row + threadIdx.x % kRows;
      if (n < item.count && row < a.hidden) {
        a.y[int64_t{item.pairs[n]} * a.hidden + row] = sums[n][threadIdx.x % kRows];
      }
      __syncthreads();
    }
    const int column = block * kRows + threadIdx.x % kRows;
    for (int t = threadIdx.x / kRows; t < a.num_tokens && column < a.hidden; t += kTokens) {
      combine_one<T>(a, plan, t, column, a.y + column, a.hidden);
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
  launch("batched_mm plain_up", plain_up<T>, grid, kThreads, shared, device.stream, Launch::kPlain,
         args);
  launch("batched_mm plain_down", plain_down<T>, grid, kThreads, shared, device.stream,
         Launch::kPlain, args);
}

}  // namespace

void decode_plain(DType dtype, const DecodeArgs& args, const DecodeDevice& device) {
  if (dtype == DType::kBF16) return run<__nv_bfloat16>(args, device);
  if (dtype == DType::kF16) return run<__half>(args, device);
  run<float>(args, device);
}

}  // namespace cadre::cuda

// The weighted sum of a token's expert rows: each row is read once, each token written once.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <type_traits>

#include "backends/cuda/kernels/launch.h"
#include "backends/cuda/kernels/routing.h"
#include "core/check.h"

namespace cadre::cuda {
namespace {

/// Passed to the kernel by value.
struct Rows {
  const void* y;
  const int32_t* row_of_pair;
  const void* weights;
  int64_t weight_stride;
  void* out;
  int64_t out_stride;
  int64_t hidden_size;
  int top_k;
  unsigned blocks_per_token;
  bool f32_weights;
};

template <typename Y>
__device__ float weight_at(const Rows& rows, int64_t index) {
  if (rows.f32_weights) return static_cast<const float*>(rows.weights)[index];
  return static_cast<float>(static_cast<const Y*>(rows.weights)[index]);
}

// kCount values as they lie in memory. Kept as words: the compiler would spread 16-bit elements
// over a register each.
template <typename T, int kCount>
struct Packed {
  static constexpr int kWords = sizeof(T) * kCount / 4;
  uint32_t words[kWords];

  __device__ void load(const T* from) {
    if constexpr (kWords == 4) {
      const uint4 v = __ldcs(reinterpret_cast<const uint4*>(from));
      words[0] = v.x, words[1] = v.y, words[2] = v.z, words[3] = v.w;
    }
  }
  __device__ float operator[](int i) const {
    if constexpr (sizeof(T) == 4) {
      return __uint_as_float(words[i]);
    } else if constexpr (std::is_same_v<T, __nv_bfloat16>) {
      return __uint_as_float(i % 2 == 0 ? words[i / 2] << 16 : words[i / 2] & 0xffff0000u);
    } else {
      return __half2float(__ushort_as_half(static_cast<uint16_t>(words[i / 2] >> (16 * (i % 2)))));
    }
  }
};

// One value, at any alignment of its type.
template <typename T>
struct Packed<T, 1> {
  T value;

  __device__ void load(const T* from) { value = *from; }
  __device__ float operator[](int) const { return static_cast<float>(value); }
};

// Writes kCount rounded values in one piece; `to` is aligned to all of them.
template <typename T, int kCount>
__device__ void store(T* to, const float (&values)[kCount]) {
  if constexpr (kCount == 1) {
    *to = static_cast<T>(values[0]);
  } else if constexpr (sizeof(T) == 4) {
#pragma unroll
    for (int i = 0; i < kCount; i += 4) {
      *reinterpret_cast<float4*>(to + i) =
          make_float4(values[i], values[i + 1], values[i + 2], values[i + 3]);
    }
  } else {
    uint32_t words[kCount / 2];
#pragma unroll
    for (int i = 0; i < kCount; i += 2) {
      const T low = static_cast<T>(values[i]);
      const T high = static_cast<T>(values[i + 1]);
      words[i / 2] = static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(low)) |
                     static_cast<uint32_t>(reinterpret_cast<const uint16_t&>(high)) << 16;
    }
    if constexpr (kCount == 8) {
      *reinterpret_cast<uint4*>(to) = make_uint4(words[0], words[1], words[2], words[3]);
    } else {
      *reinterpret_cast<uint2*>(to) = make_uint2(words[0], words[1]);
    }
  }
}

// One thread: kWide neighbouring columns of one token, kSlotsAtOnce rows in flight (few rows need
// more threads to fill the memory's pipe). Half is the dtype of weights that are not float32.
template <typename Y, typename Half, typename Out, int kWide, int kSlotsAtOnce>
__global__ void __launch_bounds__(256, kSlotsAtOnce <= 4 ? 6 : 4) combine_rows(Rows rows) {
  const int64_t token = blockIdx.x / rows.blocks_per_token;
  const unsigned block = blockIdx.x % rows.blocks_per_token;
  const int64_t column = (static_cast<int64_t>(block) * blockDim.x + threadIdx.x) * kWide;
  const int32_t* row_of_slot = rows.row_of_pair + token * rows.top_k;
  int row[kSlotsAtOnce];
  const auto read_rows = [&](int first) {
#pragma unroll
    for (int s = 0; s < kSlotsAtOnce; ++s) {
      row[s] = first + s < rows.top_k ? row_of_slot[first + s] : -1;
    }
  };
  read_rows(0);  // older than y
  wait_for_previous_kernel();
  let_next_kernel_start();
  if (column >= rows.hidden_size) return;
  float sum[kWide] = {};
  const auto* y = static_cast<const Y*>(rows.y) + column;
  for (int first = 0; first < rows.top_k; first += kSlotsAtOnce) {
    if (first != 0) read_rows(first);
    float weight[kSlotsAtOnce];
    Packed<Y, kWide> values[kSlotsAtOnce];
#pragma unroll
    for (int s = 0; s < kSlotsAtOnce; ++s) {
      if (row[s] >= 0) values[s].load(y + row[s] * rows.hidden_size);
    }
    // Behind the loads of y, which are many: ahead of them they cost a fifth of the time.
#pragma unroll
    for (int s = 0; s < kSlotsAtOnce; ++s) {
      if (row[s] >= 0) weight[s] = weight_at<Half>(rows, token * rows.weight_stride + first + s);
    }
#pragma unroll
    for (int s = 0; s < kSlotsAtOnce; ++s) {
      if (row[s] < 0) continue;
#pragma unroll
      for (int i = 0; i < kWide; ++i) sum[i] = fmaf(weight[s], values[s][i], sum[i]);
    }
  }
  store<Out, kWide>(static_cast<Out*>(rows.out) + token * rows.out_stride + column, sum);
}

template <typename Y, typename Half, typename Out, int kWide>
void launch_wide(Rows rows, int64_t num_tokens, cudaStream_t stream) {
  const int64_t vectors = (rows.hidden_size + kWide - 1) / kWide;
  const auto threads = static_cast<unsigned>(
      std::min<int64_t>(num_tokens <= 64 ? 64 : 256, (vectors + 31) / 32 * 32));
  rows.blocks_per_token = static_cast<unsigned>((vectors + threads - 1) / threads);
  const int64_t blocks = num_tokens * rows.blocks_per_token;
  CADRE_ASSERT(blocks <= 0x7fffffff);
  auto* kernel =
      rows.top_k <= 4 ? combine_rows<Y, Half, Out, kWide, 4> : combine_rows<Y, Half, Out, kWide, 8>;
  launch("combine_rows", kernel, dim3(static_cast<unsigned>(blocks)), dim3(threads), 0, stream,
         Launch::kDependent, rows);
}

template <typename Y, typename Half, typename Out>
void launch_as(const Rows& rows, int64_t num_tokens, cudaStream_t stream) {
  constexpr int kWide = 16 / sizeof(Y);
  constexpr int64_t kOutBytes = std::min<int64_t>(16, sizeof(Out) * kWide);
  const bool is_aligned = rows.hidden_size % kWide == 0 &&
                          reinterpret_cast<uintptr_t>(rows.y) % 16 == 0 &&
                          reinterpret_cast<uintptr_t>(rows.out) % kOutBytes == 0 &&
                          rows.out_stride * static_cast<int64_t>(sizeof(Out)) % kOutBytes == 0;
  if (is_aligned) {
    launch_wide<Y, Half, Out, kWide>(rows, num_tokens, stream);
  } else {
    launch_wide<Y, Half, Out, 1>(rows, num_tokens, stream);
  }
}

// `Half`: the 16-bit dtype among the call's tensors.
template <typename Half>
void launch_half(DType y, DType out, const Rows& rows, int64_t num_tokens, cudaStream_t stream) {
  if (y == DType::kF32) {
    if (out == DType::kF32) {
      launch_as<float, Half, float>(rows, num_tokens, stream);
    } else {
      launch_as<float, Half, Half>(rows, num_tokens, stream);
    }
  } else if (out == DType::kF32) {
    launch_as<Half, Half, float>(rows, num_tokens, stream);
  } else {
    launch_as<Half, Half, Half>(rows, num_tokens, stream);
  }
}

}  // namespace

void combine(const TensorView& y, const int32_t* row_of_pair, const TensorView& top_k_weights,
             MutableTensorView out, const Stream& stream) {
  const int64_t num_tokens = out.dim(0);
  CADRE_ASSERT(y.is_contiguous() && y.dim(1) == out.dim(1));
  CADRE_ASSERT(top_k_weights.dim(0) == num_tokens);
  if (num_tokens == 0) return;
  const Rows rows = {y.data(),
                     row_of_pair,
                     top_k_weights.data(),
                     top_k_weights.stride(0),
                     out.mutable_data(),
                     out.stride(0),
                     out.dim(1),
                     static_cast<int>(top_k_weights.dim(1)),
                     1,
                     top_k_weights.dtype() == DType::kF32};
  bool is_bf16 = false;
  for (const DType dtype : {y.dtype(), top_k_weights.dtype(), out.dtype()}) {
    CADRE_ASSERT(dtype == DType::kF32 || dtype == DType::kBF16 || dtype == DType::kF16);
    is_bf16 = is_bf16 || dtype == DType::kBF16;
  }
  if (is_bf16) {
    launch_half<__nv_bfloat16>(y.dtype(), out.dtype(), rows, num_tokens, stream_of(stream));
  } else {
    launch_half<__half>(y.dtype(), out.dtype(), rows, num_tokens, stream_of(stream));
  }
}

}  // namespace cadre::cuda

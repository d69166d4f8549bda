// Rotary positions, the way of fresh keys and values into the cache, and both together with the
// norms in one launch.
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/finish.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadThreads = 128;  // of finish_kernel: four heads a block

unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

__global__ void __launch_bounds__(kThreads)
    angles_kernel(const int32_t* positions, const float* inverse, float scale, DynamicNtk ntk,
                  int64_t count, int64_t half, float* cos_out, float* sin_out) {
  begin_short();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count * half) return;
  // Not the fast forms: angles go up to the longest context, and these reduce them exactly.
  const int32_t position = positions[index / half];
  const auto i = static_cast<float>(index % half);
  float frequency = inverse[index % half];
  if (ntk.context > 0 && position >= ntk.context) {
    const float growth =
        ntk.factor * static_cast<float>(position + 1) / static_cast<float>(ntk.context) -
        (ntk.factor - 1.0f);
    frequency *= powf(growth, -i / static_cast<float>(half - 1));
  }
  const float angle = static_cast<float>(position) * frequency;
  float sine;
  float cosine;
  sincosf(angle, &sine, &cosine);
  cos_out[index] = cosine * scale;
  sin_out[index] = sine * scale;
}

// A thread for each pair of neighbours.
__global__ void __launch_bounds__(kThreads)
    rope_pairs_kernel(void* x, DType dtype, const float* cos, const float* sin, float sign,
                      int64_t first, int64_t heads, int64_t head_dim, int64_t half, int64_t count) {
  begin_dependent();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count) return;
  const int64_t row = index / half;  // token and head
  const int64_t i = index % half;
  const int64_t angle = row / heads * half + i;
  const int64_t at = row * head_dim + first + 2 * i;
  const float a = load_one(x, dtype, at);
  const float b = load_one(x, dtype, at + 1);
  const float sine = sign * sin[angle];
  store_one(a * cos[angle] - b * sine, x, dtype, at);
  store_one(b * cos[angle] + a * sine, x, dtype, at + 1);
}

// kWidth neighbouring elements.
template <typename T, int kWidth>
struct alignas(kWidth * sizeof(T)) Few {
  T x[kWidth];
};

// A head in a warp's registers, kWidth elements at a time: those that rotate as pairs (i, i +
// half), then the rest.
template <typename T, int kWidth>
struct Head {
  static constexpr int kPairs = 4 / kWidth;  // of a lane: half is at most 128
  static constexpr int kRest = 8 / kWidth;   // of a lane: head_dim is at most 256

  float low[kPairs][kWidth];
  float high[kPairs][kWidth];
  float rest[kRest][kWidth];

  // Calls fn(values, first element) for each group of kWidth values that the lane has.
  template <typename Fn>
  __device__ void each(int head_dim, int half, const Fn& fn) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int j = 0; j < kPairs; ++j) {
      const int i = (lane + 32 * j) * kWidth;
      if (i < half) {
        fn(low[j], i);
        fn(high[j], i + half);
      }
    }
#pragma unroll
    for (int j = 0; j < kRest; ++j) {
      const int i = 2 * half + (lane + 32 * j) * kWidth;
      if (i < head_dim) fn(rest[j], i);
    }
  }
};

template <typename T, int kWidth>
__device__ void load_few(const void* data, DType dtype, int64_t i, float (&x)[kWidth]) {
  if (dtype == DType::kF32) {
    const auto few =
        *reinterpret_cast<const Few<float, kWidth>*>(static_cast<const float*>(data) + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = few.x[j];
  } else if (sizeof(T) == 2) {
    const auto few = *reinterpret_cast<const Few<T, kWidth>*>(static_cast<const T*>(data) + i);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = widen(few.x[j]);
  } else {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) x[j] = load_one(data, dtype, i + j);
  }
}

// One warp: norm (factor_of gives 1 / rms from the lane's sum of squares), clip, rotation, and out.
template <typename T, int kWidth, typename Factor>
__device__ void finish_head(const FinishArgs& args, const HeadArgs& part, int64_t token,
                            int64_t head, const Factor& factor_of) {
  using H = Head<T, kWidth>;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const auto dim = static_cast<int>(args.head_dim);
  const auto half = static_cast<int>(part.rotates ? args.half : 0);
  const T* x = static_cast<const T*>(part.x) + (token * part.heads + head) * args.head_dim;
  T* out = const_cast<T*>(x);
  if (part.cache != nullptr) {
    const int64_t row = (args.slots[token] * args.kv_heads + head) * args.max_tokens;
    out = static_cast<T*>(part.cache) + (row + args.positions[token]) * args.head_dim;
  }
  H values;
  values.each(dim, half, [&](float(&v)[kWidth], int i) { load_few<T>(x, args.dtype, i, v); });
  float cosine[H::kPairs][kWidth];
  float sine[H::kPairs][kWidth];
#pragma unroll
  for (int j = 0; j < H::kPairs; ++j) {
    const int i = (lane + 32 * j) * kWidth;
    if (i < half) {
      load_few<float>(args.cos, DType::kF32, token * half + i, cosine[j]);
      load_few<float>(args.sin, DType::kF32, token * half + i, sine[j]);
    }
  }
  if (part.weight != nullptr) {
    float sum = 0;
    H weights;
    values.each(dim, half, [&](float(&v)[kWidth], int) {
#pragma unroll
      for (int j = 0; j < kWidth; ++j) sum += v[j] * v[j];
    });
    weights.each(dim, half, [&](float(&v)[kWidth], int i) {
      load_few<T>(part.weight, part.weight_dtype, head * part.weight_stride + i, v);
    });
    const float factor = factor_of(sum);
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
#pragma unroll
      for (int p = 0; p < H::kPairs; ++p) {
        values.low[p][j] *= factor * weights.low[p][j];
        values.high[p][j] *= factor * weights.high[p][j];
      }
#pragma unroll
      for (int p = 0; p < H::kRest; ++p) values.rest[p][j] *= factor * weights.rest[p][j];
    }
  }
#pragma unroll
  for (int p = 0; p < H::kPairs; ++p) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) {
      const float a = clipped(args, values.low[p][j]);
      const float b = clipped(args, values.high[p][j]);
      values.low[p][j] = a * cosine[p][j] - b * sine[p][j];
      values.high[p][j] = b * cosine[p][j] + a * sine[p][j];
    }
  }
#pragma unroll
  for (int p = 0; p < H::kRest; ++p) {
#pragma unroll
    for (int j = 0; j < kWidth; ++j) values.rest[p][j] = clipped(args, values.rest[p][j]);
  }
  values.each(dim, half, [&](float(&v)[kWidth], int i) {
    Few<T, kWidth> few;
#pragma unroll
    for (int j = 0; j < kWidth; ++j) few.x[j] = narrow<T>(v[j]);
    *reinterpret_cast<Few<T, kWidth>*>(out + i) = few;
  });
}

// kLanes lanes for each head.
template <typename T, int kLanes>
__global__ void __launch_bounds__(kHeadThreads)
    finish_wide_kernel(const __grid_constant__ FinishArgs args) {
  begin_short();
  const auto all_heads =
      static_cast<uint32_t>(args.parts[0].heads + args.parts[1].heads + args.parts[2].heads);
  const uint32_t thread = blockIdx.x * kHeadThreads + threadIdx.x;
  const bool is_there = thread / kLanes < args.num_tokens * all_heads;
  const uint32_t index = is_there ? thread / kLanes : 0;
  const int lane = static_cast<int>(threadIdx.x) % kLanes;
  const int64_t token = index / all_heads;
  int64_t head = index % all_heads;
  int p = 0;
  while (head >= args.parts[p].heads) head -= args.parts[p++].heads;
  const HeadArgs& part = args.parts[p];
  T* out = static_cast<T*>(part.x) + (token * part.heads + head) * (8 * kLanes);
  if (part.cache != nullptr) {
    const int64_t row = (args.slots[token] * args.kv_heads + head) * args.max_tokens;
    out = static_cast<T*>(part.cache) + (row + args.positions[token]) * (8 * kLanes);
  }
  float x[8];
  finish_eight<kLanes>(args, part, token, head, lane, x);
  if (is_there) store_eight(x, out, args.dtype, 8 * lane);
}

// A warp for each head.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kHeadThreads)
    finish_heads_kernel(const __grid_constant__ FinishArgs args) {
  begin_short();
  const int64_t all_heads = args.parts[0].heads + args.parts[1].heads + args.parts[2].heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kHeadThreads / 32) + threadIdx.x / 32;
  const int64_t token = index / all_heads;
  if (token >= args.num_tokens) return;
  int64_t head = index % all_heads;
  int p = 0;
  while (head >= args.parts[p].heads) head -= args.parts[p++].heads;
  finish_head<T, kWidth>(args, args.parts[p], token, head, [&](float sum) {
    return 1.0f / sqrtf(warp_sum(sum) / static_cast<float>(args.head_dim) + args.eps);
  });
}

// A block for each token and part: norms over all heads of a token.
template <typename T, int kWidth>
__global__ void __launch_bounds__(kThreads)
    finish_rows_kernel(const __grid_constant__ FinishArgs args) {
  begin_dependent();
  const int64_t token = blockIdx.x;
  const HeadArgs& part = args.parts[blockIdx.y];
  const int64_t width = part.heads * args.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __shared__ float sums[kThreads / 32];
  float factor = 1;
  if (part.weight != nullptr) {
    const T* x = static_cast<const T*>(part.x) + token * width;
    float sum = 0;
    for (int64_t i = threadIdx.x; i < width; i += kThreads) {
      const float value = widen(x[i]);
      sum += value * value;
    }
    sum = warp_sum(sum);
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
    __syncthreads();
    float total = 0;
    for (const float s : sums) total += s;
    factor = 1.0f / sqrtf(total / static_cast<float>(width) + args.eps);
  }
  for (int64_t head = warp; head < part.heads; head += kThreads / 32) {
    finish_head<T, kWidth>(args, part, token, head, [factor](float) { return factor; });
  }
}

template <typename T, int kWidth>
void finish(const FinishArgs& args, bool whole_rows, const Stream& stream) {
  const Launch mode = dependent_launch(stream);
  if (whole_rows) {
    launch("finish_rows_kernel", finish_rows_kernel<T, kWidth>,
           dim3(static_cast<unsigned>(args.num_tokens), 3), kThreads, 0, stream_of(stream), mode,
           args);
    return;
  }
  const int64_t heads = args.parts[0].heads + args.parts[1].heads + args.parts[2].heads;
  launch("finish_heads_kernel", finish_heads_kernel<T, kWidth>,
         blocks_for(args.num_tokens * heads, kHeadThreads / 32), kHeadThreads, 0, stream_of(stream),
         mode, args);
}

template <typename T, int kLanes>
void finish_wide(const FinishArgs& args, const Stream& stream) {
  const int64_t heads = args.parts[0].heads + args.parts[1].heads + args.parts[2].heads;
  launch("finish_wide_kernel", finish_wide_kernel<T, kLanes>,
         blocks_for(args.num_tokens * heads * kLanes, kHeadThreads), kHeadThreads, 0,
         stream_of(stream), dependent_launch(stream), args);
}

// Two elements at a time where everything is even and aligned for it.
template <typename T>
void finish(const FinishArgs& args, bool whole_rows, const Stream& stream) {
  if (args.num_tokens == 0) return;
  if constexpr (sizeof(T) == 2) {
    const bool wide = !whole_rows && fits_wide(args);
    if (wide && args.head_dim == 64) return finish_wide<T, 8>(args, stream);
    if (wide && args.head_dim == 128) return finish_wide<T, 16>(args, stream);
    if (wide && args.head_dim == 256) return finish_wide<T, 32>(args, stream);
  }
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 8 == 0; };
  bool twos =
      args.head_dim % 2 == 0 && args.half % 2 == 0 && aligned(args.cos) && aligned(args.sin);
  for (const HeadArgs& part : args.parts) {
    twos = twos && aligned(part.x) && aligned(part.cache) && aligned(part.weight);
  }
  if (twos) return finish<T, 2>(args, whole_rows, stream);
  finish<T, 1>(args, whole_rows, stream);
}

void finish(const FinishArgs& args, bool whole_rows, const Stream& stream) {
  CADRE_ASSERT(args.head_dim <= 256);
  if (args.dtype == DType::kF32) return finish<float>(args, whole_rows, stream);
  if (args.dtype == DType::kBF16) return finish<__nv_bfloat16>(args, whole_rows, stream);
  CADRE_ASSERT(args.dtype == DType::kF16);
  finish<__half>(args, whole_rows, stream);
}

HeadArgs head_args(const MutableTensorView& x) {
  return {x.mutable_data(), nullptr, DType::kF32, 0, x.dim(1), false, nullptr};
}

void set_angles(FinishArgs& args, const TensorView& cos, const TensorView& sin) {
  args.half = cos.dim(1);
  args.cos = cos.as<float>();
  args.sin = sin.as<float>();
  CADRE_ASSERT(2 * args.half <= args.head_dim && cos.dim(0) == args.num_tokens);
}

void set_cache(FinishArgs& args, const StepTokens& tokens, const MutableTensorView& cache) {
  args.slots = tokens.slots.as<int32_t>();
  args.positions = tokens.positions.as<int32_t>();
  args.kv_heads = cache.dim(1);
  args.max_tokens = cache.dim(2);
  CADRE_ASSERT(cache.dtype() == args.dtype && cache.dim(3) == args.head_dim &&
               tokens.num_tokens() == args.num_tokens);
}

FinishArgs finish_args(const MutableTensorView& x) {
  FinishArgs args = {};
  args.dtype = x.dtype();
  args.num_tokens = x.dim(0);
  args.head_dim = x.dim(2);
  return args;
}

void angles(const TensorView& positions, const TensorView& inverse_frequencies, float scale,
            const DynamicNtk& ntk, const MutableTensorView& cos, const MutableTensorView& sin,
            const Stream& stream) {
  const int64_t half = inverse_frequencies.dim(0);
  const int64_t count = positions.dim(0);
  CADRE_ASSERT(cos.numel() == count * half && sin.numel() == count * half);
  if (count * half == 0) return;
  launch("angles_kernel", angles_kernel, blocks_for(count * half, kThreads), kThreads, 0,
         stream_of(stream), dependent_launch(stream), positions.as<int32_t>(),
         inverse_frequencies.as<float>(), scale, ntk, count, half, cos.as<float>(),
         sin.as<float>());
}

}  // namespace

void CudaDenseOps::rope_angles(const TensorView& positions, const TensorView& inverse_frequencies,
                               float scale, MutableTensorView cos, MutableTensorView sin,
                               const Stream& stream) {
  angles(positions, inverse_frequencies, scale, {}, cos, sin, stream);
}

void CudaDenseOps::dynamic_rope_angles(const TensorView& positions,
                                       const TensorView& inverse_frequencies, const DynamicNtk& ntk,
                                       MutableTensorView cos, MutableTensorView sin,
                                       const Stream& stream) {
  CADRE_ASSERT(inverse_frequencies.dim(0) > 1 && ntk.context > 0);
  angles(positions, inverse_frequencies, 1.0f, ntk, cos, sin, stream);
}

void CudaDenseOps::rope(MutableTensorView x, const TensorView& cos, const TensorView& sin,
                        const Stream& stream) {
  FinishArgs args = finish_args(x);
  set_angles(args, cos, sin);
  args.parts[0] = head_args(x);
  args.parts[0].rotates = true;
  finish(args, false, stream);
}

void CudaDenseOps::rope_pairs(MutableTensorView x, int64_t first, const TensorView& cos,
                              const TensorView& sin, bool inverse, const Stream& stream) {
  const int64_t half = cos.dim(1);
  const int64_t count = x.dim(0) * x.dim(1) * half;
  CADRE_ASSERT(first >= 0 && first + 2 * half <= x.dim(2) && cos.dim(0) == x.dim(0));
  if (count == 0) return;
  launch("rope_pairs_kernel", rope_pairs_kernel, blocks_for(count, kThreads), kThreads, 0,
         stream_of(stream), dependent_launch(stream), x.mutable_data(), x.dtype(), cos.as<float>(),
         sin.as<float>(), inverse ? -1.0f : 1.0f, first, x.dim(1), x.dim(2), half, count);
}

void CudaDenseOps::store_kv(const TensorView& x, const StepTokens& tokens, MutableTensorView cache,
                            const Stream& stream) {
  const MutableTensorView fresh(const_cast<void*>(x.data()), x.dtype(), x.shape(), x.device());
  FinishArgs args = finish_args(fresh);
  CADRE_ASSERT(x.dim(1) == cache.dim(1));
  set_cache(args, tokens, cache);
  args.parts[0] = head_args(fresh);
  args.parts[0].cache = cache.mutable_data();
  finish(args, false, stream);
}

FinishArgs finish_args(const QkvArgs& qkv) {
  FinishArgs args = finish_args(qkv.q);
  CADRE_ASSERT(qkv.k.dim(1) == qkv.keys.dim(1) && qkv.values.shape() == qkv.keys.shape());
  set_angles(args, qkv.cos, qkv.sin);
  set_cache(args, qkv.tokens, qkv.keys);
  args.eps = qkv.norm_eps;
  args.clips = qkv.clip.has_value();
  args.limit = qkv.clip.value_or(0);
  HeadArgs& q = args.parts[0] = head_args(qkv.q);
  HeadArgs& k = args.parts[1] = head_args(qkv.k);
  HeadArgs& v = args.parts[2] = head_args(qkv.v);
  q.rotates = k.rotates = true;
  k.cache = qkv.keys.mutable_data();
  v.cache = qkv.values.mutable_data();
  if (qkv.qk_norm == QkNorm::kNone) return args;
  const bool per_head = qkv.qk_norm == QkNorm::kPerHead;
  for (const auto& [part, weight] : {std::pair{&q, &qkv.q_norm}, {&k, &qkv.k_norm}}) {
    part->weight = weight->data();
    part->weight_dtype = weight->dtype();
    part->weight_stride = per_head ? 0 : args.head_dim;
    CADRE_ASSERT(weight->numel() == args.head_dim * (per_head ? 1 : part->heads) &&
                 (weight->dtype() == args.dtype || weight->dtype() == DType::kF32));
  }
  return args;
}

bool fits_wide(const FinishArgs& args) {
  const auto aligned = [](const void* p) { return reinterpret_cast<uintptr_t>(p) % 16 == 0; };
  const int64_t heads = args.parts[0].heads + args.parts[1].heads + args.parts[2].heads;
  bool fits = args.dtype != DType::kF32 && aligned(args.cos) && aligned(args.sin) &&
              args.num_tokens * heads * 32 < INT32_MAX;
  for (const HeadArgs& part : args.parts) {
    fits = fits && aligned(part.x) && aligned(part.cache) && aligned(part.weight) &&
           (!part.rotates || 2 * args.half == args.head_dim);
  }
  return fits;
}

void CudaDenseOps::finish_qkv(const QkvArgs& qkv, const Stream& stream) {
  finish(finish_args(qkv), qkv.qk_norm == QkNorm::kWholeProjection, stream);
}

}  // namespace cadre::cuda

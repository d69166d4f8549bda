// Rotary positions, the way of fresh keys and values into the cache, and both together with the
// norms in one launch.
#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kHeadThreads = 128;  // of finish_kernel: four heads a block

unsigned blocks_for(int64_t count, int64_t per_block) {
  return static_cast<unsigned>((count + per_block - 1) / per_block);
}

__global__ void __launch_bounds__(kThreads)
    angles_kernel(const int32_t* positions, const float* inverse, float scale, int64_t count,
                  int64_t half, float* cos_out, float* sin_out) {
  begin_dependent();
  const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
  if (index >= count * half) return;
  // Not the fast forms: angles go up to the longest context, and these reduce them exactly.
  const float angle = static_cast<float>(positions[index / half]) * inverse[index % half];
  float sine;
  float cosine;
  sincosf(angle, &sine, &cosine);
  cos_out[index] = cosine * scale;
  sin_out[index] = sine * scale;
}

// What happens to a head of q, k or v.
struct HeadArgs {
  void* x;             // [num_tokens, heads, head_dim]
  const void* weight;  // norm weight; null: no norm
  DType weight_dtype;
  int64_t weight_stride;  // elements from one head's weights to the next's
  int64_t heads;
  bool rotates;
  void* cache;  // null: in place
};

struct FinishArgs {
  HeadArgs parts[3];  // those with 0 heads are left out
  DType dtype;
  int64_t num_tokens;
  int64_t head_dim;
  int64_t half;
  const float* cos;
  const float* sin;
  float eps;
  bool clips;
  float limit;
  const int32_t* slots;
  const int32_t* positions;
  int64_t kv_heads;    // of the caches
  int64_t max_tokens;  // of the caches
};

__device__ float clipped(const FinishArgs& args, float x) {
  if (!args.clips) return x;
  return x < -args.limit ? -args.limit : (x > args.limit ? args.limit : x);  // keeps NaN
}

template <typename T>
__device__ float sum_of_squares(const T* x, int64_t count, int first, int step) {
  float sum = 0;
  for (int64_t i = first; i < count; i += step) {
    const float value = widen(x[i]);
    sum += value * value;
  }
  return sum;
}

// One warp. `factor`: of the norm; 1 without.
template <typename T>
__device__ void finish_head(const FinishArgs& args, const HeadArgs& part, int64_t token,
                            int64_t head, float factor) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const T* x = static_cast<const T*>(part.x) + (token * part.heads + head) * args.head_dim;
  T* out = const_cast<T*>(x);
  if (part.cache != nullptr) {
    const int64_t row = (args.slots[token] * args.kv_heads + head) * args.max_tokens;
    out = static_cast<T*>(part.cache) + (row + args.positions[token]) * args.head_dim;
  }
  const auto value = [&](int64_t i) {
    float result = widen(x[i]);
    if (part.weight != nullptr) {
      result *= factor * load_one(part.weight, part.weight_dtype, head * part.weight_stride + i);
    }
    return clipped(args, result);
  };
  const int64_t half = part.rotates ? args.half : 0;
  for (int64_t i = lane; i < half; i += 32) {
    const float a = value(i);
    const float b = value(i + half);
    const float c = args.cos[token * half + i];
    const float s = args.sin[token * half + i];
    out[i] = narrow<T>(a * c - b * s);
    out[i + half] = narrow<T>(b * c + a * s);
  }
  if (part.cache == nullptr && part.weight == nullptr && !args.clips) return;  // the rest stays
  for (int64_t i = 2 * half + lane; i < args.head_dim; i += 32) out[i] = narrow<T>(value(i));
}

// A warp for each head.
template <typename T>
__global__ void __launch_bounds__(kHeadThreads) finish_heads_kernel(FinishArgs args) {
  begin_dependent();
  const int64_t all_heads = args.parts[0].heads + args.parts[1].heads + args.parts[2].heads;
  const int64_t index = static_cast<int64_t>(blockIdx.x) * (kHeadThreads / 32) + threadIdx.x / 32;
  const int64_t token = index / all_heads;
  if (token >= args.num_tokens) return;
  int64_t head = index % all_heads;
  int p = 0;
  while (head >= args.parts[p].heads) head -= args.parts[p++].heads;
  const HeadArgs& part = args.parts[p];
  float factor = 1;
  if (part.weight != nullptr) {
    const T* x = static_cast<const T*>(part.x) + (token * part.heads + head) * args.head_dim;
    const float sum =
        warp_sum(sum_of_squares(x, args.head_dim, static_cast<int>(threadIdx.x) % 32, 32));
    factor = 1.0f / sqrtf(sum / static_cast<float>(args.head_dim) + args.eps);
  }
  finish_head<T>(args, part, token, head, factor);
}

// A block for each token and part: norms over all heads of a token.
template <typename T>
__global__ void __launch_bounds__(kThreads) finish_rows_kernel(FinishArgs args) {
  begin_dependent();
  const int64_t token = blockIdx.x;
  const HeadArgs& part = args.parts[blockIdx.y];
  const int64_t width = part.heads * args.head_dim;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  __shared__ float sums[kThreads / 32];
  float factor = 1;
  if (part.weight != nullptr) {
    const T* x = static_cast<const T*>(part.x) + token * width;
    const float sum = warp_sum(sum_of_squares(x, width, static_cast<int>(threadIdx.x), kThreads));
    if (threadIdx.x % 32 == 0) sums[warp] = sum;
    __syncthreads();
    float total = 0;
    for (const float s : sums) total += s;
    factor = 1.0f / sqrtf(total / static_cast<float>(width) + args.eps);
  }
  for (int64_t head = warp; head < part.heads; head += kThreads / 32) {
    finish_head<T>(args, part, token, head, factor);
  }
}

template <typename T>
void finish(const FinishArgs& args, bool whole_rows, const Stream& stream) {
  if (args.num_tokens == 0) return;
  const Launch mode = dependent_launch(stream);
  if (whole_rows) {
    launch("finish_rows_kernel", finish_rows_kernel<T>,
           dim3(static_cast<unsigned>(args.num_tokens), 3), kThreads, 0, stream_of(stream), mode,
           args);
    return;
  }
  const int64_t heads = args.parts[0].heads + args.parts[1].heads + args.parts[2].heads;
  launch("finish_heads_kernel", finish_heads_kernel<T>,
         blocks_for(args.num_tokens * heads, kHeadThreads / 32), kHeadThreads, 0, stream_of(stream),
         mode, args);
}

void finish(const FinishArgs& args, bool whole_rows, const Stream& stream) {
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

}  // namespace

void CudaDenseOps::rope_angles(const TensorView& positions, const TensorView& inverse_frequencies,
                               float scale, MutableTensorView cos, MutableTensorView sin,
                               const Stream& stream) {
  const int64_t half = inverse_frequencies.dim(0);
  const int64_t count = positions.dim(0);
  CADRE_ASSERT(cos.numel() == count * half && sin.numel() == count * half);
  if (count * half == 0) return;
  launch("angles_kernel", angles_kernel, blocks_for(count * half, kThreads), kThreads, 0,
         stream_of(stream), dependent_launch(stream), positions.as<int32_t>(),
         inverse_frequencies.as<float>(), scale, count, half, cos.as<float>(), sin.as<float>());
}

void CudaDenseOps::rope(MutableTensorView x, const TensorView& cos, const TensorView& sin,
                        const Stream& stream) {
  FinishArgs args = finish_args(x);
  set_angles(args, cos, sin);
  args.parts[0] = head_args(x);
  args.parts[0].rotates = true;
  finish(args, false, stream);
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

void CudaDenseOps::finish_qkv(const QkvArgs& qkv, const Stream& stream) {
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
  if (qkv.qk_norm != QkNorm::kNone) {
    const bool per_head = qkv.qk_norm == QkNorm::kPerHead;
    for (const auto& [part, weight] : {std::pair{&q, &qkv.q_norm}, {&k, &qkv.k_norm}}) {
      part->weight = weight->data();
      part->weight_dtype = weight->dtype();
      part->weight_stride = per_head ? 0 : args.head_dim;
      CADRE_ASSERT(weight->numel() == args.head_dim * (per_head ? 1 : part->heads));
    }
  }
  finish(args, qkv.qk_norm == QkNorm::kWholeProjection, stream);
}

}  // namespace cadre::cuda

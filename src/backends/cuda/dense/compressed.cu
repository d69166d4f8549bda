// Compressed attention (DeepSeek-V4): rings of the latest rows, the entries that tokens close, the
// indexer's picks, and attention over a window and entries. Plain kernels: a block for each token.
#include <algorithm>

#include "backends/cuda/dense/cuda_dense_ops.h"
#include "backends/cuda/dense/values.cuh"
#include "core/check.h"
#include "dense/compressed_ops.h"

namespace cadre::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;
constexpr float kMinusInfinity = -__builtin_huge_valf();
constexpr float kLog2E = 1.44269504f;

// A new token and its sequence.
struct Place {
  int64_t slot;
  int64_t first_row;  // of the sequence's new tokens
  int64_t num_tokens;
  int64_t past;
  int64_t position;  // of the token
};

struct Tokens {
  const int32_t* spans;  // [num_sequences, 4]
  int32_t num_sequences;
};

__device__ Place place_of(const Tokens& tokens, int64_t row) {
  int32_t s = 0;
  while (row >= tokens.spans[4 * s + 1] + tokens.spans[4 * s + 2]) ++s;
  const int32_t* span = tokens.spans + 4 * s;
  return {span[0], span[1], span[2], span[3], span[3] + row - span[1]};
}

Tokens tokens_of(const StepTokens& tokens) {
  return {tokens.spans.as<int32_t>(), static_cast<int32_t>(tokens.spans.dim(0))};
}

// Of all threads; every thread gets it.
__device__ float block_sum(float x) {
  __shared__ float sums[kWarps];
  x = warp_sum(x);
  __syncthreads();
  if (threadIdx.x % 32 == 0) sums[threadIdx.x / 32] = x;
  __syncthreads();
  float total = 0;
  for (const float s : sums) total += s;
  return total;
}

// Rows by position: the new ones, or those of a ring.
struct RingRows {
  const void* fresh;  // [num_tokens, width]
  const void* ring;   // [num_slots, 1, rows, width]
  DType dtype;
  int64_t rows;
  int64_t width;

  __device__ float load(const Place& place, int64_t position, int64_t column) const {
    if (position >= place.past) {
      const int64_t row = place.first_row + position - place.past;
      return load_one(fresh, dtype, row * width + column);
    }
    return load_one(ring, dtype, (place.slot * rows + position % rows) * width + column);
  }
};

RingRows ring_rows(const TensorView& fresh, const TensorView& ring) {
  CADRE_ASSERT(fresh.dtype() == ring.dtype());
  return {fresh.data(), ring.data(), fresh.dtype(), ring.dim(2), ring.dim(3)};
}

// ---- Rings ----

__global__ void __launch_bounds__(kThreads)
    store_ring_kernel(const uint16_t* x, Tokens tokens, uint16_t* ring, int64_t rows,
                      int64_t halves) {  // a row's 16-bit words
  begin_dependent();
  const int64_t row = blockIdx.x;
  const Place place = place_of(tokens, row);
  if (row + rows < place.first_row + place.num_tokens) return;  // another token follows there
  uint16_t* to = ring + (place.slot * rows + place.position % rows) * halves;
  for (int64_t i = threadIdx.x; i < halves; i += kThreads) to[i] = x[row * halves + i];
}

// ---- Entries ----

struct CompressCall {
  RingRows values;
  RingRows gates;
  const void* bias;  // [rate, series * width]
  DType bias_dtype;
  const void* norm;
  DType norm_dtype;
  float eps;
  const float* inverse;
  int64_t half;
  float rope_scale;
  Tokens tokens;
  void* entries;
  DType dtype;
  int64_t rows;  // of the entries' cache
  int64_t rate;
  int64_t width;
  int64_t series;
};

// One channel of the entry that ends at place.position.
__device__ float mix_channel(const CompressCall& call, const Place& place, int64_t channel) {
  const int64_t first = place.position + 1 - call.rate;
  const int64_t begin = call.series == 2 && first > 0 ? -call.rate : 0;
  const auto column = [&](int64_t row) {
    return row < 0 ? channel : (call.series - 1) * call.width + channel;
  };
  const auto gate = [&](int64_t row) {
    const int64_t bias = (row < 0 ? row + call.rate : row) * call.series * call.width;
    return call.gates.load(place, first + row, column(row)) +
           load_one(call.bias, call.bias_dtype, bias + column(row));
  };
  float max = kMinusInfinity;
  for (int64_t row = begin; row < call.rate; ++row) max = fmaxf(max, gate(row));
  float sum = 0;
  float mixed = 0;
  for (int64_t row = begin; row < call.rate; ++row) {
    const float weight = expf(gate(row) - max);
    sum += weight;
    mixed += weight * call.values.load(place, first + row, column(row));
  }
  return mixed / sum;
}

__global__ void __launch_bounds__(kThreads)
    compress_kernel(const __grid_constant__ CompressCall call) {
  extern __shared__ float entry[];  // [width]
  begin_dependent();
  const Place place = place_of(call.tokens, blockIdx.x);
  if ((place.position + 1) % call.rate != 0) return;
  float squares = 0;
  for (int64_t c = threadIdx.x; c < call.width; c += kThreads) {
    entry[c] = mix_channel(call, place, c);
    squares += entry[c] * entry[c];
  }
  const float factor = 1.0f / sqrtf(block_sum(squares) / static_cast<float>(call.width) + call.eps);
  for (int64_t c = threadIdx.x; c < call.width; c += kThreads) {
    entry[c] *= factor * load_one(call.norm, call.norm_dtype, c);
  }
  __syncthreads();
  const int64_t number = place.position / call.rate;
  const int64_t to = (place.slot * call.rows + number) * call.width;
  const int64_t turned = call.width - 2 * call.half;  // what is behind it rotates
  for (int64_t c = threadIdx.x; c < turned; c += kThreads) {
    store_one(entry[c], call.entries, call.dtype, to + c);
  }
  for (int64_t i = threadIdx.x; i < call.half; i += kThreads) {
    float sine;
    float cosine;
    sincosf(static_cast<float>(number * call.rate) * call.inverse[i], &sine, &cosine);
    sine *= call.rope_scale;
    cosine *= call.rope_scale;
    const float a = entry[turned + 2 * i];
    const float b = entry[turned + 2 * i + 1];
    store_one(a * cosine - b * sine, call.entries, call.dtype, to + turned + 2 * i);
    store_one(b * cosine + a * sine, call.entries, call.dtype, to + turned + 2 * i + 1);
  }
}

// ---- The indexer ----

constexpr int64_t kMaxScores = int64_t{8} << 20;  // at a time
constexpr int kPickThreads = 1024;

struct PickCall {
  const void* queries;  // [num_tokens, heads, width]
  const float* weights;
  float weight_scale;
  const void* keys;  // [num_slots, 1, rows, width]
  DType dtype;
  int64_t heads;
  int64_t width;
  int64_t rows;
  int64_t rate;
  const int32_t* slots;
  const int32_t* positions;
  int64_t first_token;  // of this launch
  int32_t* picks;       // [num_tokens, k]
  int64_t k;
  uint32_t* scores;  // [tokens of a launch, rows]: keys of scores, ordered as they are

  __device__ int64_t num_closed(int64_t token) const { return (positions[token] + 1) / rate; }
};

// Grid: (entries, tokens); a warp for each entry.
__global__ void __launch_bounds__(kThreads)
    score_entries_kernel(const __grid_constant__ PickCall call) {
  extern __shared__ float queries[];  // [heads, width]
  begin_dependent();
  const int64_t token = call.first_token + blockIdx.y;
  const int64_t closed = call.num_closed(token);
  if (closed <= call.k || static_cast<int64_t>(blockIdx.x) * kWarps >= closed) return;
  const int64_t count = call.heads * call.width;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) {
    queries[i] = load_one(call.queries, call.dtype, token * count + i);
  }
  __syncthreads();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t entry = static_cast<int64_t>(blockIdx.x) * kWarps + threadIdx.x / 32;
  if (entry >= closed) return;
  const int64_t row = (call.slots[token] * call.rows + entry) * call.width;
  float total = 0;
  for (int64_t h = 0; h < call.heads; ++h) {
    float sum = 0;
    for (int64_t d = lane; d < call.width; d += 32) {
      sum += queries[h * call.width + d] * load_one(call.keys, call.dtype, row + d);
    }
    sum = warp_sum(sum);
    total += (sum < 0 ? 0.0f : sum) *
             (call.weights[token * call.heads + h] * call.weight_scale);  // keeps NaN
  }
  if (lane == 0) {
    call.scores[blockIdx.y * call.rows + entry] = key_of(isnan(total) ? kMinusInfinity : total);
  }
}

// The largest key that at least `count` of the scores reach, digit by digit; `above` becomes how
// many are above it.
__device__ uint32_t kth_key(const uint32_t* scores, int64_t size, int64_t count, int64_t& above) {
  __shared__ uint32_t bins[256];
  __shared__ uint32_t chosen[2];
  uint32_t prefix = 0;
  above = 0;
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < 256) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < size; i += kPickThreads) {
      const uint32_t key = scores[i];
      if (shift == 24 || key >> (shift + 8) == prefix >> (shift + 8)) {
        atomicAdd(&bins[key >> shift & 255u], 1u);
      }
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      auto sum = static_cast<uint32_t>(above);
      int digit = 255;
      while (digit > 0 && sum + bins[digit] < count) sum += bins[digit--];
      chosen[0] = static_cast<uint32_t>(digit);
      chosen[1] = sum;
    }
    __syncthreads();
    prefix |= chosen[0] << shift;
    above = chosen[1];
  }
  return prefix;
}

// Sum of one value over the threads before this one.
__device__ int32_t sum_before(int32_t value, int32_t* shared, int32_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  int32_t sum = value;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const int32_t other = __shfl_up_sync(~0u, sum, step);
    if (lane >= step) sum += other;
  }
  __syncthreads();
  if (lane == 31) shared[threadIdx.x / 32] = sum;
  __syncthreads();
  int32_t before = 0;
  total = 0;
  for (int w = 0; w < kPickThreads / 32; ++w) {
    if (w == static_cast<int>(threadIdx.x) / 32) before = total;
    total += shared[w];
  }
  return before + sum - value;
}

// A block for each token: those above the k-th score, and of its equals the first ones, in order.
__global__ void __launch_bounds__(kPickThreads)
    pick_entries_kernel(const __grid_constant__ PickCall call) {
  __shared__ int32_t shared[kPickThreads / 32];
  begin_dependent();
  const int64_t token = call.first_token + blockIdx.x;
  int32_t* picks = call.picks + token * call.k;
  const int64_t closed = call.num_closed(token);
  if (closed <= call.k) {
    for (int64_t i = threadIdx.x; i < call.k; i += kPickThreads) {
      picks[i] = i < closed ? static_cast<int32_t>(i) : -1;
    }
    return;
  }
  const uint32_t* scores = call.scores + blockIdx.x * call.rows;
  int64_t above = 0;
  const uint32_t least = kth_key(scores, closed, call.k, above);
  const int64_t equals = call.k - above;  // that are picked
  int64_t picked = 0;
  int64_t seen = 0;  // equals
  for (int64_t base = 0; base < closed; base += kPickThreads) {
    const int64_t i = base + threadIdx.x;
    const uint32_t key = i < closed ? scores[i] : 0;
    const bool is_equal = i < closed && key == least;
    int32_t all_equals = 0;
    const int32_t equals_before = sum_before(is_equal, shared, all_equals);
    const bool takes = i < closed && (key > least || (is_equal && seen + equals_before < equals));
    int32_t all = 0;
    const int32_t before = sum_before(takes, shared, all);
    if (takes) picks[picked + before] = static_cast<int32_t>(i);
    picked += all;
    seen += all_equals;
  }
}

// ---- Attention ----

constexpr int kMaxDim = 1024;

struct SharedKvCall {
  const void* q;
  RingRows kv;
  int64_t window;
  const void* entries;  // null: none
  int64_t entry_rows;
  int64_t rate;
  const int32_t* picks;  // null: all closed ones
  int64_t num_picks;
  const void* sinks;
  DType sinks_dtype;
  float scale;
  Tokens tokens;
  void* out;
  DType dtype;
  int64_t heads;
  int64_t dim;
};

// A warp's running softmax over rows, lanes having every 32nd element.
struct SharedKvState {
  static constexpr int kOwn = kMaxDim / 32;

  float max;
  float divisor;
  float acc[kOwn];

  template <typename Load>
  __device__ void add(const SharedKvCall& call, const float* query, const Load& load) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float values[kOwn];
    float score = 0;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) {
      const int d = lane + 32 * i;
      values[i] = d < call.dim ? load(d) : 0.0f;
      if (d < call.dim) score += values[i] * query[d];
    }
    score = warp_sum(score) * (call.scale * kLog2E);
    const float new_max = fmaxf(max, score);
    const float base = new_max == kMinusInfinity ? 0.0f : new_max;
    const float factor = exp2f(max - base);
    const float weight = exp2f(score - base);
    max = new_max;
    divisor = divisor * factor + weight;
#pragma unroll
    for (int i = 0; i < kOwn; ++i) acc[i] = acc[i] * factor + weight * values[i];
  }
};

// Grid: (heads, tokens); warps take rows in turns.
__global__ void __launch_bounds__(kThreads)
    shared_kv_kernel(const __grid_constant__ SharedKvCall call) {
  __shared__ float query[kMaxDim];
  __shared__ float sums[kWarps][kMaxDim];
  __shared__ float maxima[kWarps];
  __shared__ float divisors[kWarps];
  begin_dependent();
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int64_t token = blockIdx.y;
  const int64_t head = blockIdx.x;
  const int64_t offset = (token * call.heads + head) * call.dim;
  for (int64_t d = threadIdx.x; d < call.dim; d += kThreads) {
    query[d] = load_one(call.q, call.dtype, offset + d);
  }
  __syncthreads();
  const Place place = place_of(call.tokens, token);
  SharedKvState state = {};
  state.max = kMinusInfinity;
  if (warp == 0) {  // a sink is a row that has come first and adds nothing
    state.max = load_one(call.sinks, call.sinks_dtype, head) * kLog2E;
    state.divisor = 1;
  }
  const int64_t first = max(int64_t{0}, place.position + 1 - call.window);
  for (int64_t p = first + warp; p <= place.position; p += kWarps) {
    state.add(call, query, [&](int d) { return call.kv.load(place, p, d); });
  }
  if (call.entries != nullptr) {
    const int64_t closed = (place.position + 1) / call.rate;
    const int64_t most = call.picks != nullptr ? call.num_picks : closed;
    for (int64_t i = warp; i < most; i += kWarps) {
      const int64_t entry = call.picks != nullptr ? call.picks[token * most + i] : i;
      if (entry < 0) break;
      const int64_t row = (place.slot * call.entry_rows + entry) * call.dim;
      state.add(call, query, [&](int d) { return load_one(call.entries, call.dtype, row + d); });
    }
  }
#pragma unroll
  for (int i = 0; i < SharedKvState::kOwn; ++i) sums[warp][lane + 32 * i] = state.acc[i];
  if (lane == 0) {
    maxima[warp] = state.max;
    divisors[warp] = state.divisor;
  }
  __syncthreads();
  float all_max = kMinusInfinity;
  for (const float m : maxima) all_max = fmaxf(all_max, m);
  const float base = all_max == kMinusInfinity ? 0.0f : all_max;
  for (int64_t d = threadIdx.x; d < call.dim; d += kThreads) {
    float sum = 0;
    float total = 0;
    for (int w = 0; w < kWarps; ++w) {
      const float factor = exp2f(maxima[w] - base);
      sum += factor * sums[w][d];
      total += factor * divisors[w];
    }
    store_one(sum / total, call.out, call.dtype, offset + d);
  }
}

}  // namespace

void CudaDenseOps::store_ring(const TensorView& x, const StepTokens& tokens, MutableTensorView ring,
                              const Stream& stream) {
  const int64_t width = ring.dim(3);
  CADRE_ASSERT(x.dtype() == ring.dtype() && x.numel() == x.dim(0) * width);
  if (x.numel() == 0) return;
  const auto halves = width * static_cast<int64_t>(size_of(x.dtype())) / 2;
  launch("store_ring_kernel", store_ring_kernel, static_cast<unsigned>(x.dim(0)), kThreads, 0,
         stream_of(stream), dependent_launch(stream), static_cast<const uint16_t*>(x.data()),
         tokens_of(tokens), static_cast<uint16_t*>(ring.mutable_data()), ring.dim(2), halves);
}

void CudaDenseOps::compress(const CompressArgs& args, Workspace& /*workspace*/,
                            const Stream& stream) {
  const int64_t width = args.width();
  const int64_t series = args.values.dim(1) / width;
  CADRE_ASSERT((series == 1 || series == 2) && args.values.dim(1) == series * width &&
               args.value_ring.dim(2) >= series * args.rate() &&
               2 * args.inverse_frequencies.dim(0) <= width);
  if (args.values.dim(0) == 0) return;
  CompressCall call = {};
  call.values = ring_rows(args.values, args.value_ring);
  call.gates = ring_rows(args.gates, args.gate_ring);
  call.bias = args.position_bias.data();
  call.bias_dtype = args.position_bias.dtype();
  call.norm = args.norm.data();
  call.norm_dtype = args.norm.dtype();
  call.eps = args.norm_eps;
  call.inverse = args.inverse_frequencies.as<float>();
  call.half = args.inverse_frequencies.dim(0);
  call.rope_scale = args.rope_scale;
  call.tokens = tokens_of(args.tokens);
  call.entries = args.entries.mutable_data();
  call.dtype = args.entries.dtype();
  call.rows = args.entries.dim(2);
  call.rate = args.rate();
  call.width = width;
  call.series = series;
  const size_t bytes = static_cast<size_t>(width) * sizeof(float);
  allow_shared_memory(compress_kernel, bytes);
  launch("compress_kernel", compress_kernel, static_cast<unsigned>(args.values.dim(0)), kThreads,
         bytes, stream_of(stream), dependent_launch(stream), call);
}

void CudaDenseOps::pick_entries(const PickEntriesArgs& args, Workspace& workspace,
                                const Stream& stream) {
  const int64_t num_tokens = args.queries.dim(0);
  CADRE_ASSERT(args.keys.dim(3) == args.queries.dim(2) && args.keys.dim(2) <= kMaxScores &&
               args.weights.numel() == num_tokens * args.queries.dim(1));
  if (num_tokens == 0) return;
  const Workspace::Scope scope(workspace);
  PickCall call = {};
  call.queries = args.queries.data();
  call.weights = args.weights.as<float>();
  call.weight_scale = args.weight_scale;
  call.keys = args.keys.data();
  call.dtype = args.queries.dtype();
  call.heads = args.queries.dim(1);
  call.width = args.queries.dim(2);
  call.rows = args.keys.dim(2);
  call.rate = args.rate;
  call.slots = args.tokens.slots.as<int32_t>();
  call.positions = args.tokens.positions.as<int32_t>();
  call.picks = args.picks.as<int32_t>();
  call.k = args.picks.dim(1);
  call.scores = workspace.allocate<uint32_t>(kMaxScores);
  const size_t bytes = static_cast<size_t>(call.heads * call.width) * sizeof(float);
  allow_shared_memory(score_entries_kernel, bytes);
  const int64_t at_once = std::min<int64_t>(kMaxScores / call.rows, 32768);
  const auto blocks = static_cast<unsigned>((call.rows + kWarps - 1) / kWarps);
  const Launch mode = dependent_launch(stream);
  for (int64_t first = 0; first < num_tokens; first += at_once) {
    call.first_token = first;
    const auto count = static_cast<unsigned>(std::min(at_once, num_tokens - first));
    launch("score_entries_kernel", score_entries_kernel, dim3(blocks, count), kThreads, bytes,
           stream_of(stream), mode, call);
    launch("pick_entries_kernel", pick_entries_kernel, count, kPickThreads, 0, stream_of(stream),
           mode, call);
  }
}

size_t CudaDenseOps::pick_entries_workspace_bytes(int64_t /*num_heads*/, int64_t /*width*/,
                                                  int64_t /*k*/, int /*num_threads*/) const {
  return Workspace::padded(static_cast<size_t>(kMaxScores) * sizeof(uint32_t));
}

void CudaDenseOps::shared_kv_attention(const SharedKvAttentionArgs& args, Workspace& /*workspace*/,
                                       const Stream& stream) {
  const int64_t num_tokens = args.q.dim(0);
  const DType dtype = args.q.dtype();
  CADRE_ASSERT(args.kv_ring.dim(3) == args.q.dim(2) &&
               args.kv_ring.dim(2) >= args.sliding_window - 1 &&
               (!args.entries || args.entries.dim(3) == args.q.dim(2)) &&
               args.q.dim(2) <= kMaxDim && args.kv.dtype() == dtype && args.out.dtype() == dtype &&
               (!args.entries || args.entries.dtype() == dtype) && num_tokens < 65536);
  if (num_tokens == 0) return;
  SharedKvCall call = {};
  call.q = args.q.data();
  call.kv = ring_rows(args.kv, args.kv_ring);
  call.window = args.sliding_window;
  if (args.entries) {
    call.entries = args.entries.data();
    call.entry_rows = args.entries.dim(2);
  }
  call.rate = args.rate;
  if (args.picks) {
    call.picks = args.picks.as<int32_t>();
    call.num_picks = args.picks.dim(1);
  }
  call.sinks = args.sinks.data();
  call.sinks_dtype = args.sinks.dtype();
  call.scale = args.scale;
  call.tokens = tokens_of(args.tokens);
  call.out = args.out.mutable_data();
  call.dtype = dtype;
  call.heads = args.q.dim(1);
  call.dim = args.q.dim(2);
  launch("shared_kv_kernel", shared_kv_kernel,
         dim3(static_cast<unsigned>(call.heads), static_cast<unsigned>(num_tokens)), kThreads, 0,
         stream_of(stream), dependent_launch(stream), call);
}

}  // namespace cadre::cuda

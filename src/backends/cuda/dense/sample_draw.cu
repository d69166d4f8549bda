// Draws, one block a row. A cut leaves few candidates as a rule: they are picked out first and the
// rest of the work is on them; else the block goes over the row for each cut. Weights are added up
// as integers, so a sum does not depend on the order that threads come in.
#include <math_constants.h>

#include "backends/cuda/dense/sample.cuh"

namespace cadre::cuda {
namespace {

constexpr int kDrawThreads = 1024;
constexpr int kMaxList = 2048;             // candidates that a draw keeps in shared memory
constexpr int kMaxListTopK = 512;          // top-k up to which they are looked for
constexpr double kUnit = 1099511627776.0;  // 2^40: the weight 1 as an integer

struct DrawArgs {
  const float* logits;
  int64_t vocab;
  float temperature;
  int32_t top_k;
  float top_p;
  float min_p;
  float penalty;
  const int32_t* history;  // null: none
  int64_t history_stride;
  const int32_t* history_lengths;
  const double* uniform;
  Drawn drawn;
};

using Sum = unsigned long long;

// One row in one block. Everything below is called by all threads together.
struct Row {
  const DrawArgs& args;
  const float* logits;
  uint32_t* seen;  // shared: a bit for each id of the history; null without a penalty
  float max = 0;   // of the penalised logits; then of the heated ones
  bool overflows = false;
  float penalised_max = 0;
  float* list_logits = nullptr;  // shared, heated; with list_ids: the candidates by ascending id
  int32_t* list_ids = nullptr;
  int32_t list_size = -1;  // -1: all of the row
  uint32_t least = 0;      // smallest key that is kept
  int64_t first_tie = 0;   // of those whose key is `tie`, ids below it are not kept
  uint32_t tie = 0;

  __device__ float penalised(int64_t id) const {
    const float x = logits[id];
    if (seen == nullptr || (seen[id / 32] >> (id % 32) & 1u) == 0) return x;
    return x < 0 ? x * args.penalty : x / args.penalty;
  }
  // Divided by the temperature. Where that overflows, logits are taken relative to the maximum.
  __device__ float heated(int64_t id) const {
    float x = penalised(id);
    if (overflows) x = x == penalised_max ? 0.0f : x - penalised_max;
    return x / args.temperature;
  }
  // What a draw is among: `size()` logits, the i-th one's id and heated value.
  __device__ int64_t size() const { return list_size < 0 ? args.vocab : list_size; }
  __device__ int64_t id(int64_t i) const { return list_size < 0 ? i : list_ids[i]; }
  __device__ float value(int64_t i) const { return list_size < 0 ? heated(i) : list_logits[i]; }

  __device__ double weight(float x) const {
    if (x == max) return 1.0;
    const double difference = static_cast<double>(x) - static_cast<double>(max);
    return difference < -32.0 ? 0.0 : exp(difference);
  }
  __device__ Sum units(float x) const { return static_cast<Sum>(weight(x) * kUnit); }
  __device__ bool kept(float x, int64_t id) const {
    if (isnan(x)) return false;
    const uint32_t key = key_of(x);
    return key >= least && (key != tie || id >= first_tie);
  }
};

// Sum over all threads; every thread gets it. `shared` [warps].
__device__ Sum block_sum(Sum x, Sum* shared) {
#pragma unroll
  for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
  __syncthreads();
  if (threadIdx.x % 32 == 0) shared[threadIdx.x / 32] = x;
  __syncthreads();
  Sum total = 0;
  for (int i = 0; i < kDrawThreads / 32; ++i) total += shared[i];
  return total;
}

// The largest number that at least `count` threads' keys reach.
__device__ uint32_t key_of_many(uint32_t key, int count) {
  uint32_t result = 0;
  for (int bit = 31; bit >= 0; --bit) {
    const uint32_t higher = result | 1u << bit;
    if (__syncthreads_count(key >= higher) >= count) result = higher;
  }
  return result;
}

// Picks out the `count` likeliest at least, when there is room for them: `count` threads' own
// likeliest are that likely, so what is less likely than all of these is not among them.
__device__ void pick_list(Row& row, int count, float* logits, int32_t* ids) {
  __shared__ int32_t size;
  uint32_t best = 0;
  for (int64_t id = threadIdx.x; id < row.args.vocab; id += kDrawThreads) {
    const float x = row.heated(id);
    if (!isnan(x)) best = best < key_of(x) ? key_of(x) : best;
  }
  if (threadIdx.x == 0) size = 0;
  const uint32_t least = key_of_many(best, count);
  for (int64_t id = threadIdx.x; best >= least && id < row.args.vocab; id += kDrawThreads) {
    const float x = row.heated(id);
    if (isnan(x) || key_of(x) < least) continue;
    const int32_t at = atomicAdd(&size, 1);
    if (at < kMaxList) logits[at] = x, ids[at] = static_cast<int32_t>(id);
  }
  __syncthreads();
  if (size > kMaxList) return;
  // By ascending id, whatever order the threads came in.
  constexpr int kOwn = kMaxList / kDrawThreads;
  float own_logits[kOwn];
  int32_t own_ids[kOwn];
  int32_t places[kOwn] = {};
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    const int i = static_cast<int>(threadIdx.x) + j * kDrawThreads;
    if (i >= size) continue;
    own_logits[j] = logits[i];
    own_ids[j] = ids[i];
    for (int32_t other = 0; other < size; ++other) places[j] += ids[other] < own_ids[j];
  }
  __syncthreads();
#pragma unroll
  for (int j = 0; j < kOwn; ++j) {
    if (static_cast<int>(threadIdx.x) + j * kDrawThreads >= size) continue;
    logits[places[j]] = own_logits[j];
    ids[places[j]] = own_ids[j];
  }
  __syncthreads();
  row.list_logits = logits;
  row.list_ids = ids;
  row.list_size = size;
}

// The largest key for which the measures of all keys not below it reach `target`, digit by digit;
// `above` becomes the sum of those above it. measure(x) of a kept logit. `bins` [256] shared.
template <typename Measure>
__device__ uint32_t key_reaching(const Row& row, Sum target, const Measure& measure, Sum* bins,
                                 Sum& above) {
  uint32_t prefix = 0;
  above = 0;
  __shared__ Sum chosen[2];
  for (int shift = 24; shift >= 0; shift -= 8) {
    __syncthreads();
    if (threadIdx.x < 256) bins[threadIdx.x] = 0;
    __syncthreads();
    for (int64_t i = threadIdx.x; i < row.size(); i += kDrawThreads) {
      const float x = row.value(i);
      if (!row.kept(x, row.id(i))) continue;
      const uint32_t key = key_of(x);
      if (shift < 24 && key >> (shift + 8) != prefix >> (shift + 8)) continue;
      const Sum own = measure(x);
      if (own != 0) atomicAdd(&bins[key >> shift & 255u], own);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
      Sum sum = above;
      int digit = 255;
      while (digit > 0 && sum + bins[digit] < target) sum += bins[digit--];
      chosen[0] = static_cast<Sum>(digit);
      chosen[1] = sum;
    }
    __syncthreads();
    prefix |= static_cast<uint32_t>(chosen[0]) << shift;
    above = chosen[1];
  }
  return prefix;
}

__device__ void mark_history(const Row& row, int64_t index) {
  const int64_t words = (row.args.vocab + 31) / 32;
  for (int64_t i = threadIdx.x; i < words; i += kDrawThreads) row.seen[i] = 0;
  __syncthreads();
  const int32_t* history = row.args.history + index * row.args.history_stride;
  for (int32_t i = static_cast<int32_t>(threadIdx.x); i < row.args.history_lengths[index];
       i += kDrawThreads) {
    const int32_t id = history[i];
    if (id >= 0 && id < row.args.vocab) atomicOr(&row.seen[id / 32], 1u << (id % 32));
  }
  __syncthreads();
}

__device__ void keep_top_k(Row& row, Sum* shared, Sum* bins) {
  if (row.args.top_k <= 0) return;
  Sum mine = 0;
  for (int64_t i = threadIdx.x; i < row.size(); i += kDrawThreads) mine += !isnan(row.value(i));
  const auto k = static_cast<Sum>(row.args.top_k);
  if (block_sum(mine, shared) <= k) return;
  Sum above = 0;
  row.least = key_reaching(
      row, k, [](float) { return Sum{1}; }, bins, above);
}

__device__ Sum sum_of_kept(const Row& row, Sum* shared) {
  Sum mine = 0;
  for (int64_t i = threadIdx.x; i < row.size(); i += kDrawThreads) {
    const float x = row.value(i);
    if (row.kept(x, row.id(i))) mine += row.units(x);
  }
  return block_sum(mine, shared);
}

// What the likeliest must make up.
__device__ Sum top_p_target(const Row& row, Sum total) {
  const double wanted = ceil(static_cast<double>(row.args.top_p) * static_cast<double>(total));
  return wanted < 1.0 ? 1 : static_cast<Sum>(wanted);
}

// The likeliest until they make up `target`; of equals the higher ids first, as few as needed.
__device__ void keep_top_p(Row& row, Sum target, Sum* shared, Sum* bins) {
  const auto units = [&row](float x) { return row.units(x); };
  Sum above = 0;
  const uint32_t tie = key_reaching(row, target, units, bins, above);
  // How many of the equals at the cut are needed, and from which id on they are.
  const float value = __uint_as_float((tie & 0x80000000u) != 0 ? tie & 0x7fffffffu : ~tie);
  const Sum one = row.units(value);
  const Sum needed = one == 0 ? 1 : (target - above + one - 1) / one;
  Sum equals = 0;
  for (int64_t i = threadIdx.x; i < row.size(); i += kDrawThreads) {
    const float x = row.value(i);
    equals += !isnan(x) && key_of(x) == tie;
  }
  equals = block_sum(equals, shared);
  row.least = tie;
  if (needed >= equals) return;
  __shared__ int64_t first;
  if (threadIdx.x < 32) {  // one warp, in the order of ids
    Sum skip = equals - needed;
    for (int64_t base = 0; base < row.size(); base += 32) {
      const int64_t i = base + threadIdx.x;
      const float x = i < row.size() ? row.value(i) : CUDART_NAN_F;
      const unsigned votes = __ballot_sync(~0u, !isnan(x) && key_of(x) == tie);
      const auto count = static_cast<Sum>(__popc(votes));
      if (count > skip) {
        if (threadIdx.x == 0) {
          first = row.id(base + __fns(votes, 0, static_cast<int>(skip) + 1));
        }
        break;
      }
      skip -= count;
    }
  }
  __syncthreads();
  row.tie = tie;
  row.first_tie = first;
}

__device__ void cut(Row& row, float* list_logits, int32_t* list_ids, Sum* shared, Sum* bins) {
  const bool by_k = row.args.top_k > 0;
  const bool by_p = row.args.top_p < 1.0f;
  if (by_k && row.args.top_k <= kMaxListTopK) {
    pick_list(row, row.args.top_k, list_logits, list_ids);
  }
  keep_top_k(row, shared, bins);
  if (!by_p) return;
  const Sum target = top_p_target(row, sum_of_kept(row, shared));
  if (!by_k) {
    pick_list(row, kMaxListTopK, list_logits, list_ids);
    if (sum_of_kept(row, shared) < target) row.list_size = -1;  // the cut is beyond the list
  }
  keep_top_p(row, target, shared, bins);
}

__device__ Sum drawable(const Row& row, int64_t i) {
  const float x = row.value(i);
  if (!row.kept(x, row.id(i))) return 0;
  if (row.args.min_p > 0.0f && row.weight(x) < static_cast<double>(row.args.min_p)) return 0;
  return row.units(x);
}

// Warp w has the candidates [w * share, (w + 1) * share).
__device__ int32_t draw(const Row& row, double uniform, Sum* shared) {
  constexpr int kWarps = kDrawThreads / 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int64_t share = ((row.size() + kWarps - 1) / kWarps + 31) / 32 * 32;
  const int64_t begin = warp * share;
  const int64_t end = min(begin + share, row.size());
  Sum mine = 0;
  for (int64_t i = begin + lane; i < end; i += 32) mine += drawable(row, i);
#pragma unroll
  for (int step = 16; step > 0; step /= 2) mine += __shfl_xor_sync(~0u, mine, step);
  __syncthreads();
  if (lane == 0) shared[warp] = mine;
  __syncthreads();
  Sum total = 0;
  Sum before = 0;
  for (int i = 0; i < kWarps; ++i) {
    if (i == warp) before = total;
    total += shared[i];
  }
  __shared__ int32_t drawn;
  auto threshold = static_cast<Sum>(uniform * static_cast<double>(total));
  if (threshold >= total) threshold = total - 1;
  if (threshold >= before && threshold < before + mine) {  // this warp has it
    for (int64_t base = begin; base < end; base += 32) {
      Sum sum = base + lane < end ? drawable(row, base + lane) : 0;
#pragma unroll
      for (int step = 1; step < 32; step *= 2) {
        const Sum other = __shfl_up_sync(~0u, sum, step);
        if (lane >= step) sum += other;
      }
      const unsigned votes = __ballot_sync(~0u, threshold < before + sum);
      if (votes != 0) {
        const int64_t i = base + __ffs(static_cast<int>(votes)) - 1;
        if (lane == 0) drawn = static_cast<int32_t>(row.id(i));
        break;
      }
      before += __shfl_sync(~0u, sum, 31);
    }
  }
  __syncthreads();
  return drawn;
}

__global__ void __launch_bounds__(kDrawThreads) draw_kernel(const __grid_constant__ DrawArgs args) {
  extern __shared__ uint32_t seen[];
  __shared__ Sum shared[kDrawThreads / 32];
  __shared__ Sum bins[256];
  __shared__ float list_logits[kMaxList];
  __shared__ int32_t list_ids[kMaxList];
  begin_dependent();
  const int64_t index = blockIdx.x;
  Row row{args, args.logits + index * args.vocab, args.history != nullptr ? seen : nullptr};
  if (row.seen != nullptr) mark_history(row, index);
  Best best = 0;
  for (int64_t id = threadIdx.x; id < args.vocab; id += kDrawThreads) {
    const Best one = best_of(row.penalised(id), id);
    best = one > best ? one : best;
  }
  const int32_t likeliest = id_of(block_max(best, shared));
  if (likeliest < 0 || args.temperature == 0.0f) {
    if (threadIdx.x == 0) args.drawn.store(index, gridDim.x, likeliest);
    return;
  }
  row.penalised_max = row.penalised(likeliest);
  row.overflows = !isfinite(row.penalised_max / args.temperature);
  row.max = row.heated(likeliest);
  cut(row, list_logits, list_ids, shared, bins);
  const int32_t drawn = draw(row, args.uniform[index], shared);
  if (threadIdx.x == 0) args.drawn.store(index, gridDim.x, drawn);
}

}  // namespace

void sample_draw(const SampleArgs& args, const Stream& stream) {
  const int64_t rows = args.logits.dim(0);
  const bool penalises = args.repetition_penalty != 1.0f;
  DrawArgs draw{};
  draw.logits = args.logits.as<float>();
  draw.vocab = args.logits.dim(1);
  draw.temperature = args.temperature;
  draw.top_k = args.top_k;
  draw.top_p = args.top_p;
  draw.min_p = args.min_p;
  draw.penalty = args.repetition_penalty;
  draw.drawn = drawn_of(args);
  if (penalises) {
    CADRE_ASSERT(args.history.dim(0) == rows && args.history_lengths.dim(0) == rows);
    draw.history = args.history.as<int32_t>();
    draw.history_stride = args.history.stride(0);
    draw.history_lengths = args.history_lengths.as<int32_t>();
  }
  if (args.temperature != 0.0f) {
    CADRE_ASSERT(args.uniform.dim(0) == rows);
    draw.uniform = args.uniform.as<double>();
  }
  const size_t bits = penalises ? static_cast<size_t>((draw.vocab + 31) / 32) * 4 : 0;
  allow_shared_memory(draw_kernel, bits + 48 * 1024);  // besides what it always has
  launch("draw_kernel", draw_kernel, static_cast<unsigned>(rows), kDrawThreads, bits,
         stream_of(stream), dependent_launch(stream), draw);
}

}  // namespace cadre::cuda

// Times of grouped_mm on a Hopper GPU, whole and by part, from replayed graphs, with the ceilings
// of the same run. Built by its own target. hopper_bench [shape prefix] [T ...]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/grouped_mm/weight_layout.h"
#include "backends/cuda/kernels/ceilings.h"
#include "backends/cuda/kernels/hopper_gemm.h"
#include "backends/cuda/kernels/routing.h"
#include "core/device_runtime.h"

namespace cadre::cuda {
std::unique_ptr<ExpertsBackend> make_grouped_mm();

namespace {

constexpr Device kDevice = {DeviceType::kCuda, 0};

struct Shape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
  double deepgemm_us[3][2];  // gate_up, down at T = 1024, 4096, 16384
                             // (facts/GPU_KERNELS.md)
};

const Shape kShapes[] = {
    {"qwen3-30b", 128, 8, 2048, 768, {{228, 120}, {386, 213}, {1158, 615}}},
    {"qwen1.5", 60, 4, 2048, 1408, {{200, 108}, {378, 192}, {1058, 528}}},
    {"mixtral", 8, 2, 4096, 14336, {{851, 410}, {2623, 1356}, {11383, 5554}}},
    {"deepseek-v3", 256, 8, 7168, 2048, {{3766, 1880}, {4831, 2289}, {12795, 6588}}},
};

__device__ float random_value(uint64_t i,
                              uint64_t seed) {  // uniform, variance 1
  uint64_t z = i * 0x9E3779B97F4A7C15ull + seed;
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9ull;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBull;
  z ^= z >> 31;
  return (static_cast<float>(z >> 40) / 16777216.0f - 0.5f) * 3.4641016f;
}

__global__ void fill_random(__nv_bfloat16* to, int64_t count, float scale, uint64_t seed) {
  const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
  for (int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x; i < count;
       i += step) {
    to[i] = __float2bfloat16(scale * random_value(static_cast<uint64_t>(i), seed));
  }
}

// out[r] = sum over k of x[r] w[r], double; one block a (row, column).
struct Truth {
  const __nv_bfloat16* x;  // [H] rows by token
  const __nv_bfloat16* gate_up;
  const __nv_bfloat16* down;
  int64_t hidden, intermediate;
};

__device__ double dot(const __nv_bfloat16* w, const __nv_bfloat16* x, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    sum +=
        static_cast<double>(__bfloat162float(w[i])) * static_cast<double>(__bfloat162float(x[i]));
  }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}
__device__ double dot(const __nv_bfloat16* w, const double* x, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x % 32; i < n; i += 32) {
    sum += static_cast<double>(__bfloat162float(w[i])) * x[i];
  }
  for (int s = 16; s > 0; s /= 2) sum += __shfl_xor_sync(~0u, sum, s);
  return sum;
}

__global__ void truth_h(Truth t, const int64_t* tokens, const int64_t* experts, double* h) {
  const int64_t pair = blockIdx.y;
  const int64_t i = blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= t.intermediate) return;
  const __nv_bfloat16* w = t.gate_up + experts[pair] * 2 * t.intermediate * t.hidden;
  const __nv_bfloat16* x = t.x + tokens[pair] * t.hidden;
  const double gate = dot(w + i * t.hidden, x, t.hidden);
  const double up = dot(w + (t.intermediate + i) * t.hidden, x, t.hidden);
  if (threadIdx.x % 32 == 0) h[pair * t.intermediate + i] = gate / (1 + exp(-gate)) * up;
}
__global__ void truth_y(Truth t, const int64_t* experts, const double* h, double* y) {
  const int64_t pair = blockIdx.y;
  const int64_t i = blockIdx.x * 8 + threadIdx.x / 32;
  if (i >= t.hidden) return;
  const double v = dot(t.down + (experts[pair] * t.hidden + i) * t.intermediate,
                       h + pair * t.intermediate, t.intermediate);
  if (threadIdx.x % 32 == 0) y[pair * t.hidden + i] = v;
}

template <typename T>
std::shared_ptr<void> upload(const std::vector<T>& values) {
  auto memory = allocate_shared_memory(kDevice, values.size() * sizeof(T));
  CADRE_CUDA_CHECK(
      cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}

std::shared_ptr<void> random_bf16(int64_t count, float scale, uint64_t seed) {
  auto memory = allocate_shared_memory(kDevice, static_cast<size_t>(count) * 2);
  fill_random<<<2048, 256>>>(static_cast<__nv_bfloat16*>(memory.get()), count, scale, seed);
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  return memory;
}

// Microseconds of a replayed graph, median.
double graph_us(const Stream& stream, int repeats, const std::function<void()>& call) {
  const auto graph = device_runtime(kDevice).capture(stream, [&] { call(); });
  auto* s = stream_of(stream);
  cudaEvent_t begin, end;
  CADRE_CUDA_CHECK(cudaEventCreate(&begin));
  CADRE_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  graph->launch(stream);
  CADRE_CUDA_CHECK(cudaStreamSynchronize(s));
  std::this_thread::sleep_for(std::chrono::milliseconds(60));  // the clock falls under load
  for (int i = 0; i < repeats + 2; ++i) {
    CADRE_CUDA_CHECK(cudaEventRecord(begin, s));
    graph->launch(stream);
    CADRE_CUDA_CHECK(cudaEventRecord(end, s));
    CADRE_CUDA_CHECK(cudaStreamSynchronize(s));
    float ms = 0;
    CADRE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms * 1000);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Limits {
  double flops = 0;
  double bytes = 0;
};

struct Layer {
  Shape shape;
  std::shared_ptr<void> gate_up, down;
  std::shared_ptr<const ExpertsWeights> weights;
  ExpertsQuery query;
};

Layer make_layer(const Shape& s) {
  Layer layer;
  layer.shape = s;
  const int64_t e = s.experts, h = s.hidden, i = s.intermediate;
  layer.gate_up = random_bf16(e * 2 * i * h, 1.5f / std::sqrt(static_cast<float>(h)), 11);
  layer.down = random_bf16(e * h * i, 1.5f / std::sqrt(static_cast<float>(i)), 13);
  layer.query.config.num_experts = e;
  layer.query.config.hidden_size = h;
  layer.query.config.intermediate_size = i;
  layer.query.config.top_k = s.top_k;
  layer.query.device = kDevice;
  FusedExperts fused;
  fused.gate_up_proj = TensorView(layer.gate_up.get(), DType::kBF16, {e, 2 * i, h}, kDevice);
  fused.down_proj = TensorView(layer.down.get(), DType::kBF16, {e, h, i}, kDevice);
  layer.weights = std::make_shared<ExpertsWeights>(make_experts_weights(layer.query.config, fused));
  return layer;
}

void draw_ids(const Shape& s, int64_t num_tokens, std::vector<int64_t>& ids,
              std::vector<float>& weights) {
  std::mt19937 random(5);
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::set<int64_t> seen;
    while (static_cast<int64_t>(seen.size()) < s.top_k) {
      const int64_t id = static_cast<int64_t>(random()) % s.experts;
      if (seen.insert(id).second) ids.push_back(id);
    }
    for (int64_t k = 0; k < s.top_k; ++k) {
      weights.push_back(0.1f + static_cast<float>(random() % 1000) / 2000.0f);
    }
  }
}

double check(const Layer& layer, const void* x, const std::vector<int64_t>& ids,
             const std::vector<float>& weights, const void* out, int64_t num_tokens) {
  const Shape& s = layer.shape;
  const int64_t samples = std::min<int64_t>(num_tokens, 48);
  std::vector<int64_t> tokens, experts;
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t t = i * num_tokens / samples;
    for (int64_t k = 0; k < s.top_k; ++k) {
      tokens.push_back(t);
      experts.push_back(ids[static_cast<size_t>(t * s.top_k + k)]);
    }
  }
  const auto d_tokens = upload(tokens), d_experts = upload(experts);
  const auto pairs = static_cast<int64_t>(tokens.size());
  const auto h = allocate_shared_memory(kDevice, static_cast<size_t>(pairs * s.intermediate) * 8);
  const auto y = allocate_shared_memory(kDevice, static_cast<size_t>(pairs * s.hidden) * 8);
  const Truth truth = {
      static_cast<const __nv_bfloat16*>(x), static_cast<const __nv_bfloat16*>(layer.gate_up.get()),
      static_cast<const __nv_bfloat16*>(layer.down.get()), s.hidden, s.intermediate};
  const auto count = static_cast<unsigned>(pairs);
  truth_h<<<dim3(static_cast<unsigned>((s.intermediate + 7) / 8), count), 256>>>(
      truth, static_cast<int64_t*>(d_tokens.get()), static_cast<int64_t*>(d_experts.get()),
      static_cast<double*>(h.get()));
  truth_y<<<dim3(static_cast<unsigned>((s.hidden + 7) / 8), count), 256>>>(
      truth, static_cast<int64_t*>(d_experts.get()), static_cast<double*>(h.get()),
      static_cast<double*>(y.get()));
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  std::vector<double> rows(static_cast<size_t>(pairs * s.hidden));
  CADRE_CUDA_CHECK(cudaMemcpy(rows.data(), y.get(), rows.size() * 8, cudaMemcpyDeviceToHost));
  double difference = 0, norm = 0;
  std::vector<uint16_t> got(static_cast<size_t>(s.hidden));
  for (int64_t i = 0; i < samples; ++i) {
    const int64_t t = i * num_tokens / samples;
    CADRE_CUDA_CHECK(cudaMemcpy(got.data(), static_cast<const uint16_t*>(out) + t * s.hidden,
                                got.size() * 2, cudaMemcpyDeviceToHost));
    for (int64_t c = 0; c < s.hidden; ++c) {
      double sum = 0;
      for (int64_t k = 0; k < s.top_k; ++k) {
        sum += static_cast<double>(weights[static_cast<size_t>(t * s.top_k + k)]) *
               rows[static_cast<size_t>((i * s.top_k + k) * s.hidden + c)];
      }
      const uint32_t bits = static_cast<uint32_t>(got[static_cast<size_t>(c)]) << 16;
      float value;
      std::memcpy(&value, &bits, 4);
      difference += (value - sum) * (value - sum);
      norm += sum * sum;
    }
  }
  return std::sqrt(difference / norm);
}

void bench(const Layer& layer, int64_t num_tokens, const Limits& limits, const Stream& stream) {
  const Shape& s = layer.shape;
  std::vector<int64_t> ids;
  std::vector<float> routing;
  draw_ids(s, num_tokens, ids, routing);
  const int64_t pairs = num_tokens * s.top_k;
  const auto x = random_bf16(num_tokens * s.hidden, 1.0f, 17);
  const auto d_ids = upload(ids);
  const auto d_routing = upload(routing);
  const auto out = allocate_shared_memory(kDevice, static_cast<size_t>(num_tokens * s.hidden) * 2);
  CADRE_CUDA_CHECK(cudaMemset(out.get(), 0xff, static_cast<size_t>(num_tokens * s.hidden) * 2));
  RoutedTokens call;
  call.hidden_states = TensorView(x.get(), DType::kBF16, {num_tokens, s.hidden}, kDevice);
  call.top_k_index = TensorView(d_ids.get(), DType::kI64, {num_tokens, s.top_k}, kDevice);
  call.top_k_weights = TensorView(d_routing.get(), DType::kF32, {num_tokens, s.top_k}, kDevice);
  call.output = MutableTensorView(out.get(), DType::kBF16, {num_tokens, s.hidden}, kDevice);

  const auto backend = make_grouped_mm();
  const auto prepared = backend->prepare(layer.query, layer.weights);
  Workspace workspace(kDevice, backend->workspace_bytes(layer.query, num_tokens, 1));
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  const int repeats = num_tokens * s.hidden * s.intermediate > int64_t{1} << 36 ? 7 : 21;
  const double whole =
      graph_us(stream, repeats, [&] { backend->forward(*prepared, call, workspace, stream); });
  const double error = check(layer, x.get(), ids, routing, out.get(), num_tokens);

  // The parts.
  Workspace space(kDevice, backend->workspace_bytes(layer.query, num_tokens, 1) + 4096);
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  const Workspace::Scope scope(space);
  RoutingPlan plan;
  const double plan_us = graph_us(stream, 21, [&] {
    const Workspace::Scope inner(space);
    plan = plan_routing(call.top_k_index, s.experts, space, stream);
  });
  plan = plan_routing(call.top_k_index, s.experts, space, stream);
  void* wide = space.allocate(static_cast<size_t>(pairs * s.hidden) * 2);
  void* h = space.allocate(static_cast<size_t>(pairs * s.intermediate) * 2);
  HopperGemm gemm;
  const auto count_bytes = static_cast<size_t>(hopper_gemm_counts(true, pairs, s.experts)) * 4;
  gemm.counts = static_cast<uint32_t*>(space.allocate(count_bytes));
  const auto clear = [&] {
    CADRE_CUDA_CHECK(cudaMemsetAsync(gemm.counts, 0, count_bytes, stream_of(stream)));
  };
  gemm.num_experts = s.experts;
  gemm.max_rows = pairs;
  gemm.expert_offsets = plan.expert_offsets;
  CudaPrepared addresses(layer.query, layer.weights);
  const ExpertsConfig& c = layer.query.config;
  HopperGemm up = gemm;
  up.n = s.intermediate;
  up.k = s.hidden;
  up.rows =
      make_tensor_map({DType::kBF16, wide, s.hidden, pairs, 1, s.hidden, 0}, kHopperRowBox, false);
  up.weights =
      make_tensor_map(gate_layout(c, DType::kBF16, addresses.device), kHopperWeightBox, true);
  up.up_weights =
      make_tensor_map(up_layout(c, DType::kBF16, addresses.device), kHopperWeightBox, true);
  up.gated = true;
  up.pair_of_row = plan.pair_of_row;
  up.top_k = s.top_k;
  up.x = x.get();
  up.x_stride = s.hidden;
  up.sorted = wide;
  up.gate = gate_function(c);
  up.out = h;
  up.out_stride = s.intermediate;
  const double up_us = graph_us(stream, repeats, [&] {
    clear();
    hopper_gemm(up, stream);
  });
  HopperGemm sorted = up;  // rows in order beforehand, as DeepGEMM has them
  sorted.pair_of_row = nullptr;
  const double sorted_us = graph_us(stream, repeats, [&] {
    clear();
    hopper_gemm(sorted, stream);
  });
  HopperGemm down = gemm;
  down.n = s.hidden;
  down.k = s.intermediate;
  down.rows = make_tensor_map({DType::kBF16, h, s.intermediate, pairs, 1, s.intermediate, 0},
                              kHopperRowBox, false);
  down.weights =
      make_tensor_map(down_layout(c, DType::kBF16, addresses.device), kHopperWeightBox, true);
  down.up_weights = down.weights;
  down.out = wide;
  down.out_stride = s.hidden;
  const double down_us = graph_us(stream, repeats, [&] {
    clear();
    hopper_gemm(down, stream);
  });
  const TensorView y(wide, DType::kBF16, {pairs, s.hidden}, kDevice);
  const double combine_us = graph_us(
      stream, 21, [&] { combine(y, plan.row_of_pair, call.top_k_weights, call.output, stream); });

  const double flops =
      6.0 * static_cast<double>(pairs) * static_cast<double>(s.hidden * s.intermediate);
  std::set<int64_t> active(ids.begin(), ids.end());
  const double bytes =
      static_cast<double>(active.size()) * 6.0 * static_cast<double>(s.hidden * s.intermediate);
  const double floor_us = std::max(flops / limits.flops, bytes / limits.bytes) * 1e6;
  std::printf(
      "%-11s T %5lld | whole %8.1f us %6.1f TF %4.1f%% dense | floor "
      "%7.1f us %4.1f%% (bytes "
      "%4.1f%%)"
      " | plan %5.1f sort+up %8.1f up %8.1f (%5.1f TF) down %7.1f "
      "(%5.1f TF) combine %6.1f",
      s.name, static_cast<long long>(num_tokens), whole, flops / whole * 1e-6,
      flops / whole * 1e8 / limits.flops, floor_us, floor_us / whole * 100,
      bytes / limits.bytes * 1e8 / whole, plan_us, up_us, sorted_us,
      flops * 2 / 3 / sorted_us * 1e-6, down_us, flops / 3 / down_us * 1e-6, combine_us);
  const int column = num_tokens == 1024 ? 0 : num_tokens == 4096 ? 1 : num_tokens == 16384 ? 2 : -1;
  if (column >= 0) {
    const double scale = 778e12 / limits.flops;
    const double peer_up = s.deepgemm_us[column][0] * scale;
    const double peer_down = s.deepgemm_us[column][1] * scale;
    std::printf(" | DeepGEMM %.0f x%.2f, %.0f x%.2f", peer_up, peer_up / sorted_us, peer_down,
                peer_down / down_us);
  }
  std::printf(" | error %.2e\n", error);
  std::fflush(stdout);
}

}  // namespace
}  // namespace cadre::cuda

int main(int argc, char** argv) {
  using namespace cadre;
  using namespace cadre::cuda;
  ThreadPool* none = nullptr;
  const auto own = device_runtime(kDevice).make_stream(0, none);
  const Stream& stream = own->get();
  std::vector<int64_t> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoll(argv[i]));
  if (tokens.empty()) tokens = {256, 1024, 4096, 16384};
  Limits limits;
  {
    const auto memory = allocate_shared_memory(kDevice, size_t{4} << 30);
    const TensorView view(memory.get(), DType::kBF16, {int64_t{2} << 30}, kDevice);
    CADRE_CUDA_CHECK(cudaMemset(memory.get(), 1, size_t{4} << 30));
    for (size_t way = 0; way < ceilings().ways_of_reading().size(); ++way) {
      for (int i = 0; i < 3; ++i) {
        limits.bytes = std::max(limits.bytes, ceilings().read_bandwidth(view, way, stream));
      }
    }
  }
  limits.flops = ceilings().peak_flops(DType::kBF16, stream);
  std::printf("%s: 8192^3 %.1f TFLOP/s, read %.3f TB/s\n", ceilings().processor().c_str(),
              limits.flops * 1e-12, limits.bytes * 1e-12);
  for (const Shape& shape : kShapes) {
    if (argc > 1 && std::strncmp(shape.name, argv[1], std::strlen(argv[1])) != 0) continue;
    const Layer layer = make_layer(shape);
    for (const int64_t t : tokens) bench(layer, t, limits, stream);
  }
  const double after = ceilings().peak_flops(DType::kBF16, stream);
  std::printf("8192^3 once more %.1f TFLOP/s\n", after * 1e-12);
  return 0;
}

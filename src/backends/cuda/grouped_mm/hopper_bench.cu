// Times of grouped_mm on a Hopper GPU, whole and by part, from replayed graphs, with the ceilings
// of the same run. Built by its own target. hopper_bench [shape prefix] [T ...]
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
#include "backends/cuda/grouped_mm/hopper_bench_truth.cuh"
#include "backends/cuda/kernels/ceilings.h"
#include "backends/cuda/kernels/hopper_gemm.h"
#include "backends/cuda/kernels/routing.h"
#include "backends/cuda/kernels/weight_layout.h"
#include "core/device_runtime.h"

namespace cadre::cuda {
std::unique_ptr<ExpertsBackend> make_grouped_mm();

namespace {

constexpr Device kDevice = {DeviceType::kCuda, 0};

struct Shape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
  // DeepGEMM 2.6.1 on an H200 that reached 778 TFLOP/s: gate_up, down at T = 1024, 4096, 16384.
  double deepgemm_us[3][2];
};

const Shape kShapes[] = {
    {"qwen3-30b", 128, 8, 2048, 768, {{228, 120}, {386, 213}, {1158, 615}}},
    {"qwen1.5", 60, 4, 2048, 1408, {{200, 108}, {378, 192}, {1058, 528}}},
    {"mixtral", 8, 2, 4096, 14336, {{851, 410}, {2623, 1356}, {11383, 5554}}},
    {"deepseek-v3", 256, 8, 7168, 2048, {{3766, 1880}, {4831, 2289}, {12795, 6588}}},
};

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

// One call's tensors on the device, and what they were made from.
struct Call {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::shared_ptr<void> x, d_ids, d_weights, out;
  RoutedTokens tokens;
};

Call make_call(const Shape& s, int64_t num_tokens) {
  Call c;
  draw_ids(s, num_tokens, c.ids, c.weights);
  const auto bytes = static_cast<size_t>(num_tokens * s.hidden) * 2;
  c.x = random_bf16(num_tokens * s.hidden, 1.0f, 17);
  c.d_ids = upload(c.ids);
  c.d_weights = upload(c.weights);
  c.out = allocate_shared_memory(kDevice, bytes);
  CADRE_CUDA_CHECK(cudaMemset(c.out.get(), 0xff, bytes));
  const Dims wide = {num_tokens, s.hidden}, narrow = {num_tokens, s.top_k};
  c.tokens.hidden_states = TensorView(c.x.get(), DType::kBF16, wide, kDevice);
  c.tokens.top_k_index = TensorView(c.d_ids.get(), DType::kI64, narrow, kDevice);
  c.tokens.top_k_weights = TensorView(c.d_weights.get(), DType::kF32, narrow, kDevice);
  c.tokens.output = MutableTensorView(c.out.get(), DType::kBF16, wide, kDevice);
  return c;
}

// Microseconds.
struct Times {
  double whole = 0, plan = 0, gate_up = 0, gate_up_sorted = 0, down = 0, combine = 0;
};

// The calls of grouped_mm one by one, in memory of their own.
class Parts {
 public:
  Parts(const Layer& layer, const Call& call, Workspace& space, const Stream& stream)
      : s_(layer.shape),
        call_(call),
        stream_(stream),
        addresses_(layer.query, layer.weights),
        pairs_(call.tokens.top_k_index.numel()),
        plan_(plan_routing(call.tokens.top_k_index, s_.experts, space, stream)),
        wide_(space.allocate(static_cast<size_t>(pairs_ * s_.hidden) * 2)),
        h_(space.allocate(static_cast<size_t>(pairs_ * s_.intermediate) * 2)),
        count_bytes_(static_cast<size_t>(kHopperPartialTurns +
                                         hopper_gemm_counts(true, pairs_, s_.experts)) *
                     4),
        counts_(static_cast<uint32_t*>(space.allocate(count_bytes_))),
        partial_sums_(hopper_gemm_cuts_k(pairs_, s_.experts, s_.intermediate)
                          ? space.allocate<float>(kHopperPartialSums)
                          : nullptr) {}

  void measure(int repeats, Times& times) {
    HopperGemm up = gate_up();
    times.gate_up = gemm_us(up, repeats);
    up.pair_of_row = nullptr;  // rows in order beforehand, as DeepGEMM has them
    times.gate_up_sorted = gemm_us(up, repeats);
    times.down = gemm_us(down(), repeats);
    const TensorView y(wide_, DType::kBF16, {pairs_, s_.hidden}, kDevice);
    times.combine = graph_us(stream_, 21, [&] {
      combine(y, plan_.row_of_pair, call_.tokens.top_k_weights, call_.tokens.output, stream_);
    });
  }

 private:
  HopperGemm base() const {
    HopperGemm g;
    g.num_experts = s_.experts;
    g.expert_offsets = plan_.expert_offsets;
    g.counts = counts_;
    g.max_rows = pairs_;
    return g;
  }

  CUtensorMap rows(void* data, int64_t columns, int box = kHopperRowBox) const {
    return make_tensor_map({DType::kBF16, data, columns, pairs_, 1, columns, 0}, box, false);
  }

  HopperGemm gate_up() const {
    const ExpertsConfig& c = addresses_.query.config;
    HopperGemm up = base();
    up.n = up.out_stride = s_.intermediate;
    up.k = up.x_stride = s_.hidden;
    up.rows = rows(wide_, s_.hidden);
    up.pair_of_row = plan_.pair_of_row;
    up.top_k = s_.top_k;
    up.x = call_.x.get();
    up.sorted = wide_;
    up.weights =
        make_tensor_map(gate_layout(c, DType::kBF16, addresses_.device), kHopperWeightBox, true);
    up.up_weights =
        make_tensor_map(up_layout(c, DType::kBF16, addresses_.device), kHopperWeightBox, true);
    up.gated = true;
    up.gate = gate_function(c);
    up.out = h_;
    up.out_boxes = rows(h_, s_.intermediate, kHopperOutBox);
    return up;
  }

  HopperGemm down() const {
    HopperGemm down = base();
    down.n = down.out_stride = s_.hidden;
    down.k = s_.intermediate;
    down.rows = rows(h_, s_.intermediate);
    down.weights = down.up_weights =
        make_tensor_map(down_layout(addresses_.query.config, DType::kBF16, addresses_.device),
                        kHopperWeightBox, true);
    down.out = wide_;
    down.out_boxes = rows(wide_, s_.hidden, kHopperOutBox);
    if (partial_sums_ != nullptr) {
      down.partial_sums = partial_sums_;
      down.partial_turns = counts_ + hopper_gemm_counts(true, pairs_, s_.experts);
    }
    return down;
  }

  double gemm_us(const HopperGemm& gemm, int repeats) const {
    return graph_us(stream_, repeats, [&] {
      CADRE_CUDA_CHECK(cudaMemsetAsync(counts_, 0, count_bytes_, stream_of(stream_)));
      hopper_gemm(gemm, stream_);
    });
  }

  const Shape& s_;
  const Call& call_;
  const Stream& stream_;
  CudaPrepared addresses_;
  int64_t pairs_;
  RoutingPlan plan_;
  void* wide_;
  void* h_;
  size_t count_bytes_;
  uint32_t* counts_;
  float* partial_sums_;
};

void print(const Shape& s, const Call& call, const Times& t, const Limits& limits, double error) {
  const int64_t num_tokens = call.tokens.hidden_states.dim(0);
  const double layer = 6.0 * static_cast<double>(s.hidden * s.intermediate);
  const double flops = layer * static_cast<double>(call.ids.size());
  const std::set<int64_t> active(call.ids.begin(), call.ids.end());
  const double bytes = layer * static_cast<double>(active.size());
  const double floor_us = std::max(flops / limits.flops, bytes / limits.bytes) * 1e6;
  std::printf(
      "%-11s T %5lld | whole %8.1f us %6.1f TF %4.1f%% dense | floor %7.1f us %4.1f%% (bytes "
      "%4.1f%%) | plan %5.1f gate_up %8.1f, rows sorted %8.1f (%5.1f TF) down %7.1f (%5.1f TF) "
      "combine %6.1f",
      s.name, static_cast<long long>(num_tokens), t.whole, flops / t.whole * 1e-6,
      flops / t.whole * 1e8 / limits.flops, floor_us, floor_us / t.whole * 100,
      bytes / limits.bytes * 1e8 / t.whole, t.plan, t.gate_up, t.gate_up_sorted,
      flops * 2 / 3 / t.gate_up_sorted * 1e-6, t.down, flops / 3 / t.down * 1e-6, t.combine);
  const int column = num_tokens == 1024 ? 0 : num_tokens == 4096 ? 1 : num_tokens == 16384 ? 2 : -1;
  if (column >= 0) {
    const double scale = 778e12 / limits.flops;
    const double peer_up = s.deepgemm_us[column][0] * scale;
    const double peer_down = s.deepgemm_us[column][1] * scale;
    std::printf(" | DeepGEMM %.0f x%.2f, %.0f x%.2f", peer_up, peer_up / t.gate_up_sorted,
                peer_down, peer_down / t.down);
  }
  std::printf(" | error %.2e\n", error);
  std::fflush(stdout);
}

void bench(const Layer& layer, int64_t num_tokens, const Limits& limits, const Stream& stream) {
  const Shape& s = layer.shape;
  const Call call = make_call(s, num_tokens);
  const auto backend = make_grouped_mm();
  const auto prepared = backend->prepare(layer.query, layer.weights);
  Workspace workspace(kDevice, backend->workspace_bytes(layer.query, num_tokens, 1) + 16384);
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  const int repeats = num_tokens * s.hidden * s.intermediate > int64_t{1} << 36 ? 7 : 21;
  Times times;
  times.whole = graph_us(stream, repeats,
                         [&] { backend->forward(*prepared, call.tokens, workspace, stream); });
  const double error =
      check(layer, call.x.get(), call.ids, call.weights, call.out.get(), num_tokens);
  times.plan = graph_us(stream, 21, [&] {
    const Workspace::Scope scope(workspace);
    plan_routing(call.tokens.top_k_index, s.experts, workspace, stream);
  });
  const Workspace::Scope scope(workspace);
  Parts(layer, call, workspace, stream).measure(repeats, times);
  print(s, call, times, limits, error);
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

// Times of deepgemm on FP8 experts, whole and by part, from replayed graphs, with the ceilings of
// the same run and the bars that are made from them; up to 128 tokens beside the other ways of
// running them. Built by its own target. deepgemm_bench [shape prefix] [T ...]
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

#include "backends/cuda/deepgemm/deepgemm_bench_truth.cuh"
#include "backends/cuda/device/check.h"
#include "backends/cuda/kernels/ceilings.h"
#include "backends/cuda/kernels/hopper_fp8_experts.h"
#include "backends/cuda/kernels/hopper_fp8_few.h"
#include "backends/cuda/kernels/hopper_fp8_rows.h"
#include "backends/cuda/kernels/lt_fp8.h"
#include "backends/cuda/kernels/routing.h"
#include "core/device_runtime.h"
#include "quant/activations.h"

namespace cadre::cuda {
std::unique_ptr<ExpertsBackend> make_deepgemm();

namespace {

constexpr Device kDevice = {DeviceType::kCuda, 0};

struct Shape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
  // DeepGEMM 2.6.1 FP8 on an H200 that reached 1389 TFLOP/s: gate_up, down at T = 1024, 4096,
  // 16384.
  double deepgemm_us[3][2];
};

const Shape kShapes[] = {
    {"qwen3-30b", 128, 8, 2048, 768, {{127, 74}, {221, 138}, {658, 407}}},
    {"qwen1.5", 60, 4, 2048, 1408, {{117, 62}, {211, 117}, {608, 331}}},
    {"deepseek-v3", 256, 8, 7168, 2048, {{1949, 957}, {2392, 1283}, {7180, 3755}}},
    {"mixtral", 8, 2, 4096, 14336, {{460, 237}, {1460, 747}, {6061, 2872}}},
};

template <typename T>
std::shared_ptr<void> upload(const std::vector<T>& values) {
  auto memory = allocate_shared_memory(kDevice, values.size() * sizeof(T));
  CADRE_CUDA_CHECK(
      cudaMemcpy(memory.get(), values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  return memory;
}
template <typename T>
std::vector<T> download(const void* from, int64_t count) {
  std::vector<T> values(static_cast<size_t>(count));
  CADRE_CUDA_CHECK(
      cudaMemcpy(values.data(), from, values.size() * sizeof(T), cudaMemcpyDeviceToHost));
  return values;
}

std::shared_ptr<void> random_codes(int64_t count, uint64_t seed) {
  auto memory = allocate_shared_memory(kDevice, static_cast<size_t>(count));
  fill_codes<<<2048, 256>>>(static_cast<uint32_t*>(memory.get()), count / 4, seed);
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  return memory;
}
std::shared_ptr<void> random_scales(int64_t count, int64_t k, uint64_t seed) {
  auto memory = allocate_shared_memory(kDevice, static_cast<size_t>(count) * 4);
  const float unit = 1.5f / 128.0f / std::sqrt(static_cast<float>(k));
  fill_scales<<<static_cast<unsigned>((count + 255) / 256), 256>>>(
      static_cast<float*>(memory.get()), count, unit, seed);
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  return memory;
}

double median(std::vector<float> times) {
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Microseconds of what `start` puts into the stream, median.
double time_us(cudaStream_t s, int repeats, const std::function<void()>& start) {
  cudaEvent_t begin, end;
  CADRE_CUDA_CHECK(cudaEventCreate(&begin));
  CADRE_CUDA_CHECK(cudaEventCreate(&end));
  std::vector<float> times;
  start();
  CADRE_CUDA_CHECK(cudaStreamSynchronize(s));
  std::this_thread::sleep_for(std::chrono::milliseconds(60));  // the clock falls under load
  for (int i = 0; i < repeats + 2; ++i) {
    CADRE_CUDA_CHECK(cudaEventRecord(begin, s));
    start();
    CADRE_CUDA_CHECK(cudaEventRecord(end, s));
    CADRE_CUDA_CHECK(cudaStreamSynchronize(s));
    float ms = 0;
    CADRE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms * 1000);
  }
  CADRE_CUDA_CHECK(cudaEventDestroy(begin));
  CADRE_CUDA_CHECK(cudaEventDestroy(end));
  return median(times);
}
double graph_us(const Stream& stream, int repeats, const std::function<void()>& call) {
  const auto graph = device_runtime(kDevice).capture(stream, [&] { call(); });
  return time_us(stream_of(stream), repeats, [&] { graph->launch(stream); });
}

constexpr int64_t kMostDecodeTokens = 128;

struct Limits {
  double flops = 0;  // of the 8192^3 FP8 product
  double read = 0;   // bytes/s
  double copy = 0;   // read and written
};

double square_flops(const Stream& stream) {
  constexpr int64_t kSize = 8192;
  constexpr size_t kSpace = size_t{32} << 20;
  const auto a = random_codes(kSize * kSize, 1), b = random_codes(kSize * kSize, 2);
  const auto out = allocate_shared_memory(kDevice, kSize * kSize * 2);
  const auto space = allocate_shared_memory(kDevice, kSpace);
  double best = 0;
  for (const bool fast : {true, false}) {
    const LtFp8 square(kSize, kSize, kSize, space.get(), kSpace, fast);
    if (!square.ready()) continue;
    const double us = time_us(stream_of(stream), 20,
                              [&] { square.run(a.get(), b.get(), out.get(), stream_of(stream)); });
    const double flops = 2.0 * kSize * kSize * kSize / us * 1e6;
    std::printf("8192^3 fp8 through cuBLASLt, fast sums %d: %.1f TFLOP/s\n", fast, flops * 1e-12);
    best = std::max(best, flops);
  }
  return best;
}

double copy_bytes(const Stream& stream) {
  constexpr int64_t kBytes = int64_t{1} << 30;
  const auto from = random_codes(kBytes, 3);
  const auto to = allocate_shared_memory(kDevice, kBytes);
  double best = 0;
  for (const unsigned blocks : {264u, 528u, 1056u}) {
    const double us = time_us(stream_of(stream), 10, [&] {
      copy_all<<<blocks, 512, 0, stream_of(stream)>>>(static_cast<const int4*>(from.get()),
                                                      static_cast<int4*>(to.get()), kBytes / 16);
    });
    best = std::max(best, 2.0 * kBytes / us * 1e6);
  }
  return best;
}

double read_bytes(const Stream& stream) {
  const auto memory = random_codes(int64_t{4} << 30, 4);
  const TensorView view(memory.get(), DType::kBF16, {int64_t{2} << 30}, kDevice);
  double best = 0;
  for (size_t way = 0; way < ceilings().ways_of_reading().size(); ++way) {
    for (int i = 0; i < 3; ++i) {
      best = std::max(best, ceilings().read_bandwidth(view, way, stream));
    }
  }
  return best;
}

struct Layer {
  Shape shape;
  std::shared_ptr<void> up, up_scales, down, down_scales;  // up: gate, then up of each expert
  std::shared_ptr<const ExpertsWeights> weights;
  ExpertsQuery query;
};

Layer make_layer(const Shape& s) {
  Layer layer;
  layer.shape = s;
  const int64_t e = s.experts, h = s.hidden, i = s.intermediate;
  const int64_t h_blocks = h / 128, i_blocks = i / 128;
  layer.up = random_codes(e * 2 * i * h, 11);
  layer.down = random_codes(e * h * i, 13);
  layer.up_scales = random_scales(e * 2 * i_blocks * h_blocks, h, 15);
  layer.down_scales = random_scales(e * h_blocks * i_blocks, i, 17);
  layer.query.config.num_experts = e;
  layer.query.config.hidden_size = h;
  layer.query.config.intermediate_size = i;
  layer.query.config.top_k = s.top_k;
  layer.query.device = kDevice;
  layer.query.format = StorageFormat::kFp8Block;
  layer.query.scale_layout = {DType::kF32, 128, 128};
  layer.query.activation_scheme = ActivationScheme::kDynamic;
  auto w = std::make_shared<ExpertsWeights>();
  w->device = kDevice;
  w->format = layer.query.format;
  w->scale_layout = layer.query.scale_layout;
  const auto matrix = [](void* codes, void* scales, int64_t row, int64_t k) {
    ExpertMatrix m;
    m.data = static_cast<char*>(codes) + row * k;
    m.row_stride = k;
    m.scales = static_cast<char*>(scales) + row / 128 * (k / 128) * 4;
    m.scale_row_stride = k / 128;
    return m;
  };
  for (int64_t x = 0; x < e; ++x) {
    w->gate.push_back(matrix(layer.up.get(), layer.up_scales.get(), x * 2 * i, h));
    w->up.push_back(matrix(layer.up.get(), layer.up_scales.get(), x * 2 * i + i, h));
    w->down.push_back(matrix(layer.down.get(), layer.down_scales.get(), x * h, i));
  }
  layer.weights = w;
  return layer;
}

// One call's tensors on the device, and what they were made from.
struct Call {
  std::vector<int64_t> ids;
  std::vector<float> weights;
  std::shared_ptr<void> x, d_ids, d_weights, out;
  RoutedTokens tokens;
};

void draw_ids(const Shape& s, int64_t num_tokens, unsigned seed, Call& c) {
  std::mt19937 random(seed);
  for (int64_t t = 0; t < num_tokens; ++t) {
    std::set<int64_t> seen;
    while (static_cast<int64_t>(seen.size()) < s.top_k) {
      const int64_t id = static_cast<int64_t>(random()) % s.experts;
      if (seen.insert(id).second) c.ids.push_back(id);
    }
    for (int64_t k = 0; k < s.top_k; ++k) {
      c.weights.push_back(0.1f + static_cast<float>(random() % 1000) / 2000.0f);
    }
  }
}

Call make_call(const Shape& s, int64_t num_tokens, unsigned seed = 5) {
  Call c;
  draw_ids(s, num_tokens, seed, c);
  const auto bytes = static_cast<size_t>(num_tokens * s.hidden) * 2;
  c.x = allocate_shared_memory(kDevice, bytes);
  fill_bf16<<<1024, 256>>>(static_cast<__nv_bfloat16*>(c.x.get()), num_tokens * s.hidden, 19);
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
  double whole = 0, plan = 0, quantize = 0, up = 0, down = 0, combine = 0;
};

// The parts of a forward one by one, in memory of their own.
class Parts {
 public:
  Parts(const Layer& layer, const Call& call, Workspace& space, const Stream& stream)
      : layer_(layer),
        call_(call),
        stream_(stream),
        addresses_(layer.query, layer.weights),
        maps_(make_hopper_fp8_maps(layer.query, addresses_.device)),
        pairs_(call.tokens.top_k_index.numel()),
        plan_(plan_routing(call.tokens.top_k_index, layer.shape.experts, space, stream)),
        x_(rows(layer.shape.hidden, space)),
        h_(rows(layer.shape.intermediate, space)),
        y_(space.allocate(static_cast<size_t>(pairs_ * layer.shape.hidden) * 2)),
        counts_(static_cast<uint32_t*>(space.allocate(256))) {}

  void measure(int repeats, Times& times) {
    times.quantize = graph_us(stream_, 21, [&] { quantize(); });
    times.up = gemm_us(up(), repeats);
    times.down = gemm_us(down(), repeats);
    const TensorView y(y_, DType::kBF16, {pairs_, layer_.shape.hidden}, kDevice);
    times.combine = graph_us(stream_, 21, [&] {
      combine(y, plan_.row_of_pair, call_.tokens.top_k_weights, call_.tokens.output, stream_);
    });
  }

  void quantize() const {
    quantize_tokens({call_.tokens.hidden_states, plan_, layer_.shape.top_k, x_}, stream_);
  }

  /// Of the whole forward's output, some tokens, in double; after quantize().
  double error() const {
    const Shape& s = layer_.shape;
    const int64_t num_tokens = call_.tokens.hidden_states.dim(0);
    const int64_t samples = std::min<int64_t>(num_tokens, 24), pairs = samples * s.top_k;
    const auto row_of_pair = download<int32_t>(plan_.row_of_pair, pairs_);
    std::vector<int64_t> rows, experts, own(static_cast<size_t>(pairs));
    for (int64_t i = 0; i < pairs; ++i) {
      const int64_t pair = i / s.top_k * num_tokens / samples * s.top_k + i % s.top_k;
      rows.push_back(row_of_pair[static_cast<size_t>(pair)]);
      experts.push_back(call_.ids[static_cast<size_t>(pair)]);
      own[static_cast<size_t>(i)] = i;
    }
    const auto d_rows = upload(rows), d_experts = upload(experts), d_own = upload(own);
    const auto h = allocate_shared_memory(kDevice, static_cast<size_t>(pairs * s.intermediate) * 4);
    const auto y = allocate_shared_memory(kDevice, static_cast<size_t>(pairs * s.hidden) * 8);
    const auto count = static_cast<unsigned>(pairs);
    truth_h<<<dim3(static_cast<unsigned>((s.intermediate + 7) / 8), count), 256>>>(
        truth(x_, layer_.up, layer_.up_scales, 2 * s.intermediate, s.hidden, pairs_),
        static_cast<int64_t*>(d_rows.get()), static_cast<int64_t*>(d_experts.get()),
        static_cast<float*>(h.get()));
    CADRE_CUDA_CHECK(cudaDeviceSynchronize());
    const Codes codes(download<float>(h.get(), pairs * s.intermediate), pairs, s.intermediate);
    const auto d_codes = upload(codes.codes), d_scales = upload(codes.scales);
    const Fp8Rows h_rows = {static_cast<uint8_t*>(d_codes.get()),
                            static_cast<float*>(d_scales.get())};
    truth_y<<<dim3(static_cast<unsigned>((s.hidden + 7) / 8), count), 256>>>(
        truth(h_rows, layer_.down, layer_.down_scales, s.hidden, s.intermediate, pairs),
        static_cast<int64_t*>(d_own.get()), static_cast<int64_t*>(d_experts.get()),
        static_cast<double*>(y.get()));
    CADRE_CUDA_CHECK(cudaDeviceSynchronize());
    return compare(download<double>(y.get(), pairs * s.hidden), samples);
  }

 private:
  // Rows on the host, as Fp8Rows has them.
  struct Codes {
    Codes(const std::vector<float>& values, int64_t rows, int64_t k)
        : codes(static_cast<size_t>(rows * fp8_row_stride(k))),
          scales(static_cast<size_t>(fp8_groups(k) * fp8_scale_stride(rows))) {
      std::vector<float> own(static_cast<size_t>(fp8_groups(k)));
      for (int64_t r = 0; r < rows; ++r) {
        quantize_activations(values.data() + r * k, k, kFp8Group,
                             codes.data() + r * fp8_row_stride(k), own.data());
        for (size_t g = 0; g < own.size(); ++g) {
          scales[g * static_cast<size_t>(fp8_scale_stride(rows)) + static_cast<size_t>(r)] = own[g];
        }
      }
    }
    std::vector<uint8_t> codes;
    std::vector<float> scales;
  };

  static Truth truth(const Fp8Rows& rows, const std::shared_ptr<void>& weights,
                     const std::shared_ptr<void>& scales, int64_t n, int64_t k, int64_t count) {
    return {rows.codes,
            rows.scales,
            fp8_row_stride(k),
            fp8_scale_stride(count),
            static_cast<const uint8_t*>(weights.get()),
            static_cast<const float*>(scales.get()),
            n,
            k};
  }

  double compare(const std::vector<double>& y, int64_t samples) const {
    const Shape& s = layer_.shape;
    const int64_t num_tokens = call_.tokens.hidden_states.dim(0);
    double difference = 0, norm = 0;
    for (int64_t i = 0; i < samples; ++i) {
      const int64_t t = i * num_tokens / samples;
      const auto got = download<uint16_t>(
          static_cast<const uint16_t*>(call_.out.get()) + t * s.hidden, s.hidden);
      for (int64_t c = 0; c < s.hidden; ++c) {
        double sum = 0;
        for (int64_t k = 0; k < s.top_k; ++k) {
          sum += static_cast<double>(call_.weights[static_cast<size_t>(t * s.top_k + k)]) *
                 y[static_cast<size_t>((i * s.top_k + k) * s.hidden + c)];
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

  Fp8Rows rows(int64_t k, Workspace& space) const {
    Fp8Rows r;
    r.codes = space.allocate<uint8_t>(pairs_ * fp8_row_stride(k));
    r.scales = space.allocate<float>(fp8_groups(k) * fp8_scale_stride(pairs_));
    return r;
  }

  HopperFp8Gemm up() const {
    HopperFp8Gemm g = hopper_fp8_up(layer_.query, addresses_.device, maps_);
    g.rows = x_;
    g.out_rows = h_;
    return finish(g);
  }
  HopperFp8Gemm down() const {
    HopperFp8Gemm g = hopper_fp8_down(layer_.query, addresses_.device, maps_);
    g.rows = h_;
    g.out = y_;
    return finish(g);
  }
  HopperFp8Gemm finish(HopperFp8Gemm g) const {
    g.expert_offsets = plan_.expert_offsets;
    g.max_rows = pairs_;
    g.count = counts_;
    return g;
  }

  double gemm_us(const HopperFp8Gemm& gemm, int repeats) const {
    return graph_us(stream_, repeats, [&] {
      CADRE_CUDA_CHECK(cudaMemsetAsync(counts_, 0, 8, stream_of(stream_)));
      hopper_fp8_gemm(gemm, stream_);
    });
  }

  const Layer& layer_;
  const Call& call_;
  const Stream& stream_;
  CudaPrepared addresses_;
  HopperFp8Maps maps_;
  int64_t pairs_;
  RoutingPlan plan_;
  Fp8Rows x_, h_;
  void* y_;
  uint32_t* counts_;
};

// What DeepGEMM's products and the passes around them would take: each pass its bytes over the copy
// ceiling and 4 us.
double chain_us(const Shape& s, int64_t num_tokens, double products, const Limits& limits) {
  const auto t = static_cast<double>(num_tokens), p = t * static_cast<double>(s.top_k);
  const auto h = static_cast<double>(s.hidden), i = static_cast<double>(s.intermediate);
  const double quantize = t * h * 3, permute = p * h * 2, activate = p * i * 5;
  const double combine = (p + t) * h * 2;
  return products + (quantize + permute + activate + combine) / limits.copy * 1e6 + 4 * 4;
}

void print(const Shape& s, const Call& call, const Times& t, const Limits& limits, double error) {
  const int64_t num_tokens = call.tokens.hidden_states.dim(0);
  const double layer = 6.0 * static_cast<double>(s.hidden * s.intermediate);
  const double flops = layer * static_cast<double>(call.ids.size());
  const std::set<int64_t> active(call.ids.begin(), call.ids.end());
  const double bytes = layer / 2 * static_cast<double>(active.size());
  const double floor_us = std::max(flops / limits.flops, bytes / limits.read) * 1e6;
  std::printf(
      "%-11s T %5lld | whole %8.1f us %6.1f TF floor %7.1f us %4.1f%% | plan %5.1f quantise "
      "%6.1f gate_up %8.1f (%6.1f TF) down %7.1f (%6.1f TF) combine %6.1f",
      s.name, static_cast<long long>(num_tokens), t.whole, flops / t.whole * 1e-6, floor_us,
      floor_us / t.whole * 100, t.plan, t.quantize, t.up, flops * 2 / 3 / t.up * 1e-6, t.down,
      flops / 3 / t.down * 1e-6, t.combine);
  const int column = num_tokens == 1024 ? 0 : num_tokens == 4096 ? 1 : num_tokens == 16384 ? 2 : -1;
  if (column >= 0) {
    const double scale = 1389e12 / limits.flops;
    const double up = s.deepgemm_us[column][0] * scale, down = s.deepgemm_us[column][1] * scale;
    const double chain = chain_us(s, num_tokens, up + down, limits);
    std::printf(" | DeepGEMM %.0f x%.3f, %.0f x%.3f, sum x%.3f, chain %.0f x%.3f", up, up / t.up,
                down, down / t.down, (up + down) / t.whole, chain, chain / t.whole);
  }
  std::printf(" | error %.2e\n", error);
  std::fflush(stdout);
}

void bench(const Layer& layer, int64_t num_tokens, const Limits& limits, const Stream& stream) {
  const Shape& s = layer.shape;
  const Call call = make_call(s, num_tokens);
  const auto backend = make_deepgemm();
  const auto prepared = backend->prepare(layer.query, layer.weights);
  Workspace workspace(kDevice, backend->workspace_bytes(layer.query, num_tokens, 1) + 65536);
  CADRE_CUDA_CHECK(cudaDeviceSynchronize());
  const int repeats = num_tokens * s.hidden * s.intermediate > int64_t{1} << 36 ? 7 : 21;
  Times times;
  times.whole = graph_us(stream, repeats,
                         [&] { backend->forward(*prepared, call.tokens, workspace, stream); });
  const auto out = download<uint16_t>(call.out.get(), num_tokens * s.hidden);
  times.plan = graph_us(stream, 21, [&] {
    const Workspace::Scope scope(workspace);
    plan_routing(call.tokens.top_k_index, s.experts, workspace, stream);
  });
  const Workspace::Scope scope(workspace);
  Parts parts(layer, call, workspace, stream);
  parts.measure(repeats, times);
  CADRE_CUDA_CHECK(cudaMemcpy(call.out.get(), out.data(), out.size() * 2, cudaMemcpyHostToDevice));
  print(s, call, times, limits, parts.error());
}

// Microseconds of forwards over several routings and their floor: one graph of all, chained, and a
// graph for each, one after the other.
struct Decode {
  double chained = 0, alone = 0;
};

Decode time_decode(const std::vector<Call>& calls, const Stream& stream,
                   const std::function<void(const Call&)>& forward) {
  constexpr int kRounds = 2;
  const auto count = static_cast<double>(calls.size());
  Decode d;
  d.chained = graph_us(stream, 21,
                       [&] {
                         for (int r = 0; r < kRounds; ++r) {
                           for (const Call& c : calls) forward(c);
                         }
                       }) /
              (kRounds * count);
  std::vector<std::unique_ptr<DeviceGraph>> graphs;
  for (const Call& c : calls) {
    graphs.push_back(device_runtime(kDevice).capture(stream, [&] { forward(c); }));
  }
  d.alone = time_us(stream_of(stream), 21,
                    [&] {
                      for (const auto& g : graphs) g->launch(stream);
                    }) /
            count;
  return d;
}

void bench_decode(const Layer& layer, int64_t num_tokens, const Limits& limits,
                  const Stream& stream) {
  const Shape& s = layer.shape;
  std::vector<Call> calls;
  double bytes = 0;
  for (unsigned seed = 1; seed <= 8; ++seed) {
    calls.push_back(make_call(s, num_tokens, seed));
    const std::set<int64_t> active(calls.back().ids.begin(), calls.back().ids.end());
    const double codes = 3.0 * static_cast<double>(s.hidden * s.intermediate);
    bytes += static_cast<double>(active.size()) * codes * (1 + 4.0 / (128 * 128)) / 8;
  }
  const double floor_us = bytes / limits.read * 1e6;
  const CudaPrepared addresses(layer.query, layer.weights);
  const HopperFp8Maps maps = make_hopper_fp8_maps(layer.query, addresses.device);
  ExpertsBackend& batched_mm = find_backend("batched_mm", DeviceType::kCuda);
  const auto prepared = batched_mm.prepare(layer.query, layer.weights);
  Workspace workspace(kDevice, std::max({hopper_fp8_few_bytes(layer.query, num_tokens),
                                         hopper_fp8_bytes(layer.query, num_tokens),
                                         batched_mm.workspace_bytes(layer.query, num_tokens, 1)}) +
                                   65536);
  const auto print_row = [&](const char* name, const Decode& d) {
    std::printf(
        "%-11s T %4lld floor %7.1f us | %-10s chained %7.1f us %.3f x, alone %7.1f us %.3f x\n",
        s.name, static_cast<long long>(num_tokens), floor_us, name, d.chained, d.chained / floor_us,
        d.alone, d.alone / floor_us);
    std::fflush(stdout);
  };
  print_row("few", time_decode(calls, stream, [&](const Call& c) {
              hopper_fp8_few_forward(layer.query, addresses.device, maps, c.tokens, workspace,
                                     stream);
            }));
  {
    const Workspace::Scope scope(workspace);
    const Parts parts(layer, calls[0], workspace, stream);
    parts.quantize();
    std::printf("error %.2e\n", parts.error());
  }
  print_row("sorted", time_decode(calls, stream, [&](const Call& c) {
              hopper_fp8_forward(layer.query, addresses.device, maps, c.tokens, workspace, stream);
            }));
  if (num_tokens > 64) return;
  print_row("batched_mm", time_decode(calls, stream, [&](const Call& c) {
              batched_mm.forward(*prepared, c.tokens, workspace, stream);
            }));
}

}  // namespace
}  // namespace cadre::cuda

int main(int argc, char** argv) {
  using namespace cadre;
  using namespace cadre::cuda;
  std::setvbuf(stdout, nullptr, _IOLBF, 4096);
  ThreadPool* none = nullptr;
  const auto own = device_runtime(kDevice).make_stream(0, none);
  const Stream& stream = own->get();
  std::vector<int64_t> tokens;
  for (int i = 2; i < argc; ++i) tokens.push_back(std::atoll(argv[i]));
  if (tokens.empty()) tokens = {1024, 4096, 16384};
  Limits limits;
  limits.flops = square_flops(stream);
  limits.copy = copy_bytes(stream);
  limits.read = read_bytes(stream);
  if (limits.flops == 0) limits.flops = 1389e12;  // without cuBLASLt: as that H200 had it
  std::printf("%s: 8192^3 fp8 %.1f TFLOP/s, read %.3f TB/s, copy %.3f TB/s\n",
              ceilings().processor().c_str(), limits.flops * 1e-12, limits.read * 1e-12,
              limits.copy * 1e-12);
  for (const Shape& shape : kShapes) {
    if (argc > 1 && std::strncmp(shape.name, argv[1], std::strlen(argv[1])) != 0) continue;
    const Layer layer = make_layer(shape);
    for (const int64_t t : tokens) {
      if (t <= kMostDecodeTokens) {
        bench_decode(layer, t, limits, stream);
      } else {
        bench(layer, t, limits, stream);
      }
    }
  }
  std::printf("8192^3 once more: ");
  square_flops(stream);
  return 0;
}

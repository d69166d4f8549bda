// Times of batched_mm from routed ids to combined output against the bytes of the active experts:
// graphs of forwards over rotating layers and routings, the read-only stream of the same run.
//     cuda_batched_mm_bench [SHAPE [FORMAT [TOKENS ...]]]
#include <cuda_bf16.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <set>
#include <vector>

#include "backends/cuda/device/check.h"
#include "cadre/allocator.h"
#include "cadre/experts.h"
#include "core/device_runtime.h"

namespace cadre::cuda {
namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};

struct LayerShape {
  const char* name;
  int64_t experts, top_k, hidden, intermediate;
  int layers;
};
constexpr LayerShape kShapes[] = {{"qwen3-30b-a3b", 128, 8, 2048, 768, 2},
                                  {"qwen1.5-moe", 60, 4, 2048, 1408, 2},
                                  {"deepseek-v3", 256, 8, 7168, 2048, 1},
                                  {"mixtral-8x7b", 8, 2, 4096, 14336, 4}};

__global__ void fill_random(__nv_bfloat16* data, int64_t count, uint32_t seed) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = (static_cast<uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    const float unit = static_cast<float>(static_cast<uint32_t>(z >> 32)) * 0x1p-31f - 1.0f;
    data[i] = __float2bfloat16(unit * 0.05f);
  }
}

__global__ void __launch_bounds__(512) read_stream(const float4* data, int64_t count, float* out) {
  const int64_t step = int64_t{gridDim.x} * 512;
  float sum = 0;
  int64_t i = int64_t{blockIdx.x} * 512 + threadIdx.x;
  for (; i + 7 * step < count; i += 8 * step) {
    float4 v[8];
#pragma unroll
    for (int j = 0; j < 8; ++j) v[j] = __ldcs(data + i + j * step);
#pragma unroll
    for (int j = 0; j < 8; ++j) sum += v[j].x + v[j].y + v[j].z + v[j].w;
  }
  if (sum == 1.2345f) *out = sum;
}

// Codes of e4m3 without NaN, any bytes for e2m1; E8M0 scales of about 1 / 64.
__global__ void fill_bytes(uint8_t* data, int64_t count, uint32_t seed, bool are_scales) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    uint64_t z = (static_cast<uint64_t>(i) + seed) * 0x9e3779b97f4a7c15ull;
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9ull;
    const auto byte = static_cast<uint8_t>(z >> 40);
    data[i] = are_scales ? 119 + byte % 4 : (byte & 0x7f) == 0x7f ? 0 : byte;
  }
}
__global__ void fill_scales(float* data, int64_t count) {
  const int64_t step = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count; i += step) {
    data[i] = 0.001f * static_cast<float>(1 + i % 7);
  }
}

// How weights are stored, and what is allowed over the floor at 1, up to 8, and more tokens.
struct Format {
  const char* name;
  StorageFormat format;
  ScaleLayout scales;
  double bars[3];
};
constexpr Format kFormats[] = {
    {"bf16", StorageFormat::kBF16, {}, {1.35, 1.15, 1.12}},
    {"fp8", StorageFormat::kFp8Block, {DType::kF32, 128, 128}, {1.5, 1.2, 1.15}},
    {"fp8-ue8m0", StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}, {1.5, 1.2, 1.15}},
    {"mxfp8", StorageFormat::kMxFp8, {DType::kF8E8M0, 1, 32}, {1.5, 1.2, 1.15}},
    {"fp4", StorageFormat::kFp4, {DType::kF8E8M0, 1, 32}, {2.2, 1.35, 1.25}}};

class Events {
 public:
  Events() {
    CADRE_CUDA_CHECK(cudaEventCreate(&begin_));
    CADRE_CUDA_CHECK(cudaEventCreate(&end_));
  }
  template <typename Work>
  double us(const Stream& stream, const Work& work) {
    CADRE_CUDA_CHECK(cudaEventRecord(begin_, stream_of(stream)));
    work();
    CADRE_CUDA_CHECK(cudaEventRecord(end_, stream_of(stream)));
    CADRE_CUDA_CHECK(cudaEventSynchronize(end_));
    float ms = 0;
    CADRE_CUDA_CHECK(cudaEventElapsedTime(&ms, begin_, end_));
    return ms * 1e3;
  }

 private:
  cudaEvent_t begin_ = nullptr;
  cudaEvent_t end_ = nullptr;
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

double stream_ceiling(const Stream& stream) {
  const int64_t bytes = int64_t{1} << 30;
  const auto memory = allocate_shared_memory(kGpu, static_cast<size_t>(2 * bytes));
  fill_random<<<2048, 256, 0, stream_of(stream)>>>(static_cast<__nv_bfloat16*>(memory.get()), bytes,
                                                   1);
  Events events;
  double best = 0;
  for (const int grid : {132, 264, 528, 1056}) {
    std::vector<double> times;
    for (int i = 0; i < 12; ++i) {
      const auto* data =
          reinterpret_cast<const float4*>(static_cast<char*>(memory.get()) + (i % 2) * bytes);
      const double us = events.us(stream, [&] {
        read_stream<<<grid, 512, 0, stream_of(stream)>>>(data, bytes / 16,
                                                         static_cast<float*>(memory.get()));
      });
      if (i >= 2) times.push_back(us);
    }
    best = std::max(best, static_cast<double>(bytes) / median(times) * 1e-6);
  }
  return best;
}

class Bench {
 public:
  Bench(const LayerShape& shape, const Format& format, const Stream& stream)
      : shape_(shape), format_(format), stream_(stream) {
    query_.config = {.num_experts = shape.experts,
                     .hidden_size = shape.hidden,
                     .intermediate_size = shape.intermediate,
                     .top_k = shape.top_k};
    query_.device = kGpu;
    query_.format = format.format;
    query_.scale_layout = format.scales;
    const bool is_fp8 = format.format == StorageFormat::kFp8Block;
    if (is_fp8) query_.activation_scheme = ActivationScheme::kDynamic;
    // As many layers as bfloat16 takes for the same bytes.
    const int layers = is_quantized(format.format) ? 2 * shape.layers : shape.layers;
    for (int l = 0; l < layers; ++l) {
      auto weights = std::make_shared<ExpertsWeights>();
      weights->device = kGpu;
      weights->format = format.format;
      weights->scale_layout = format.scales;
      weights->gate = matrices(shape.intermediate, shape.hidden);
      weights->up = matrices(shape.intermediate, shape.hidden);
      weights->down = matrices(shape.hidden, shape.intermediate);
      prepared_.push_back(backend_.prepare(query_, weights));
    }
  }

  void run(int64_t tokens, double ceiling, int forwards) {
    std::mt19937 random(static_cast<uint32_t>(tokens));
    int64_t active = 0;
    std::vector<int32_t> ids;
    for (int f = 0; f < forwards; ++f) {
      std::set<int64_t> used;
      for (int64_t t = 0; t < tokens; ++t) {
        std::set<int64_t> mine;
        while (static_cast<int64_t>(mine.size()) < shape_.top_k) {
          mine.insert(random() % static_cast<uint32_t>(shape_.experts));
        }
        for (const int64_t e : mine) ids.push_back(static_cast<int32_t>(e));
        used.insert(mine.begin(), mine.end());
      }
      active += static_cast<int64_t>(used.size());
    }
    const auto x = allocate_shared_memory(kGpu, static_cast<size_t>(tokens * shape_.hidden) * 2);
    const auto out = allocate_shared_memory(kGpu, static_cast<size_t>(tokens * shape_.hidden) * 2);
    const auto id_memory = allocate_shared_memory(kGpu, ids.size() * 4);
    const auto weights = allocate_shared_memory(kGpu, ids.size() * 4);
    fill_random<<<64, 256, 0, stream_of(stream_)>>>(static_cast<__nv_bfloat16*>(x.get()),
                                                    tokens * shape_.hidden, 5);
    fill_random<<<64, 256, 0, stream_of(stream_)>>>(static_cast<__nv_bfloat16*>(weights.get()),
                                                    static_cast<int64_t>(ids.size()) * 2, 6);
    CADRE_CUDA_CHECK(
        cudaMemcpy(id_memory.get(), ids.data(), ids.size() * 4, cudaMemcpyHostToDevice));
    Workspace workspace(kGpu, backend_.workspace_bytes(query_, tokens, 1));
    const auto forward = [&](int f) {
      const int64_t at = f * tokens * shape_.top_k;
      const RoutedTokens call = {
          {x.get(), DType::kBF16, {tokens, shape_.hidden}, kGpu},
          {static_cast<int32_t*>(id_memory.get()) + at, DType::kI32, {tokens, shape_.top_k}, kGpu},
          {static_cast<float*>(weights.get()) + at, DType::kF32, {tokens, shape_.top_k}, kGpu},
          {out.get(), DType::kBF16, {tokens, shape_.hidden}, kGpu}};
      backend_.forward(*prepared_[static_cast<size_t>(f) % prepared_.size()], call, workspace,
                       stream_);
    };
    DeviceRuntime& runtime = device_runtime(kGpu);
    if (std::getenv("CADRE_BENCH_DIRECT") != nullptr) {  // for ncu
      for (int f = 0; f < 3; ++f) forward(f);
      runtime.synchronize(stream_);
      return;
    }
    const auto chain = runtime.capture(stream_, [&] {
      for (int f = 0; f < forwards; ++f) forward(f);
    });
    std::vector<std::unique_ptr<DeviceGraph>> singles;
    for (int f = 0; f < forwards; ++f) {
      singles.push_back(runtime.capture(stream_, [&] { forward(f); }));
    }
    const double in_chain = time(forwards, [&] { chain->launch(stream_); });
    const double alone = time(forwards, [&] {
      for (const auto& graph : singles) graph->launch(stream_);
    });
    const double bytes = static_cast<double>(active) / forwards *
                         static_cast<double>(2 * matrix_bytes(shape_.intermediate, shape_.hidden) +
                                             matrix_bytes(shape_.hidden, shape_.intermediate));
    const double floor = bytes / ceiling * 1e-6;
    const double bar = format_.bars[tokens == 1 ? 0 : tokens <= 8 ? 1 : 2];
    printf(
        "%-14s %-9s T=%-4lld active %6.1f floor %8.1f us  chained %8.1f (%.3f) %s  alone %8.1f "
        "(%.3f)\n",
        shape_.name, format_.name, static_cast<long long>(tokens),
        static_cast<double>(active) / forwards, floor, in_chain, in_chain / floor,
        in_chain / floor <= bar ? "ok  " : "MISS", alone, alone / floor);
    fflush(stdout);
  }

 private:
  int64_t blocks(int64_t n, int64_t k) const {
    const ScaleLayout& s = format_.scales;
    return ((n + s.block_rows - 1) / s.block_rows) * ((k + s.block_cols - 1) / s.block_cols);
  }
  int64_t matrix_bytes(int64_t n, int64_t k) const {
    const int64_t values = n * row_bytes(format_.format, k);
    if (!is_quantized(format_.format)) return values;
    return values + blocks(n, k) * static_cast<int64_t>(size_of(format_.scales.dtype));
  }

  // A matrix for each expert, one behind the other, random.
  std::vector<ExpertMatrix> matrices(int64_t n, int64_t k) {
    const auto take = [&](int64_t bytes) {
      memory_.push_back(allocate_shared_memory(kGpu, static_cast<size_t>(bytes)));
      return static_cast<uint8_t*>(memory_.back().get());
    };
    const int64_t row = row_bytes(format_.format, k);
    uint8_t* const data = take(shape_.experts * n * row);
    std::vector<ExpertMatrix> experts(static_cast<size_t>(shape_.experts));
    const auto seed = static_cast<uint32_t>(memory_.size());
    if (!is_quantized(format_.format)) {
      fill_random<<<4096, 256, 0, stream_of(stream_)>>>(reinterpret_cast<__nv_bfloat16*>(data),
                                                        shape_.experts * n * k, seed);
      for (int64_t e = 0; e < shape_.experts; ++e) {
        experts[static_cast<size_t>(e)] = {data + e * n * row, k, 1};
      }
      return experts;
    }
    fill_bytes<<<4096, 256, 0, stream_of(stream_)>>>(data, shape_.experts * n * row, seed, false);
    const auto scale = static_cast<int64_t>(size_of(format_.scales.dtype));
    const int64_t count = shape_.experts * blocks(n, k);
    uint8_t* const scales = take(count * scale);
    if (scale == 4) {
      fill_scales<<<1024, 256, 0, stream_of(stream_)>>>(reinterpret_cast<float*>(scales), count);
    } else {
      fill_bytes<<<1024, 256, 0, stream_of(stream_)>>>(scales, count, seed, true);
    }
    for (int64_t e = 0; e < shape_.experts; ++e) {
      ExpertMatrix& m = experts[static_cast<size_t>(e)];
      m.data = data + e * n * row;
      m.row_stride = row;
      m.scales = scales + e * blocks(n, k) * scale;
      m.scale_row_stride = (k + format_.scales.block_cols - 1) / format_.scales.block_cols;
    }
    return experts;
  }

  template <typename Work>
  double time(int forwards, const Work& work) {
    Events events;
    std::vector<double> times;
    for (int i = 0; i < 24; ++i) {
      const double us = events.us(stream_, work);
      if (i >= 3) times.push_back(us / forwards);
    }
    return median(times);
  }

  LayerShape shape_;
  Format format_;
  const Stream& stream_;
  ExpertsQuery query_;
  ExpertsBackend& backend_ = find_backend("batched_mm", DeviceType::kCuda);
  std::vector<std::shared_ptr<void>> memory_;
  std::vector<std::unique_ptr<PreparedExperts>> prepared_;
};

int main_of(int argc, char** argv) {
  const char* only = argc > 1 ? argv[1] : "";
  const char* only_format = argc > 2 ? argv[2] : "bf16";
  std::vector<int64_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  if (sizes.empty()) sizes = {1, 2, 4, 8, 16, 32, 64, 128};
  DeviceRuntime& runtime = device_runtime(kGpu);
  const auto stream = runtime.make_stream(0, nullptr);
  const double ceiling = stream_ceiling(stream->get());
  printf("%s, read-only stream %.3f TB/s\n", runtime.properties(0).name.c_str(), ceiling);
  for (const LayerShape& shape : kShapes) {
    if (std::strstr(shape.name, only) == nullptr) continue;
    for (const Format& format : kFormats) {
      if (std::strcmp(format.name, only_format) != 0) continue;
      Bench bench(shape, format, stream->get());
      for (const int64_t tokens : sizes) bench.run(tokens, ceiling, tokens <= 8 ? 16 : 4);
    }
  }
  return 0;
}

}  // namespace
}  // namespace cadre::cuda

int main(int argc, char** argv) { return cadre::cuda::main_of(argc, argv); }

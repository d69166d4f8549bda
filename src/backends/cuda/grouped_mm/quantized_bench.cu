// Times of quantised experts and dense products on a GPU, random codes and routing, each call with
// another routing, medians of 20: ninja cuda_quantized_bench, then
//   cuda_quantized_bench [shape] (qwen3, qwen15; default qwen3)
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cadre/experts.h"
#include "cadre/quantization.h"
#include "core/device_runtime.h"
#include "dense/dense_ops.h"

namespace cadre::cuda {

std::unique_ptr<ExpertsBackend> make_grouped_mm();

namespace {

constexpr Device kGpu = {DeviceType::kCuda, 0};
constexpr int kRepeats = 20;

// (random & mask) + base
__global__ void fill_kernel(uint8_t* bytes, size_t count, uint8_t mask, uint8_t base) {
  for (size_t i = size_t{blockIdx.x} * blockDim.x + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint64_t x = i * 0x9e3779b97f4a7c15ull;
    x ^= x >> 32;
    x *= 0xd6e8feb86659fd93ull;
    bytes[i] = static_cast<uint8_t>((x >> 40 & mask) + base);
  }
}

struct Bench {
  DeviceRuntime& runtime = device_runtime(kGpu);
  std::unique_ptr<DeviceStream> stream = runtime.make_stream(0, nullptr);
  std::mt19937 random{1};

  Tensor random_bytes(DType dtype, const Dims& shape, uint8_t mask, uint8_t base) {
    Tensor t(dtype, shape, kGpu);
    fill_kernel<<<1024, 256>>>(static_cast<uint8_t*>(t->mutable_data()), t->nbytes(), mask, base);
    cudaDeviceSynchronize();
    return t;
  }
  // Of magnitude 2^-7 to 2.
  Tensor random_bf16(const Dims& shape) { return random_bytes(DType::kBF16, shape, 0x83, 0x3c); }
  Tensor scales_of(const ScaleLayout& layout, const Dims& shape) {
    if (layout.dtype == DType::kF8E8M0) return random_bytes(layout.dtype, shape, 3, 118);
    const Tensor host(DType::kF32, shape);
    std::fill_n(host->as<float>(), host->numel(), 0.002f);
    return upload(host);
  }
  Tensor upload(const TensorView& host) {
    Tensor t(host.dtype(), host.shape(), kGpu);
    copy_tensor(host, t, stream->get());
    runtime.synchronize(stream->get());
    return t;
  }

  template <typename Call>
  float median_us(Call call) {
    cudaEvent_t begin;
    cudaEvent_t end;
    cudaEventCreate(&begin);
    cudaEventCreate(&end);
    const auto on = static_cast<cudaStream_t>(stream->get().handle);
    std::vector<float> times;
    for (int i = -3; i < kRepeats; ++i) {
      cudaEventRecord(begin, on);
      call(i + 3);
      cudaEventRecord(end, on);
      cudaEventSynchronize(end);
      float ms = 0;
      cudaEventElapsedTime(&ms, begin, end);
      if (i >= 0) times.push_back(1000 * ms);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  Tensor ids(int64_t tokens, const ExpertsConfig& c) {
    const Tensor host(DType::kI32, {tokens, c.top_k});
    std::vector<int32_t> experts(static_cast<size_t>(c.num_experts));
    for (size_t e = 0; e < experts.size(); ++e) experts[e] = static_cast<int32_t>(e);
    for (int64_t t = 0; t < tokens; ++t) {
      for (int64_t s = 0; s < c.top_k; ++s) {
        const auto other =
            static_cast<size_t>(s) + random() % (experts.size() - static_cast<size_t>(s));
        std::swap(experts[static_cast<size_t>(s)], experts[other]);
        host->as<int32_t>()[t * c.top_k + s] = experts[static_cast<size_t>(s)];
      }
    }
    return upload(host);
  }

  void experts(const ExpertsConfig& c, StorageFormat format, const std::vector<int64_t>& tokens) {
    const int64_t e = c.num_experts;
    const int64_t h = c.hidden_size;
    const int64_t i = c.intermediate_size;
    ExpertsQuery query;
    query.config = c;
    query.device = kGpu;
    query.format = format;
    std::shared_ptr<ExpertsWeights> weights;
    std::vector<Tensor> kept;
    if (is_quantized(format)) {
      const ScaleLayout layout = scale_layout_of(format);
      query.scale_layout = layout;
      const bool is_mx = layout.block_rows == 1;
      query.activation_scheme = is_mx ? ActivationScheme::kNone : ActivationScheme::kDynamic;
      const bool is_fp4 = format == StorageFormat::kFp4;
      const auto values = [&](int64_t n, int64_t k) {
        return random_bytes(is_fp4 ? DType::kI8 : DType::kF8E4M3, {e, n, row_bytes(format, k)},
                            is_fp4 ? 0xff : 0xbf, 0);
      };
      const auto scales = [&](int64_t n, int64_t k) {
        const Dims one = scale_shape(layout, n, k);
        return scales_of(layout, {e, one[0], one[1]});
      };
      kept = {values(2 * i, h), scales(2 * i, h), values(h, i), scales(h, i)};
      QuantizedFusedExperts fused;
      fused.gate_up_proj = {format, layout, kept[0], kept[1]};
      fused.down_proj = {format, layout, kept[2], kept[3]};
      weights = std::make_shared<ExpertsWeights>(make_experts_weights(c, fused));
    } else {
      kept = {random_bf16({e, 2 * i, h}), random_bf16({e, h, i})};
      FusedExperts fused;
      fused.gate_up_proj = kept[0];
      fused.down_proj = kept[1];
      weights = std::make_shared<ExpertsWeights>(make_experts_weights(c, fused));
    }
    const auto backend = make_grouped_mm();
    const auto prepared = backend->prepare(query, weights);
    for (const int64_t t : tokens) {
      Workspace workspace(kGpu, backend->workspace_bytes(query, t, 1));
      const Tensor x = random_bf16({t, h});
      const Tensor out(DType::kBF16, {t, h}, kGpu);
      const Tensor host_weights(DType::kF32, {t, c.top_k});
      std::fill_n(host_weights->as<float>(), host_weights->numel(), 0.125f);
      const Tensor routing = upload(host_weights);
      std::vector<Tensor> routings;
      for (int r = 0; r < 4; ++r) routings.push_back(ids(t, c));
      const float us = median_us([&](int r) {
        backend->forward(*prepared, {x, routings[static_cast<size_t>(r) % 4], routing, out},
                         workspace, stream->get());
      });
      std::printf("experts %-8s T %6lld  %9.1f us  %6.1f TFLOP/s\n",
                  std::string(name_of(format)).c_str(), static_cast<long long>(t), us,
                  6e-6 * static_cast<double>(t * c.top_k * h * i) / us);
    }
  }

  void dense(StorageFormat format, int64_t n, int64_t k) {
    const bool is_fp4 = format == StorageFormat::kFp4;
    const ScaleLayout layout = scale_layout_of(format);
    constexpr int kCopies = 8;  // beyond the L2
    std::vector<Tensor> values;
    for (int i = 0; i < kCopies; ++i) {
      values.push_back(random_bytes(is_fp4 ? DType::kI8 : DType::kF8E4M3, {n, row_bytes(format, k)},
                                    is_fp4 ? 0xff : 0xbf, 0));
    }
    const Tensor scales = scales_of(layout, scale_shape(layout, n, k));
    DenseOps& ops = dense_ops(DeviceType::kCuda);
    for (const int64_t t : {1, 4, 16, 64, 1024, 4096}) {
      Workspace workspace(kGpu, ops.linear_workspace_bytes(t, k, DType::kBF16, 1));
      const Tensor x = random_bf16({t, k});
      const Tensor out(DType::kBF16, {t, n}, kGpu);
      const float us = median_us([&](int r) {
        LinearWeights w;
        w.weight = values[static_cast<size_t>(r) % kCopies];
        w.scales = scales;
        w.scale_layout = layout;
        w.activations =
            layout.block_rows == 1 ? ActivationScheme::kNone : ActivationScheme::kDynamic;
        ops.linear(x, w, out, workspace, stream->get());
      });
      std::printf("dense %-8s %lld x %lld  T %6lld  %9.1f us  %6.2f TB/s  %6.1f TFLOP/s\n",
                  std::string(name_of(format)).c_str(), static_cast<long long>(n),
                  static_cast<long long>(k), static_cast<long long>(t), us,
                  1e-6 * static_cast<double>(n * row_bytes(format, k)) / us,
                  2e-6 * static_cast<double>(t * n * k) / us);
    }
  }
};

int run(const std::string& shape) {
  ExpertsConfig c{.num_experts = 128, .hidden_size = 2048, .intermediate_size = 768, .top_k = 8};
  if (shape == "qwen15") {
    c = {.num_experts = 60, .hidden_size = 2048, .intermediate_size = 1408, .top_k = 4};
  }
  Bench bench;
  for (const auto format : {StorageFormat::kBF16, StorageFormat::kFp4, StorageFormat::kMxFp8,
                            StorageFormat::kFp8Block}) {
    bench.experts(c, format, {64, 256, 1024, 4096});
  }
  for (const auto format : {StorageFormat::kFp8Block, StorageFormat::kFp4, StorageFormat::kMxFp8}) {
    bench.dense(format, 4096, 4096);
  }
  return 0;
}

}  // namespace
}  // namespace cadre::cuda

int main(int argc, char** argv) { return cadre::cuda::run(argc > 1 ? argv[1] : "qwen3"); }

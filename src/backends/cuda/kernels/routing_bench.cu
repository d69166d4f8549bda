// Times of the routing plan and of the weighted sum, from replayed graphs. Built by its own target.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/kernels/routing.h"
#include "core/device_runtime.h"

namespace {

using namespace cadre;

constexpr Device kDevice = {DeviceType::kCuda, 0};

__global__ void nothing() {}

// Microseconds of one of `copies` calls in a row, median of 21 replays.
double graph_us(const Stream& stream, int copies, const std::function<void(int)>& call) {
  DeviceRuntime& runtime = device_runtime(kDevice);
  auto* s = static_cast<cudaStream_t>(stream.handle);
  const auto graph = runtime.capture(stream, [&] {
    for (int i = 0; i < copies; ++i) call(i);
  });
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 24; ++i) {
    cudaEventRecord(begin, s);
    graph->launch(stream);
    cudaEventRecord(end, s);
    cudaStreamSynchronize(s);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms * 1000 / copies);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

void bench_plan(const Stream& stream) {
  std::mt19937 random(1);
  auto* s = static_cast<cudaStream_t>(stream.handle);
  std::printf("empty kernel %.2f us\n",
              graph_us(stream, 50, [&](int) { nothing<<<1, 32, 0, s>>>(); }));
  for (const int64_t experts : {60, 128, 256, 512}) {
    for (const int64_t pairs : {8, 64, 512, 2048, 4096, 8192, 32768, 131072, 1048576}) {
      std::vector<int64_t> ids(static_cast<size_t>(pairs));
      for (auto& id : ids) id = random() % experts;
      const auto memory = allocate_shared_memory(kDevice, ids.size() * 8);
      device_runtime(kDevice).copy(memory.get(), ids.data(), ids.size() * 8, stream);
      const TensorView index(memory.get(), DType::kI64, {pairs / 8, 8}, kDevice);
      Workspace workspace(kDevice, cuda::routing_plan_bytes(pairs, experts));
      const double us = graph_us(stream, 50, [&](int) {
        const Workspace::Scope scope(workspace);
        cuda::plan_routing(index, experts, workspace, stream);
      });
      std::printf("plan E %4ld pairs %8ld  %.2f us\n", experts, pairs, us);
    }
  }
}

void bench_combine(const Stream& stream) {
  std::mt19937 random(2);
  constexpr size_t kBytes = size_t{1} << 30;
  const auto a = allocate_shared_memory(kDevice, kBytes);
  const auto b = allocate_shared_memory(kDevice, kBytes);
  auto* s = static_cast<cudaStream_t>(stream.handle);
  cudaMemsetAsync(a.get(), 1, kBytes, s);
  const double copy_us = graph_us(stream, 4, [&](int) {
    cudaMemcpyAsync(b.get(), a.get(), kBytes, cudaMemcpyDeviceToDevice, s);
  });
  const double ceiling = 2.0 * kBytes / copy_us / 1e6;
  std::printf("copy %.2f TB/s\n", ceiling);
  struct Shape {
    int64_t tokens, top_k, hidden;
  };
  for (const Shape c : {Shape{1, 8, 2048}, Shape{64, 8, 2048}, Shape{1024, 8, 2048},
                        Shape{4096, 8, 2048}, Shape{16384, 8, 2048}, Shape{4096, 8, 7168},
                        Shape{16384, 2, 4096}, Shape{16384, 4, 2048}}) {
    const int64_t pairs = c.tokens * c.top_k;
    std::vector<int32_t> rows(static_cast<size_t>(pairs));
    for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<int32_t>(i);
    std::shuffle(rows.begin(), rows.end(), random);
    const auto map = allocate_shared_memory(kDevice, rows.size() * 4);
    const auto weights = allocate_shared_memory(kDevice, rows.size() * 4);
    device_runtime(kDevice).copy(map.get(), rows.data(), rows.size() * 4, stream);
    device_runtime(kDevice).fill(weights.get(), 0, rows.size() * 4, stream);
    for (const DType y : {DType::kBF16, DType::kF32}) {
      const double bytes = static_cast<double>(pairs * c.hidden * static_cast<int64_t>(size_of(y)) +
                                               c.tokens * c.hidden * 2);
      if (bytes > 1.9 * kBytes) continue;
      const auto out_bytes = static_cast<size_t>(c.tokens * c.hidden * 2);
      const size_t y_bytes = static_cast<size_t>(bytes) - out_bytes;
      const int sets =
          static_cast<int>(std::max<size_t>(1, std::min<size_t>(16, kBytes / y_bytes)));
      const double us = graph_us(stream, sets, [&](int i) {
        const char* from = static_cast<const char*>(a.get()) + static_cast<size_t>(i) * y_bytes;
        if (y_bytes > kBytes) from = static_cast<const char*>(a.get());
        cuda::combine(
            TensorView(from, y, {pairs, c.hidden}, kDevice), static_cast<const int32_t*>(map.get()),
            TensorView(weights.get(), DType::kF32, {c.tokens, c.top_k}, kDevice),
            MutableTensorView(b.get(), DType::kBF16, {c.tokens, c.hidden}, kDevice), stream);
      });
      std::printf("combine T %5ld k %ld H %4ld y %s  %.2f us  %.2f TB/s  %.0f %% of copy\n",
                  c.tokens, c.top_k, c.hidden, y == DType::kF32 ? "f32 " : "bf16", us,
                  bytes / us / 1e6, 100 * bytes / us / 1e6 / ceiling);
    }
  }
}

}  // namespace

int main() {
  const auto stream = device_runtime(kDevice).make_stream(0, nullptr);
  bench_plan(stream->get());
  bench_combine(stream->get());
}

// Figures of the device layer on this machine: copies through pinned memory, uploads from a mapped
// file, products, reads.
//   device_bench [FOLDER for a file of 4 GiB]
#include <cuda_runtime_api.h>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/device/event.h"
#include "backends/cuda/kernels/ceilings.h"
#include "backends/cuda/kernels/matmul.h"
#include "cadre/thread_pool.h"

namespace cadre::cuda {
namespace {

constexpr Device kDevice = {DeviceType::kCuda, 0};

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + values.size() / 2, values.end());
  return values[values.size() / 2];
}

double median_seconds(int repeats, const std::function<void()>& work) {
  std::vector<double> seconds;
  for (int i = 0; i < repeats; ++i) {
    const double start = now();
    work();
    seconds.push_back(now() - start);
  }
  return median(seconds);
}

// Tensors of one expert's size, end to end.
std::vector<Upload> expert_tensors(const char* from, DType from_dtype, char* to, DType to_dtype,
                                   size_t bytes) {
  constexpr int64_t kCount = 2048 * 768;
  std::vector<Upload> uploads;
  size_t source = 0;
  size_t target = 0;
  while (source + kCount * size_of(from_dtype) <= bytes) {
    uploads.push_back({from + source, from_dtype, to + target, to_dtype, kCount});
    source += kCount * size_of(from_dtype);
    target += kCount * size_of(to_dtype);
  }
  return uploads;
}

void bench_uploads(const std::string& folder) {
  constexpr size_t kBytes = size_t{4} << 30;
  DeviceRuntime& runtime = device_runtime();
  const auto device = allocate_shared_memory(kDevice, 2 * kBytes);
  auto* to = static_cast<char*>(device.get());

  {
    constexpr size_t kPinned = size_t{1} << 30;
    const auto pinned = runtime.allocate_pinned(kPinned);
    std::memset(pinned.get(), 1, kPinned);
    const auto stream = runtime.make_stream(0, nullptr);
    const double seconds = median_seconds(7, [&] {
      runtime.copy(to, pinned.get(), kPinned, stream->get());
      runtime.synchronize(stream->get());
    });
    std::printf("plain pinned copy, 1 GiB: %.1f GB/s\n", kPinned / seconds / 1e9);
  }

  const std::string path = folder + "/device_bench.data";
  const int file = open(path.c_str(), O_RDWR | O_CREAT | O_TRUNC, 0600);
  if (file < 0 || ftruncate(file, kBytes) != 0) return std::perror(path.c_str());
  {
    std::vector<uint32_t> words(1 << 20);
    uint32_t x = 1;
    for (uint32_t& word : words) word = (x = x * 1664525u + 1013904223u) & 0xbfffbfffu;
    for (size_t done = 0; done < kBytes; done += words.size() * 4) {
      if (write(file, words.data(), words.size() * 4) < 0) return std::perror("write");
    }
  }
  for (const int num_threads : {0, 8}) {
    ThreadPool threads(num_threads);
    std::printf("upload with %d threads, GB/s of file (GB/s to the GPU):", threads.num_threads());
    for (const auto& dtypes :
         {std::pair{DType::kBF16, DType::kBF16}, std::pair{DType::kF32, DType::kBF16},
          std::pair{DType::kF32, DType::kF16}, std::pair{DType::kBF16, DType::kF32}}) {
      const DType from = dtypes.first;
      const DType target = dtypes.second;
      // A fresh mapping each time: pages are in the page cache, not in this process.
      const double seconds = median_seconds(5, [&] {
        void* map = mmap(nullptr, kBytes, PROT_READ, MAP_PRIVATE, file, 0);
        runtime.upload(expert_tensors(static_cast<char*>(map), from, to, target, kBytes), 0,
                       threads, [](int64_t) {});
        munmap(map, kBytes);
      });
      const double ratio =
          static_cast<double>(size_of(target)) / static_cast<double>(size_of(from));
      std::printf("  %s to %s %.1f (%.1f)", std::string(name_of(from)).c_str(),
                  std::string(name_of(target)).c_str(), kBytes / seconds / 1e9,
                  kBytes * ratio / seconds / 1e9);
    }
    std::printf("\n");
  }
  close(file);
  unlink(path.c_str());
}

void bench_ceilings(const Stream& stream) {
  const Tensor memory(DType::kU8, {int64_t{1} << 30}, kDevice);
  const auto names = ceilings().ways_of_reading();
  for (size_t way = 0; way < names.size(); ++way) {
    std::vector<double> rates;
    for (int i = 0; i < 21; ++i) rates.push_back(ceilings().read_bandwidth(memory, way, stream));
    std::printf("read, %s: %.3f TB/s\n", names[way].c_str(), median(rates) / 1e12);
  }
  std::printf("reads one after the other, right after products, TB/s:");
  ceilings().peak_flops(DType::kBF16, stream);
  for (int i = 0; i < 10; ++i) {
    std::printf(" %.3f", ceilings().read_bandwidth(memory, 1, stream) / 1e12);
  }
  std::printf("\n");
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    std::printf("8192^3 %s: %.1f TFLOP/s\n", std::string(name_of(dtype)).c_str(),
                ceilings().peak_flops(dtype, stream) / 1e12);
  }
}

void bench_matmul(const Stream& stream) {
  std::printf("products: %s %s\n", matmul_library().c_str(), why_no_cublas_lt().c_str());
  Workspace workspace(kDevice, matmul_workspace_bytes());
  constexpr int64_t kShapes[][3] = {{1, 2048, 2048},    {1, 4096, 2048},    {8, 4096, 2048},
                                    {64, 4096, 2048},   {1, 151936, 2048},  {512, 4096, 2048},
                                    {4096, 4096, 2048}, {16384, 4096, 7168}};
  for (const auto& [m, n, k] : kShapes) {
    const Tensor x(DType::kBF16, {m, k}, kDevice);
    const Tensor w(DType::kBF16, {n, k}, kDevice);
    const Tensor out(DType::kBF16, {m, n}, kDevice);
    device_runtime().fill(x->mutable_data(), 0x3c, x->nbytes(), stream);
    device_runtime().fill(w->mutable_data(), 0x3b, w->nbytes(), stream);
    Matmul product;
    product.dtype = product.out_dtype = DType::kBF16;
    product.m = m;
    product.n = n;
    product.k = product.x_stride = k;
    product.out_stride = n;
    product.x = x->data();
    product.w = {w->data(), k, 1};
    product.out = out->mutable_data();
    const double first = now();
    matmul(product, workspace, stream);
    const double first_seconds = now() - first;
    synchronize(stream);
    constexpr int kCalls = 20;
    const double host = median_seconds(5,
                                       [&] {
                                         for (int i = 0; i < kCalls; ++i)
                                           matmul(product, workspace, stream);
                                       }) /
                        kCalls;
    synchronize(stream);
    Event start;
    Event stop;
    start.record(stream_of(stream));
    for (int i = 0; i < kCalls; ++i) matmul(product, workspace, stream);
    stop.record(stream_of(stream));
    stop.synchronize();
    const double device = stop.seconds_since(start) / kCalls;
    std::printf(
        "m %5ld n %6ld k %5ld: first call %.0f us, later %.2f us of host, %.2f us of GPU, "
        "%.1f TFLOP/s\n",
        static_cast<long>(m), static_cast<long>(n), static_cast<long>(k), first_seconds * 1e6,
        host * 1e6, device * 1e6, 2e-12 * static_cast<double>(m * n * k) / device);
  }
}

int run(const std::string& folder) {
  if (device_runtime().device_count() == 0) {
    std::printf("%s\n", device_runtime().why_none().c_str());
    return 1;
  }
  const auto stream = device_runtime().make_stream(0, nullptr);
  bench_matmul(stream->get());
  bench_ceilings(stream->get());
  bench_uploads(folder);
  return 0;
}

}  // namespace
}  // namespace cadre::cuda

int main(int argc, char** argv) { return cadre::cuda::run(argc > 1 ? argv[1] : "/tmp"); }

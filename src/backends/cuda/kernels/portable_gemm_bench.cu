// Times of the portable GEMM against what mma.sync reaches from registers. Built by its own target.
#include <cuda_runtime.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <random>
#include <vector>

#include "backends/cuda/kernels/portable_gemm_kernel.cuh"
#include "core/device_runtime.h"

namespace {

using namespace cadre;
using namespace cadre::cuda;

constexpr Device kDevice = {DeviceType::kCuda, 0};

double graph_us(const Stream& stream, const std::function<void()>& call) {
  auto* s = static_cast<cudaStream_t>(stream.handle);
  const auto graph = device_runtime(kDevice).capture(stream, call);
  cudaEvent_t begin, end;
  cudaEventCreate(&begin);
  cudaEventCreate(&end);
  std::vector<float> times;
  for (int i = 0; i < 13; ++i) {
    cudaEventRecord(begin, s);
    graph->launch(stream);
    cudaEventRecord(end, s);
    cudaStreamSynchronize(s);
    float ms = 0;
    cudaEventElapsedTime(&ms, begin, end);
    if (i >= 3) times.push_back(ms * 1000);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

// Products from registers alone, 32 sums in flight per warp.
template <typename T>
__global__ void __launch_bounds__(256) multiply_only(float* out, int rounds) {
  float sums[8][4] = {};
  uint32_t a[4], b[8][2];
  for (int i = 0; i < 4; ++i) a[i] = 0x3c003c00u + threadIdx.x * 77 + i;
  for (int j = 0; j < 8; ++j) b[j][0] = b[j][1] = 0x38003800u + threadIdx.x * 31 + j;
  for (int r = 0; r < rounds; ++r) {
#pragma unroll
    for (int j = 0; j < 8; ++j) portable::multiply_add<T>(sums[j], a, b[j]);
  }
  float total = 0;
  for (int j = 0; j < 8; ++j) total += sums[j][0] + sums[j][1] + sums[j][2] + sums[j][3];
  out[blockIdx.x * blockDim.x + threadIdx.x] = total;
}

template <typename T>
double peak(const Stream& stream, float* scratch, int64_t per_mma) {
  auto* s = static_cast<cudaStream_t>(stream.handle);
  const int rounds = 4000;
  const double us =
      graph_us(stream, [&] { multiply_only<T><<<132 * 4, 256, 0, s>>>(scratch, rounds); });
  return 132.0 * 4 * 8 * rounds * 8 * static_cast<double>(per_mma) * 2 / us / 1e6;
}

__global__ void fill_random(uint32_t* data, size_t count, bool is_f32) {
  for (size_t i = blockIdx.x * size_t{blockDim.x} + threadIdx.x; i < count;
       i += size_t{gridDim.x} * blockDim.x) {
    uint32_t z = static_cast<uint32_t>(i) * 2654435761u;
    z = (z ^ (z >> 15)) * 2246822519u;
    z ^= z >> 13;
    // bf16 / fp16 / f32 of magnitude about one
    data[i] = is_f32 ? (z & 0x807fffffu) | 0x3f000000u : (z & 0x807f807fu) | 0x3f003f00u;
  }
}

struct Shape {
  const char* name;
  int64_t groups, rows, n, k;
  bool dual;
};

void bench(const Stream& stream, DType dtype, const Shape& c, char* memory, double ceiling) {
  const int64_t e = static_cast<int64_t>(size_of(dtype));
  std::vector<int32_t> offsets(static_cast<size_t>(c.groups) + 1);
  std::mt19937 random(1);
  std::vector<int64_t> counts(static_cast<size_t>(c.groups));
  for (int64_t r = 0; r < c.rows; ++r) ++counts[random() % counts.size()];
  for (size_t g = 0; g < counts.size(); ++g) {
    offsets[g + 1] = offsets[g] + static_cast<int32_t>(counts[g]);
  }
  const auto device_offsets = allocate_shared_memory(kDevice, offsets.size() * 4);
  device_runtime(kDevice).copy(device_offsets.get(), offsets.data(), offsets.size() * 4, stream);
  PortableGemm gemm;
  gemm.dtype = dtype;
  gemm.num_groups = c.groups;
  gemm.offsets = static_cast<const int32_t*>(device_offsets.get());
  gemm.max_rows = c.rows;
  gemm.n = c.n;
  gemm.k = c.k;
  gemm.x = memory;
  gemm.x_stride = c.k;
  char* w = memory + c.rows * c.k * e;
  gemm.w = {{w, c.k, 1}, c.n * c.k * (c.dual ? 2 : 1), nullptr};
  if (c.dual) gemm.up_w = {{w + c.n * c.k * e, c.k, 1}, c.n * c.k * 2, nullptr};
  gemm.apply_gate = c.dual;
  gemm.out = w + c.groups * c.n * c.k * (c.dual ? 2 : 1) * e;
  gemm.out_dtype = dtype;
  gemm.out_stride = c.n;
  const double us = graph_us(stream, [&] { portable_gemm(gemm, stream); });
  const double flops = 2.0 * static_cast<double>(c.rows * c.n * c.k) * (c.dual ? 2 : 1);
  std::printf("%-8s %-22s rows %6ld  %9.1f us  %6.1f TFLOP/s  %.0f %% of mma.sync\n",
              std::string(name_of(dtype)).c_str(), c.name, c.rows, us, flops / us / 1e6,
              100 * flops / us / 1e6 / ceiling);
}

}  // namespace

int main() {
  const auto owner = device_runtime(kDevice).make_stream(0, nullptr);
  const Stream& stream = owner->get();
  auto* s = static_cast<cudaStream_t>(stream.handle);
  constexpr size_t kBytes = size_t{6} << 30;
  const auto memory = allocate_shared_memory(kDevice, kBytes);
  auto* data = static_cast<char*>(memory.get());
  auto* scratch = reinterpret_cast<float*>(data);
  const double bf16 = peak<__nv_bfloat16>(stream, scratch, 2048);
  const double tf32 = peak<float>(stream, scratch, 1024);
  std::printf("mma.sync from registers: bf16 %.0f, tf32 %.0f TFLOP/s (f32 by three: %.0f)\n", bf16,
              tf32, tf32 / 3);
  const Shape shapes[] = {{"dense 8192", 1, 8192, 8192, 8192, false},
                          {"qwen3 gate_up", 128, 1024 * 8, 768, 2048, true},
                          {"qwen3 gate_up", 128, 4096 * 8, 768, 2048, true},
                          {"qwen3 gate_up", 128, 16384 * 8, 768, 2048, true},
                          {"qwen3 down", 128, 4096 * 8, 2048, 768, false},
                          {"qwen3 down", 128, 16384 * 8, 2048, 768, false},
                          {"mixtral gate_up", 8, 1024 * 2, 14336, 4096, true},
                          {"mixtral gate_up", 8, 4096 * 2, 14336, 4096, true},
                          {"mixtral down", 8, 4096 * 2, 4096, 14336, false}};
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    fill_random<<<1024, 256, 0, s>>>(reinterpret_cast<uint32_t*>(data), kBytes / 4,
                                     dtype == DType::kF32);
    for (const Shape& c : shapes) {
      if (dtype == DType::kF32 && c.rows * c.n * c.k > (int64_t{3} << 37)) continue;
      if (dtype == DType::kF32 && c.groups == 8) continue;
      bench(stream, dtype, c, data, dtype == DType::kF32 ? tf32 / 3 : bf16);
    }
  }
}

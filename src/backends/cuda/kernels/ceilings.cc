#include "backends/cuda/kernels/ceilings.h"

#include <algorithm>
#include <vector>

#include "backends/cuda/device/check.h"
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/device/event.h"
#include "backends/cuda/kernels/matmul.h"
#include "backends/cuda/kernels/read_ways.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

constexpr int64_t kSide = 8192;
constexpr int kProducts = 5;
constexpr double kLaunchSeconds = 50e-6;  // more than launching takes the host
// After large products clocks are low, and reads were 12 % slower for a millisecond (H200).
constexpr double kRecoverySeconds = 3e-3;

// Seconds that `work` takes on the device, launching it not included; before it the device does
// next to nothing for a while.
template <typename Work>
double time_on_device(cudaStream_t stream, double pause, const Work& work) {
  Event start;
  Event stop;
  keep_busy(pause, stream);
  start.record(stream);
  work();
  stop.record(stream);
  stop.synchronize();
  return stop.seconds_since(start);
}

std::vector<ReadWay> ways_on(int device) {
  std::vector<ReadWay> ways;
  for (int i = 0; i < read_ways().count; ++i) {
    const ReadWay& way = read_ways().ways[i];
    if (compute_capability(device) >= way.compute_capability) ways.push_back(way);
  }
  return ways;
}

class CudaCeilings final : public Ceilings {
 public:
  std::string processor() const override { return properties_of(0).name; }

  std::vector<std::string> ways_of_reading() const override {
    std::vector<std::string> names;
    for (const ReadWay& way : ways_on(0)) names.emplace_back(way.name);
    return names;
  }

  double read_bandwidth(const TensorView& memory, size_t way, const Stream& stream) const override {
    const std::vector<ReadWay> ways = ways_on(0);
    CADRE_ASSERT(way < ways.size());
    const auto bytes = static_cast<int64_t>(memory.nbytes() / 16 * 16);
    const bool aligned = reinterpret_cast<uintptr_t>(memory.data()) % 16 == 0;
    if (!memory.is_contiguous() || bytes == 0 || !aligned || memory.device() != stream.device) {
      throw InvalidArgument(str_cat("read_bandwidth: expected contiguous memory on ",
                                    to_string(stream.device), ", 16-byte aligned, got ",
                                    describe("memory", memory)));
    }
    const DeviceGuard guard(stream.device.index);
    const int multiprocessors = properties_of(stream.device.index).num_multiprocessors;
    const double seconds = time_on_device(stream_of(stream), kRecoverySeconds, [&] {
      ways[way].read(memory.data(), bytes, multiprocessors, stream_of(stream));
    });
    return static_cast<double>(bytes) / seconds;
  }

  double peak_flops(DType compute_dtype, const Stream& stream) const override {
    if (!is_compute_dtype(compute_dtype)) {
      throw InvalidArgument(str_cat("peak_flops: expected float32, bfloat16 or float16, got ",
                                    name_of(compute_dtype)));
    }
    const DeviceGuard guard(stream.device.index);
    Workspace workspace(stream.device, matmul_workspace_bytes());
    const Tensor x(compute_dtype, {kSide, kSide}, stream.device);
    const Tensor w(compute_dtype, {kSide, kSide}, stream.device);
    const Tensor out(compute_dtype, {kSide, kSide}, stream.device);
    fill_uniform(x->mutable_data(), compute_dtype, x->numel(), 1, stream_of(stream));
    fill_uniform(w->mutable_data(), compute_dtype, w->numel(), 2, stream_of(stream));
    Matmul product;
    product.dtype = product.out_dtype = compute_dtype;
    product.m = product.n = product.k = kSide;
    product.x = x->data();
    product.w = {w->data(), kSide, 1};
    product.out = out->mutable_data();
    product.x_stride = product.out_stride = kSide;
    matmul(product, workspace, stream);  // chooses the algorithm, wakes the clocks
    std::vector<double> seconds;
    for (int i = 0; i < kProducts; ++i) {
      seconds.push_back(time_on_device(stream_of(stream), kLaunchSeconds,
                                       [&] { matmul(product, workspace, stream); }));
    }
    std::nth_element(seconds.begin(), seconds.begin() + kProducts / 2, seconds.end());
    return 2.0 * kSide * kSide * kSide / seconds[kProducts / 2];
  }
};

}  // namespace

const Ceilings& ceilings() {
  static const CudaCeilings kCeilings;
  return kCeilings;
}

}  // namespace cadre::cuda

// What the benches of a GPU's dense operations share: random tensors, times of replayed graphs, the
// tokens of a step.
#pragma once

#include <algorithm>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "core/device_runtime.h"
#include "dense/dense_ops.h"

namespace cadre::cuda {

inline constexpr Device kGpu = {DeviceType::kCuda, 0};

class Bench {
 public:
  Bench()
      : runtime_(device_runtime(kGpu)),
        owned_(runtime_.make_stream(0, nullptr)),
        workspace_(kGpu, size_t{256} << 20) {}

  const Stream& stream() const { return owned_->get(); }
  DenseOps& ops() { return dense_ops(DeviceType::kCuda); }
  Workspace& workspace() { return workspace_; }

  // Normally distributed: pieces of one pool for each dtype and scale.
  Tensor random(DType dtype, const Dims& shape, float scale = 1) {
    const Tensor tensor(dtype, shape, kGpu);
    Tensor& pool = pools_[{dtype, scale}];
    if (!pool) pool = make_pool(dtype, scale);
    const size_t bytes = tensor->nbytes();
    const size_t half = pool->nbytes() / 2;
    auto* to = static_cast<std::byte*>(tensor->mutable_data());
    for (size_t done = 0; done < bytes; done += half) {
      const size_t from = 4096 * (++pieces_ % 97);
      runtime_.copy(to + done, static_cast<const std::byte*>(pool->data()) + from,
                    std::min(half, bytes - done), stream());
    }
    runtime_.synchronize(stream());
    return tensor;
  }
  Tensor make_pool(DType dtype, float scale) {
    constexpr int64_t kCount = 4 << 20;
    const Tensor tensor(dtype, {kCount}, kGpu);
    const Tensor host(dtype, {kCount});
    std::mt19937 engine(3);
    std::normal_distribution<float> normal(0, scale);
    for (int64_t i = 0; i < kCount; ++i) {
      const float x = normal(engine);
      if (dtype == DType::kF32) host->as<float>()[i] = x;
      if (dtype == DType::kBF16) host->as<BFloat16>()[i] = BFloat16(x);
      if (dtype == DType::kF16) host->as<Float16>()[i] = Float16(x);
    }
    copy_tensor(host.view(), tensor, stream());
    runtime_.synchronize(stream());
    return tensor;
  }
  Tensor integers(const std::vector<int32_t>& values, const Dims& shape) {
    Tensor tensor(DType::kI32, shape, kGpu);
    runtime_.copy(tensor->mutable_data(), values.data(), values.size() * 4, stream());
    runtime_.synchronize(stream());
    return tensor;
  }

  /// Microseconds of one of `copies` calls in a row, median of 21 replays.
  double us(int copies, const std::function<void(int)>& call) {
    const auto graph = runtime_.capture(stream(), [&] {
      for (int i = 0; i < copies; ++i) call(i);
    });
    std::vector<double> times;
    for (int i = 0; i < 24; ++i) {
      const double seconds = runtime_.time(stream(), [&] { graph->launch(stream()); });
      if (i >= 3) times.push_back(seconds * 1e6 / copies);
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

 private:
  DeviceRuntime& runtime_;
  std::unique_ptr<DeviceStream> owned_;
  Workspace workspace_;
  std::map<std::pair<DType, float>, Tensor> pools_;
  size_t pieces_ = 0;
};

// A step of `tokens_each` new tokens for each sequence, behind `past` old ones.
struct Step {
  Step(Bench& bench, int64_t sequences, int64_t tokens_each, int64_t past) {
    std::vector<int32_t> slot_of, position_of, span_of;
    for (int64_t s = 0; s < sequences; ++s) {
      spans.push_back({s, s * tokens_each, tokens_each, past});
      for (const int64_t x : {s, s * tokens_each, tokens_each, past}) {
        span_of.push_back(static_cast<int32_t>(x));
      }
      for (int64_t t = 0; t < tokens_each; ++t) {
        slot_of.push_back(static_cast<int32_t>(s));
        position_of.push_back(static_cast<int32_t>(past + t));
      }
    }
    const int64_t rows = sequences * tokens_each;
    slots = bench.integers(slot_of, {rows});
    positions = bench.integers(position_of, {rows});
    device_spans = bench.integers(span_of, {sequences, 4});
  }
  StepTokens tokens() const { return {spans, slots.view(), positions.view(), device_spans.view()}; }

  std::vector<SequenceSpan> spans;
  Tensor slots;
  Tensor positions;
  Tensor device_spans;
};

}  // namespace cadre::cuda

// What the tests of a GPU's dense operations share: random tensors made on the host, calls on the
// device with poisoned outputs, each call twice for the same bits.
#pragma once

#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "cadre/thread_pool.h"
#include "cadre/workspace.h"
#include "core/device_runtime.h"
#include "dense/dense_ops.h"
#include "support/compare.h"

namespace cadre::cuda {

inline constexpr Device kGpu = {DeviceType::kCuda, 0};
inline const DType kComputeDtypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class GpuOpsTest : public testing::Test {
 protected:
  void SetUp() override {
    runtime_ = find_device_runtime(DeviceType::kCuda);
    if (runtime_ == nullptr || runtime_->device_count() == 0) GTEST_SKIP() << "needs a GPU";
    device_stream_ = runtime_->make_stream(0, nullptr);
    stream_ = device_stream_->get();
    workspace_ = std::make_unique<Workspace>(kGpu, size_t{64} << 20);
    ops_ = &dense_ops(DeviceType::kCuda);
  }

  /// Evenly distributed values of variance scale^2, rounded to the dtype, on the host.
  Tensor random(DType dtype, const Dims& shape, float scale = 1) {
    Tensor tensor(dtype, shape);
    const float unit = scale * 1.7320508f / 2147483648.0f;
    for (int64_t i = 0; i < tensor->numel(); ++i) {
      set(tensor, i, static_cast<float>(static_cast<int32_t>(random_())) * unit);
    }
    return tensor;
  }
  static void set(const MutableTensorView& tensor, int64_t i, float value) {
    if (tensor.dtype() == DType::kF32) tensor.as<float>()[i] = value;
    if (tensor.dtype() == DType::kBF16) tensor.as<BFloat16>()[i] = BFloat16(value);
    if (tensor.dtype() == DType::kF16) tensor.as<Float16>()[i] = Float16(value);
  }
  template <typename T>
  static Tensor vector_tensor(DType dtype, const std::vector<T>& values) {
    Tensor tensor(dtype, {static_cast<int64_t>(values.size())});
    if (!values.empty()) {
      std::memcpy(tensor->mutable_data(), values.data(), values.size() * sizeof(T));
    }
    return tensor;
  }

  Tensor to_gpu(const TensorView& host) {
    Tensor tensor(host.dtype(), host.shape(), kGpu);
    if (host.numel() > 0) copy_tensor(host, tensor, stream_);
    runtime_->synchronize(stream_);
    return tensor;
  }
  /// NaN in every dtype.
  Tensor poisoned(DType dtype, const Dims& shape) {
    Tensor tensor(dtype, shape, kGpu);
    poison(tensor);
    return tensor;
  }
  void poison(const MutableTensorView& tensor) {
    if (tensor.numel() > 0) {
      runtime_->fill(tensor.mutable_data(), 0xff, tensor.nbytes(), stream_);
    }
  }
  Tensor to_host(const TensorView& gpu) {
    Tensor tensor(gpu.dtype(), gpu.shape());
    if (gpu.numel() > 0) copy_tensor(gpu, tensor, stream_);
    runtime_->synchronize(stream_);
    return tensor;
  }
  std::vector<double> values(const TensorView& gpu) {
    return test::to_doubles(to_host(gpu).view());
  }
  std::vector<std::byte> bits(const TensorView& gpu) {
    const Tensor host = to_host(gpu);
    const auto* data = static_cast<const std::byte*>(host->data());
    return {data, data + host->nbytes()};
  }

  static double bound(DType dtype) {
    return dtype == DType::kF32 ? 1e-6 : dtype == DType::kBF16 ? 4e-3 : 5e-4;
  }
  void expect_near(const TensorView& out, const std::vector<double>& reference, double limit) {
    EXPECT_LE(test::relative_error(values(out), reference), limit);
  }

  /// The same numbers in float32, on the host.
  static Tensor wide(const TensorView& x) {
    Tensor result(DType::kF32, x.shape());
    const std::vector<double> values = test::to_doubles(x);
    for (size_t i = 0; i < values.size(); ++i) {
      set(result, static_cast<int64_t>(i), static_cast<float>(values[i]));
    }
    return result;
  }
  static Tensor integers(const std::vector<int32_t>& values, const Dims& shape) {
    Tensor tensor(DType::kI32, shape);
    std::memcpy(tensor->mutable_data(), values.data(), values.size() * sizeof(int32_t));
    return tensor;
  }
  void expect_as(const TensorView& gpu, const Tensor& cpu, double limit) {
    expect_near(gpu, test::to_doubles(cpu.view()), limit);
  }

  // The CPU's operations have tests against float64 of their own; in float32 they are the reference
  // of operations that are plain here.
  ThreadPool threads_{1};
  Stream host_ = Stream::cpu(threads_);
  DenseOps& cpu_ = dense_ops(DeviceType::kCpu);
  DeviceRuntime* runtime_ = nullptr;
  std::unique_ptr<DeviceStream> device_stream_;
  Stream stream_;
  std::unique_ptr<Workspace> workspace_;
  DenseOps* ops_ = nullptr;
  std::mt19937 random_{7};
};

/// The tokens of a step on the device.
struct GpuTokens {
  std::vector<SequenceSpan> sequences;
  Tensor slots;
  Tensor positions;
  Tensor spans;

  StepTokens get() const { return {sequences, slots.view(), positions.view(), spans.view()}; }
};

inline std::vector<int32_t> token_slots(const std::vector<SequenceSpan>& sequences) {
  std::vector<int32_t> result;
  for (const SequenceSpan& s : sequences) {
    result.insert(result.end(), static_cast<size_t>(s.num_tokens), static_cast<int32_t>(s.slot));
  }
  return result;
}
inline std::vector<int32_t> token_positions(const std::vector<SequenceSpan>& sequences) {
  std::vector<int32_t> result;
  for (const SequenceSpan& s : sequences) {
    for (int64_t t = 0; t < s.num_tokens; ++t) {
      result.push_back(static_cast<int32_t>(s.past + t));
    }
  }
  return result;
}
inline std::vector<int32_t> token_spans(const std::vector<SequenceSpan>& sequences) {
  std::vector<int32_t> result;
  for (const SequenceSpan& s : sequences) {
    for (const int64_t x : {s.slot, s.first_row, s.num_tokens, s.past}) {
      result.push_back(static_cast<int32_t>(x));
    }
  }
  return result;
}

/// Writes what `sequences` say into tensors of the device.
inline void write_tokens(const std::vector<SequenceSpan>& sequences, GpuTokens& tokens,
                         const Stream& stream) {
  const auto write = [&](const std::vector<int32_t>& values, const MutableTensorView& to) {
    copy_tensor({values.data(), DType::kI32, to.shape()}, to, stream);
    synchronize(stream);
  };
  tokens.sequences = sequences;
  write(token_slots(sequences), tokens.slots);
  write(token_positions(sequences), tokens.positions);
  write(token_spans(sequences), tokens.spans);
}

inline GpuTokens gpu_tokens(const std::vector<SequenceSpan>& sequences, const Stream& stream) {
  const auto rows = static_cast<int64_t>(token_slots(sequences).size());
  const auto count = static_cast<int64_t>(sequences.size());
  GpuTokens tokens{sequences, Tensor(DType::kI32, {rows}, kGpu), Tensor(DType::kI32, {rows}, kGpu),
                   Tensor(DType::kI32, {count, 4}, kGpu)};
  write_tokens(sequences, tokens, stream);
  return tokens;
}

}  // namespace cadre::cuda

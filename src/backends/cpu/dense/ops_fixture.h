// What the tests of the dense operations share.
#pragma once

#include <gtest/gtest.h>

#include <random>
#include <vector>

#include "cadre/tensor.h"
#include "cadre/thread_pool.h"
#include "cadre/workspace.h"
#include "dense/dense_ops.h"
#include "support/compare.h"

namespace cadre::cpu {

class OpsTest : public testing::Test {
 protected:
  OpsTest() : threads_(3), stream_(Stream::cpu(threads_)), workspace_({}, 16 << 20) {}

  /// Normally distributed values, rounded to the dtype.
  Tensor random(DType dtype, const Dims& shape, float scale = 1) {
    Tensor tensor(dtype, shape);
    std::normal_distribution<float> normal(0, scale);
    for (int64_t i = 0; i < tensor->numel(); ++i) set(tensor, i, normal(random_));
    return tensor;
  }
  static void set(const MutableTensorView& tensor, int64_t i, float value) {
    if (tensor.dtype() == DType::kF32) tensor.as<float>()[i] = value;
    if (tensor.dtype() == DType::kBF16) tensor.as<BFloat16>()[i] = BFloat16(value);
    if (tensor.dtype() == DType::kF16) tensor.as<Float16>()[i] = Float16(value);
  }
  static double bound(DType dtype) {
    return dtype == DType::kF32 ? 1e-6 : dtype == DType::kBF16 ? 4e-3 : 5e-4;
  }
  static void expect_near(const TensorView& out, const std::vector<double>& reference,
                          double limit) {
    EXPECT_LE(test::relative_error(test::to_doubles(out), reference), limit);
  }

  std::mt19937 random_{7};
  ThreadPool threads_;
  Stream stream_;
  Workspace workspace_;
  DenseOps& ops_ = dense_ops(DeviceType::kCpu);
};

inline const DType kComputeDtypes[] = {DType::kF32, DType::kBF16, DType::kF16};

}  // namespace cadre::cpu

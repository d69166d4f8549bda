#include "experts/relative_error.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

#include "cadre/error.h"
#include "cadre/float16.h"

namespace cadre {
namespace {

template <typename T>
double error(DType dtype, const std::vector<float>& out, const std::vector<double>& truth) {
  std::vector<T> stored;
  for (const float value : out) stored.push_back(T(value));
  return relative_error(TensorView(stored.data(), dtype, {static_cast<int64_t>(out.size())}),
                        truth);
}

TEST(RelativeError, IsTheNormOfTheDifferenceOverTheNormOfTheTruth) {
  // |(0, 0.5)| / |(3, 4)|, exact in every dtype.
  EXPECT_DOUBLE_EQ(error<float>(DType::kF32, {3, 4.5f}, {3, 4}), 0.1);
  EXPECT_DOUBLE_EQ(error<BFloat16>(DType::kBF16, {3, 4.5f}, {3, 4}), 0.1);
  EXPECT_DOUBLE_EQ(error<Float16>(DType::kF16, {3, 4.5f}, {3, 4}), 0.1);
  EXPECT_EQ(error<float>(DType::kF32, {3, 4}, {3, 4}), 0);
  EXPECT_EQ(error<float>(DType::kF32, {}, {}), 0);
}

TEST(RelativeError, NeverHidesANaNOrATruthOfZeros) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_TRUE(std::isnan(error<float>(DType::kF32, {nan, 1}, {1, 1})));
  EXPECT_TRUE(std::isnan(error<float>(DType::kF32, {nan, 0}, {0, 0})));
  EXPECT_TRUE(std::isinf(error<float>(DType::kF32, {1e-9f, 0}, {0, 0})));
  EXPECT_EQ(error<float>(DType::kF32, {0, 0}, {0, 0}), 0);
}

TEST(RelativeError, RefusesADtypeThatNoBackendWrites) {
  const std::vector<int32_t> ids = {1};
  const std::vector<double> truth = {1};
  EXPECT_THROW(relative_error(TensorView(ids.data(), DType::kI32, {1}), truth), InvalidArgument);
}

}  // namespace
}  // namespace cadre

#include "support/compare.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <limits>

namespace cadre::test {
namespace {

TEST(Compare, RelativeErrorIsTheNormOfTheDifferenceOverTheNormOfTheReference) {
  // |(0, 1)| / |(3, 4)|
  EXPECT_DOUBLE_EQ(relative_error(std::vector<float>{3, 5}, std::vector<double>{3, 4}), 0.2);
  EXPECT_EQ(relative_error(std::vector<double>{3, 4}, std::vector<double>{3, 4}), 0);
}

TEST(Compare, ZeroReferenceGivesZeroOrInfinity) {
  EXPECT_EQ(relative_error(std::vector<float>{0, 0}, std::vector<float>{0, 0}), 0);
  EXPECT_TRUE(std::isinf(relative_error(std::vector<float>{0, 1}, std::vector<float>{0, 0})));
}

TEST(Compare, NanNeverPasses) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  EXPECT_FALSE(relative_error(std::vector<float>{nan, 4}, std::vector<double>{3, 4}) <= 1e9);
  EXPECT_FALSE(relative_error(std::vector<float>{nan}, std::vector<double>{0}) <= 1e9);
  EXPECT_FALSE(relative_error(std::vector<double>{1}, std::vector<double>{std::nan("")}) <= 1e9);
}

TEST(Compare, DifferentSizesThrow) {
  EXPECT_THROW(relative_error(std::vector<float>{1}, std::vector<double>{1, 2}),
               std::invalid_argument);
}

TEST(Compare, TensorsAreReadThroughTheirStrides) {
  const std::array<float, 6> data = {1, 2, 3, 4, 5, 6};
  const TensorView transposed(data.data(), DType::kF32, {3, 2}, Dims{1, 3});
  EXPECT_EQ(to_doubles(transposed), (std::vector<double>{1, 4, 2, 5, 3, 6}));
  EXPECT_EQ(to_doubles(TensorView(data.data(), DType::kF32, {0, 2})), std::vector<double>());
  EXPECT_EQ(to_doubles(TensorView()), std::vector<double>());
}

TEST(Compare, ReadsEveryWidthAndUnalignedData) {
  std::array<std::byte, 3> bytes = {std::byte{0}, std::byte{0x80}, std::byte{0x3f}};
  EXPECT_EQ(element_to_double(bytes.data() + 1, DType::kBF16), 1.0);
  const Float16 half(1.5f);
  EXPECT_EQ(element_to_double(&half, DType::kF16), 1.5);
  const int64_t big = -5;
  EXPECT_EQ(element_to_double(&big, DType::kI64), -5);
  EXPECT_EQ(element_to_double(&bytes[1], DType::kI8), -128);
  EXPECT_EQ(element_to_double(&bytes[1], DType::kU8), 128);
  EXPECT_THROW(element_to_double(&bytes[1], DType::kF8E4M3), std::invalid_argument);
}

}  // namespace
}  // namespace cadre::test

// The truth here is arithmetic on doubles: decode by the definition of the format, encode by
// searching all values of the format for the nearest one.
#include "cadre/float16.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <random>
#include <vector>

namespace cadre {
namespace {

struct Format {
  int exponent_bits;
  int mantissa_bits;
};
constexpr Format kHalf = {5, 10};
constexpr Format kBFloat = {8, 7};

// The value of a pattern by definition: (-1)^s * 2^(e - bias) * (1 + m / 2^M), or subnormal.
double decode(Format format, uint32_t bits) {
  const int max_exponent = (1 << format.exponent_bits) - 1;
  const int bias = max_exponent / 2;
  const int mantissa = static_cast<int>(bits) & ((1 << format.mantissa_bits) - 1);
  const int exponent = static_cast<int>(bits >> format.mantissa_bits) & max_exponent;
  const double sign = (bits & 0x8000u) != 0 ? -1 : 1;
  if (exponent == max_exponent) {
    return mantissa != 0 ? std::numeric_limits<double>::quiet_NaN()
                         : sign * std::numeric_limits<double>::infinity();
  }
  const double fraction = mantissa + (exponent != 0 ? 1 << format.mantissa_bits : 0);
  return sign * std::ldexp(fraction, std::max(exponent, 1) - bias - format.mantissa_bits);
}

// Magnitudes of all finite patterns; the index is the pattern. Then the value that comes after the
// largest one: what rounds to it overflows.
std::vector<double> finite_values(Format format) {
  const uint32_t infinity = ((1u << format.exponent_bits) - 1) << format.mantissa_bits;
  std::vector<double> values;
  for (uint32_t bits = 0; bits < infinity; ++bits) values.push_back(decode(format, bits));
  values.push_back(2 * values.back() - values[values.size() - 2]);
  return values;
}

// The nearest pattern, ties to the even one (whose last bit is 0).
uint32_t encode(const std::vector<double>& values, double value) {
  const uint32_t sign = std::signbit(value) ? 0x8000u : 0;
  const double magnitude = std::abs(value);
  const auto upper = std::lower_bound(values.begin(), values.end(), magnitude);
  const auto infinity = static_cast<uint32_t>(values.size() - 1);
  if (upper == values.end()) return sign | infinity;
  auto index = static_cast<uint32_t>(upper - values.begin());
  if (*upper != magnitude) {
    const double to_lower = magnitude - values[index - 1];
    const double to_upper = *upper - magnitude;
    if (to_lower < to_upper || (to_lower == to_upper && (index - 1) % 2 == 0)) --index;
  }
  return sign | index;
}

template <typename T>
void expect_round_trip(Format format) {
  for (uint32_t bits = 0; bits < 0x10000u; ++bits) {
    T stored;
    stored.bits = static_cast<uint16_t>(bits);
    const auto value = static_cast<float>(stored);
    const double expected = decode(format, bits);
    const T back(value);
    if (std::isnan(expected)) {
      ASSERT_TRUE(std::isnan(value)) << bits;
      ASSERT_TRUE(std::isnan(static_cast<float>(back))) << bits;
    } else {
      ASSERT_EQ(static_cast<double>(value), expected) << bits;
      ASSERT_EQ(std::signbit(value), (bits & 0x8000u) != 0) << bits;
      ASSERT_EQ(back.bits, bits);
    }
  }
}

template <typename T>
void expect_rounds_like(const std::vector<double>& values, float value) {
  ASSERT_EQ(T(value).bits, encode(values, static_cast<double>(value))) << value;
  ASSERT_EQ(T(-value).bits, encode(values, static_cast<double>(-value))) << -value;
}

// Between each pair of neighbours: the tie, the floats beside it, and a random point.
template <typename T>
void expect_rounding(Format format) {
  const std::vector<double> values = finite_values(format);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  std::mt19937 random(1);
  for (size_t i = 0; i + 1 < values.size(); ++i) {
    const auto middle = static_cast<float>((values[i] + values[i + 1]) / 2);
    const double share = std::uniform_real_distribution<double>(0, 1)(random);
    const auto between = static_cast<float>(values[i] + share * (values[i + 1] - values[i]));
    for (const float value : {static_cast<float>(values[i]), middle, std::nextafter(middle, 0.f),
                              std::nextafter(middle, kInfinity), between}) {
      expect_rounds_like<T>(values, value);
    }
  }
  for (int i = 0; i < 1'000'000; ++i) {
    const float value = std::bit_cast<float>(static_cast<uint32_t>(random()));
    if (!std::isnan(value)) expect_rounds_like<T>(values, value);
  }
  expect_rounds_like<T>(values, std::numeric_limits<float>::max());
  expect_rounds_like<T>(values, std::numeric_limits<float>::denorm_min());
  expect_rounds_like<T>(values, kInfinity);
}

TEST(Float16, AllPatternsAreDecodedAndRoundTrip) { expect_round_trip<Float16>(kHalf); }
TEST(BFloat16, AllPatternsAreDecodedAndRoundTrip) { expect_round_trip<BFloat16>(kBFloat); }
TEST(Float16, RoundsToNearestTiesToEven) { expect_rounding<Float16>(kHalf); }
TEST(BFloat16, RoundsToNearestTiesToEven) { expect_rounding<BFloat16>(kBFloat); }

TEST(Float16, KnownValues) {
  EXPECT_EQ(Float16(1.0f).bits, 0x3c00);
  EXPECT_EQ(Float16(-2.0f).bits, 0xc000);
  EXPECT_EQ(Float16(65504.0f).bits, 0x7bff);
  EXPECT_EQ(Float16(65519.996f).bits, 0x7bff);
  EXPECT_EQ(Float16(65520.0f).bits, 0x7c00);
  EXPECT_EQ(Float16(0x1p-24f).bits, 0x0001);
  EXPECT_EQ(Float16(0x1p-25f).bits, 0x0000);  // a tie, to even
  EXPECT_EQ(Float16(-0.0f).bits, 0x8000);
}

TEST(BFloat16, KnownValues) {
  EXPECT_EQ(BFloat16(1.0f).bits, 0x3f80);
  EXPECT_EQ(BFloat16(1.00390625f).bits, 0x3f80);  // 1 + 2^-8: a tie, to even
  EXPECT_EQ(BFloat16(1.01171875f).bits, 0x3f82);  // 1 + 3 * 2^-8: a tie, to even
  EXPECT_EQ(BFloat16(std::numeric_limits<float>::max()).bits, 0x7f80);
}

TEST(Float16, NanStaysNanWhateverItsPayload) {
  for (const uint32_t bits : {0x7f800001u, 0x7fc00000u, 0x7fffffffu, 0x7f802000u, 0xff800001u}) {
    const float nan = std::bit_cast<float>(bits);
    EXPECT_TRUE(std::isnan(static_cast<float>(Float16(nan)))) << bits;
    EXPECT_TRUE(std::isnan(static_cast<float>(BFloat16(nan)))) << bits;
    EXPECT_EQ(Float16(nan).bits & 0x8000u, bits >> 31 << 15);
    EXPECT_EQ(BFloat16(nan).bits & 0x8000u, bits >> 31 << 15);
  }
}

}  // namespace
}  // namespace cadre

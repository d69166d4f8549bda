#include "quant/float8.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace cadre {
namespace {

// By the definition of the formats: sign, exponent with its bias, mantissa; nothing of float8.h.
double by_definition(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const double fraction = std::ldexp(mantissa, -mantissa_bits);
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, 1 - bias) : std::ldexp(1 + fraction, exponent - bias);
  return (code >> (exponent_bits + mantissa_bits) & 1) != 0 ? -magnitude : magnitude;
}

TEST(E4m3, EveryCodeHasItsValue) {
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    if ((code & 0x7f) == 0x7f) {
      EXPECT_TRUE(std::isnan(value)) << code;
      continue;
    }
    EXPECT_EQ(value, by_definition(code, 4, 3, 7)) << code;
    EXPECT_EQ(std::signbit(value), code >= 128) << code;
    EXPECT_EQ(float_to_e4m3(value), code);
  }
  EXPECT_EQ(e4m3_to_float(0x7e), kMaxE4m3);
}

TEST(E2m1, EveryCodeHasItsValue) {
  for (int code = 0; code < 16; ++code) {
    const float value = e2m1_to_float(static_cast<uint8_t>(code));
    EXPECT_EQ(value, by_definition(code, 2, 1, 1)) << code;
    EXPECT_EQ(std::signbit(value), code >= 8) << code;
    EXPECT_EQ(float_to_e2m1(value), code);
  }
  EXPECT_EQ(e2m1_to_float(0x35), e2m1_to_float(0x5));  // the low nibble alone
}

// The nearest code by distance in float64, ties to the even code.
template <typename ToFloat>
int nearest(double value, int num_codes, ToFloat to_float) {
  int best = 0;
  for (int code = 1; code < num_codes; ++code) {
    const double now = std::fabs(to_float(static_cast<uint8_t>(code)) - value);
    const double least = std::fabs(to_float(static_cast<uint8_t>(best)) - value);
    if (now < least || (now == least && code % 2 == 0)) best = code;
  }
  return best;
}

// Between all neighbours: the middle, its neighbours in float32, and what lies around them.
TEST(E4m3, RoundsToTheNearestTiesToEven) {
  for (int code = 0; code < 0x7e; ++code) {
    const float low = e4m3_to_float(static_cast<uint8_t>(code));
    const float high = e4m3_to_float(static_cast<uint8_t>(code + 1));
    const float middle = (low + high) / 2;
    for (const float value : {middle, std::nextafter(middle, 0.0f), std::nextafter(middle, high),
                              low + (high - low) / 4, low + (high - low) * 3 / 4}) {
      const int expected = nearest(value, 0x7f, e4m3_to_float);
      EXPECT_EQ(float_to_e4m3(value), expected) << value;
      EXPECT_EQ(float_to_e4m3(-value), expected | 0x80) << value;
    }
  }
  EXPECT_EQ(float_to_e4m3(449), 0x7e);
  EXPECT_EQ(float_to_e4m3(1e30f), 0x7e);
  EXPECT_EQ(float_to_e4m3(-std::numeric_limits<float>::infinity()), 0xfe);
  EXPECT_EQ(float_to_e4m3(std::numeric_limits<float>::quiet_NaN()) & 0x7f, 0x7f);
  EXPECT_EQ(float_to_e4m3(1e-30f), 0);
  EXPECT_EQ(float_to_e4m3(-0.0f), 0x80);
}

TEST(E2m1, RoundsToTheNearestTiesToEven) {
  for (int i = 0; i <= 56; ++i) {
    const float value = static_cast<float>(i) / 8;
    const int expected = nearest(value, 8, e2m1_to_float);
    EXPECT_EQ(float_to_e2m1(value), expected) << value;
    EXPECT_EQ(float_to_e2m1(-value), expected | 8) << value;
  }
  EXPECT_EQ(float_to_e2m1(1e30f), 7);
  EXPECT_EQ(float_to_e2m1(-1e30f), 15);
}

TEST(E8m0, IsABareExponent) {
  EXPECT_EQ(e8m0_to_float(0), std::ldexp(1.0f, -127));
  EXPECT_EQ(e8m0_to_float(1), std::ldexp(1.0f, -126));
  EXPECT_EQ(e8m0_to_float(127), 1.0f);
  EXPECT_EQ(e8m0_to_float(254), std::ldexp(1.0f, 127));
  EXPECT_TRUE(std::isnan(e8m0_to_float(255)));
}

}  // namespace
}  // namespace cadre

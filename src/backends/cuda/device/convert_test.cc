#include "backends/cuda/device/convert.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstring>
#include <vector>

#include "cadre/float16.h"

namespace cadre::cuda {
namespace {

template <typename To, typename From>
std::vector<To> converted(DType from_dtype, const std::vector<From>& from, DType to_dtype) {
  std::vector<To> to(from.size());
  convert(from.data(), from_dtype, to.data(), to_dtype, static_cast<int64_t>(from.size()));
  return to;
}

template <typename T>
std::vector<T> every_16_bit_value() {
  std::vector<T> values(1 << 16);
  for (size_t i = 0; i < values.size(); ++i) values[i].bits = static_cast<uint16_t>(i);
  return values;
}

template <typename T>
void check_round_trip(DType dtype) {
  const std::vector<T> values = every_16_bit_value<T>();
  const std::vector<float> wide = converted<float>(dtype, values, DType::kF32);
  const std::vector<T> back = converted<T>(DType::kF32, wide, dtype);
  for (size_t i = 0; i < values.size(); ++i) {
    if (std::isnan(wide[i])) {
      EXPECT_TRUE(std::isnan(static_cast<float>(back[i]))) << i;
    } else {
      EXPECT_EQ(back[i].bits, values[i].bits) << i;
    }
  }
}

TEST(Convert, SixteenBitsToFloatAndBackIsExact) {
  check_round_trip<BFloat16>(DType::kBF16);
  check_round_trip<Float16>(DType::kF16);
}

TEST(Convert, RoundsToNearestEven) {
  const std::vector<float> values = {1 + 0x1p-8f, 1 + 0x3p-8f, 1 + 0x1p-11f, 1 + 0x3p-11f, 65519.0f,
                                     65520.0f,    -0.0f,       0x1p-25f,     0x1.8p-25f};
  const std::vector<BFloat16> bf16 = converted<BFloat16>(DType::kF32, values, DType::kBF16);
  EXPECT_EQ(static_cast<float>(bf16[0]), 1.0f);         // a tie, down to even
  EXPECT_EQ(static_cast<float>(bf16[1]), 1 + 0x4p-8f);  // a tie, up to even
  const std::vector<Float16> f16 = converted<Float16>(DType::kF32, values, DType::kF16);
  EXPECT_EQ(static_cast<float>(f16[2]), 1.0f);
  EXPECT_EQ(static_cast<float>(f16[3]), 1 + 0x4p-11f);
  EXPECT_EQ(static_cast<float>(f16[4]), 65504.0f);
  EXPECT_TRUE(std::isinf(static_cast<float>(f16[5])));
  EXPECT_TRUE(std::signbit(static_cast<float>(f16[6])));
  EXPECT_EQ(static_cast<float>(f16[7]), 0.0f);      // half of the smallest subnormal: a tie
  EXPECT_EQ(static_cast<float>(f16[8]), 0x1p-24f);  // more than half
}

// Every exponent, with the bits around a rounding point and NaNs with every kind of payload: blocks
// of eight and single values give what float16.h gives.
TEST(Convert, ManyFloatsAtATimeGiveTheSameBits) {
  std::vector<float> values;
  for (uint32_t top = 0; top < (1u << 16); ++top) {
    for (const uint32_t low : {0u, 1u, 0x0fffu, 0x1000u, 0x7fffu, 0x8000u, 0x8001u, 0xffffu}) {
      values.push_back(std::bit_cast<float>(top << 16 | low));
    }
  }
  values.resize(values.size() - 3);  // not a multiple of eight
  const std::vector<BFloat16> bf16 = converted<BFloat16>(DType::kF32, values, DType::kBF16);
  const std::vector<Float16> f16 = converted<Float16>(DType::kF32, values, DType::kF16);
  size_t wrong = 0;
  for (size_t i = 0; i < values.size(); ++i) {
    if (bf16[i].bits != BFloat16(values[i]).bits || f16[i].bits != Float16(values[i]).bits) ++wrong;
  }
  EXPECT_EQ(wrong, 0u);
}

TEST(Convert, BetweenTheSixteenBitFormats) {
  const std::vector<BFloat16> bf16 = {BFloat16(1.5f), BFloat16(1e6f), BFloat16(-0x1p-24f)};
  const std::vector<Float16> f16 = converted<Float16>(DType::kBF16, bf16, DType::kF16);
  EXPECT_EQ(static_cast<float>(f16[0]), 1.5f);
  EXPECT_TRUE(std::isinf(static_cast<float>(f16[1])));
  EXPECT_EQ(static_cast<float>(f16[2]), -0x1p-24f);
  const std::vector<Float16> fine = {Float16(1 + 0x1p-10f)};
  EXPECT_EQ(static_cast<float>(converted<BFloat16>(DType::kF16, fine, DType::kBF16)[0]), 1.0f);
}

TEST(Convert, AddressesNeedNoAlignment) {
  std::vector<char> from(1 + 4 * 37);
  std::vector<char> to(1 + 2 * 37);
  for (int i = 0; i < 37; ++i) {
    const float value = static_cast<float>(i) - 11.5f;
    std::memcpy(from.data() + 1 + 4 * i, &value, 4);
  }
  convert(from.data() + 1, DType::kF32, to.data() + 1, DType::kBF16, 37);
  for (int i = 0; i < 37; ++i) {
    BFloat16 value;
    std::memcpy(&value, to.data() + 1 + 2 * i, 2);
    EXPECT_EQ(static_cast<float>(value), static_cast<float>(i) - 11.5f);
  }
}

TEST(Convert, OtherDtypesServeUnchangedOnly) {
  EXPECT_TRUE(can_convert(DType::kI64, DType::kI64));
  EXPECT_TRUE(can_convert(DType::kF8E4M3, DType::kF8E4M3));
  EXPECT_FALSE(can_convert(DType::kI64, DType::kF32));
  EXPECT_FALSE(can_convert(DType::kF8E4M3, DType::kBF16));
  const std::vector<int64_t> values = {1, -2, int64_t{1} << 40};
  EXPECT_EQ(converted<int64_t>(DType::kI64, values, DType::kI64), values);
}

}  // namespace
}  // namespace cadre::cuda

#include "quant/activations.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <vector>

namespace cadre {
namespace {

struct Quantized {
  std::vector<uint8_t> codes;
  std::vector<float> scales;

  double value(size_t i, size_t group) const {
    return static_cast<double>(e4m3_to_float(codes[i])) * scales[i / group];
  }
};

Quantized quantize(const std::vector<float>& x, int64_t group) {
  const auto k = static_cast<int64_t>(x.size());
  Quantized q{std::vector<uint8_t>(x.size()),
              std::vector<float>(static_cast<size_t>((k + group - 1) / group))};
  quantize_activations(x.data(), k, group, q.codes.data(), q.scales.data());
  return q;
}

TEST(Activations, EachGroupHasItsOwnScale) {
  std::vector<float> x(160);
  for (size_t i = 0; i < x.size(); ++i) x[i] = std::sin(static_cast<float>(i) + 1);
  x[3] = -896;  // of the first group
  x[130] = 2;   // of the second, which is not full
  const Quantized q = quantize(x, kActivationGroup);
  EXPECT_EQ(q.scales, (std::vector<float>{2, 2.0f / 448}));
  EXPECT_EQ(q.codes[3], 0xfe);
  EXPECT_EQ(q.codes[130], 0x7e);
  for (size_t i = 128; i < x.size(); ++i) {
    // Half a unit of three mantissa bits, or of the smallest ones.
    const double bound = std::fmax(std::fabs(x[i]) / 16, q.scales[1] * 0x1p-10);
    EXPECT_NEAR(q.value(i, 128), x[i], bound * 1.001) << i;
  }
}

TEST(Activations, GroupsOf32ForFp4) {
  std::vector<float> x(64, 1);
  x[40] = 448;
  EXPECT_EQ(quantize(x, kFp4ActivationGroup).scales, (std::vector<float>{1.0f / 448, 1}));
}

TEST(Activations, ZerosGiveZerosAndNoNan) {
  const Quantized q = quantize(std::vector<float>(128, 0.0f), kActivationGroup);
  for (size_t i = 0; i < 128; ++i) EXPECT_EQ(q.value(i, 128), 0);
  EXPECT_GT(q.scales[0], 0);
  EXPECT_TRUE(std::isnormal(q.scales[0]));
}

TEST(Activations, TinyValuesVanishHugeOnesStayFinite) {
  EXPECT_EQ(quantize(std::vector<float>(8, 1e-38f), kActivationGroup).value(0, 128), 0);
  const float largest = std::numeric_limits<float>::max();
  const Quantized q = quantize(std::vector<float>(8, largest), kActivationGroup);
  EXPECT_NEAR(q.value(0, 128) / largest, 1, 1e-6);
}

TEST(Activations, NanAndInfinityMakeTheirGroupNanAndNoOther) {
  for (const float bad :
       {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity(),
        -std::numeric_limits<float>::infinity(), -std::numeric_limits<float>::quiet_NaN()}) {
    std::vector<float> x(256, 1);
    x[7] = bad;
    const Quantized q = quantize(x, kActivationGroup);
    EXPECT_TRUE(std::isnan(q.scales[0]));
    EXPECT_EQ(q.codes[7], 0);
    EXPECT_EQ(q.codes[8], 0);
    EXPECT_EQ(q.scales[1], 1.0f / 448);
  }
}

TEST(Activations, StaticScalesSaturate) {
  const std::vector<float> x = {0.5f, -1, 1000, std::numeric_limits<float>::quiet_NaN()};
  std::vector<uint8_t> codes(4);
  quantize_activations(x.data(), 4, 0.5f, codes.data());
  EXPECT_EQ(codes[0], float_to_e4m3(1));
  EXPECT_EQ(codes[1], float_to_e4m3(-2));
  EXPECT_EQ(codes[2], 0x7e);
  EXPECT_EQ(codes[3] & 0x7f, 0x7f);
}

}  // namespace
}  // namespace cadre

// Stored values by hand, bytes and floats, and both ways against the definition of the formats.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "cadre/quantization.h"
#include "cadre/thread_pool.h"
#include "io/safetensors.h"
#include "quant/float8.h"
#include "support/compare.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

using test::expect_error;
using test::to_doubles;

constexpr float kInf = std::numeric_limits<float>::infinity();
constexpr ScaleLayout kMx{DType::kF8E8M0, 1, 32};

std::vector<uint8_t> bytes_of(const Tensor& tensor) {
  const auto* data = static_cast<const uint8_t*>(tensor->data());
  return {data, data + tensor->nbytes()};
}

std::vector<float> random_values(size_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(random);
  return values;
}

TensorView view(const std::vector<float>& values, const Dims& shape) {
  return {values.data(), DType::kF32, shape};
}

std::vector<double> dequantized(const QuantizedTensor& weight, const Dims& shape,
                                DType dtype = DType::kF32) {
  const Tensor out(dtype, shape);
  dequantize(weight, out);
  return to_doubles(out.view());
}

// ---- by hand: stored values to floats ----------------------------------------------------------

// The 16 codes in ascending order, twice: in a byte the low nibble comes first.
constexpr std::array<uint8_t, 16> kAllE2m1 = {0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe,
                                              0x10, 0x32, 0x54, 0x76, 0x98, 0xba, 0xdc, 0xfe};
constexpr std::array<float, 16> kE2m1Values = {0,     0.5f,  1,  1.5f,  2,  3,  4,  6,
                                               -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6};

TEST(DequantizeByHand, AllCodesOfE2m1TheOrderOfNibblesAndExponentBytes) {
  const std::array<uint8_t, 5> exponents = {0, 1, 127, 254, 255};
  const std::array<float, 5> scales = {0x1p-127f, 0x1p-126f, 1, 0x1p127f, std::nanf("")};
  std::vector<uint8_t> values(5 * 16);
  for (size_t i = 0; i < values.size(); ++i) values[i] = kAllE2m1[i % 16];
  // As int8 [5, 16], as uint8, and as the groups of 16 bytes of GPT-OSS; scales as both containers.
  const TensorView forms[] = {{values.data(), DType::kI8, {5, 16}},
                              {values.data(), DType::kU8, {5, 16}},
                              {values.data(), DType::kU8, {5, 1, 16}}};
  for (const TensorView& form : forms) {
    for (const DType container : {DType::kF8E8M0, DType::kU8}) {
      const TensorView scale(exponents.data(), container, {5, 1});
      const Tensor out(DType::kF32, {5, 32});
      dequantize({StorageFormat::kFp4, kMx, form, scale}, out);
      const float* got = out->as<float>();
      for (size_t i = 0; i < 5 * 32; ++i) {
        const float expected = kE2m1Values[i % 16] * scales[i / 32];  // 4 * 2^127 is infinite
        if (std::isnan(expected)) {
          EXPECT_TRUE(std::isnan(got[i])) << i;
        } else {
          EXPECT_EQ(got[i], expected) << i;
          EXPECT_EQ(std::signbit(got[i]), std::signbit(expected)) << i;
        }
      }
    }
  }
}

TEST(DequantizeByHand, CodesOfE4m3WithScaleOneAndAHalf) {
  // 1, 2, 448, the smallest, -1, 0, -0, -448, NaN, -NaN, 1.125, 0.015625 (2^-6)
  const std::vector<uint8_t> codes = {0x38, 0x40, 0x7e, 0x01, 0xb8, 0x00,
                                      0x80, 0xfe, 0x7f, 0xff, 0x39, 0x08};
  const std::vector<double> expected = {1.5,  3,    672, 0x3p-10, -1.5,   0,
                                        -0.0, -672, 0,   0,       1.6875, 0.0234375};
  const float scale = 1.5f;
  const auto got = dequantized({StorageFormat::kFp8Tensor,
                                {DType::kF32, 0, 0},
                                {codes.data(), DType::kF8E4M3, {2, 6}},
                                {&scale, DType::kF32, {1, 1}}},
                               {2, 6});
  for (size_t i = 0; i < codes.size(); ++i) {
    if (i == 8 || i == 9) {
      EXPECT_TRUE(std::isnan(got[i]));
    } else {
      EXPECT_EQ(got[i], expected[i]) << i;
    }
  }
}

// 1.125 * (1 + 2^-8) = 1.12939453125, exact in float32; bfloat16 has 1.125 and 1.1328125 beside it,
// float16 1.12890625 and 1.1298828125, at the same distance: the even one.
TEST(DequantizeByHand, RoundsToTheDtypeOfTheOutput) {
  const uint8_t code = 0x39;
  const float scale = 1 + 0x1p-8f;
  const QuantizedTensor weight{StorageFormat::kFp8Tensor,
                               {DType::kF32, 0, 0},
                               {&code, DType::kF8E4M3, {1, 1}},
                               {&scale, DType::kF32, {}}};
  EXPECT_EQ(dequantized(weight, {1, 1}), (std::vector<double>{1.12939453125}));
  EXPECT_EQ(dequantized(weight, {1, 1}, DType::kBF16), (std::vector<double>{1.1328125}));
  EXPECT_EQ(dequantized(weight, {1, 1}, DType::kF16), (std::vector<double>{1.12890625}));
}

// ---- by hand: floats to stored values ----------------------------------------------------------

TEST(QuantizeByHand, Fp8BlocksWithPartialOnesAndAZeroBlock) {
  // Blocks of 2 x 2 of a 3 x 3 matrix; amax 896, 0, 448 and 1.
  const std::vector<float> weight = {896, 2, 0, 3, -448, 0, 448, 1, 1};
  const ScaleLayout layout{DType::kF32, 2, 2};
  const QuantizedWeight q = quantize(view(weight, {3, 3}), StorageFormat::kFp8Block, layout);
  EXPECT_EQ(q.values->shape(), (Dims{3, 3}));
  EXPECT_EQ(q.values->dtype(), DType::kF8E4M3);
  EXPECT_EQ(q.scales->shape(), (Dims{2, 2}));
  const float* scales = q.scales->as<float>();
  EXPECT_EQ(scales[0], 2);
  EXPECT_EQ(scales[1], 1) << "a block of zeros";
  EXPECT_EQ(scales[2], 1);
  EXPECT_EQ(scales[3], 1.0f / 448);
  // 448, 1, 0; 1.5, -224, 0; 448, 1, 448
  EXPECT_EQ(bytes_of(q.values),
            (std::vector<uint8_t>{0x7e, 0x38, 0, 0x3c, 0xf6, 0, 0x7e, 0x38, 0x7e}));
}

TEST(QuantizeByHand, PowerOfTwoScalesAreRoundedUpBeforeValuesAreDivided) {
  const ScaleLayout layout{DType::kF8E8M0, 1, 1};
  // amax / 448: exactly 1, just above 1, 1.5, just below 2^-126, 2^-127 and far below
  const std::vector<float> weight = {
      448, std::nextafter(448.0f, 500.0f), 672, 447 * 0x1p-126f, 448 * 0x1p-127f, 0x1p-140f};
  const QuantizedWeight q = quantize(view(weight, {1, 6}), StorageFormat::kFp8Block, layout);
  EXPECT_EQ(bytes_of(q.scales), (std::vector<uint8_t>{127, 128, 128, 1, 0, 0}));
  // 448; 224; 336 (a tie between 320 and 352: even); 448 (nearest to 447); 448; 2^-13: to nothing
  EXPECT_EQ(bytes_of(q.values), (std::vector<uint8_t>{0x7e, 0x76, 0x7a, 0x7e, 0x7e, 0x00}));
}

TEST(QuantizeByHand, Fp4PacksTheEvenColumnLow) {
  std::vector<float> weight(2 * 33, 0.0f);
  const std::vector<float> row = {0.5f, 1, 1.5f, 2, 3, 4, 6, -6, -0.5f};
  std::copy(row.begin(), row.end(), weight.begin());
  weight[32] = -12;  // alone in the second group of row 0; row 1 is zero
  const QuantizedWeight q = quantize(view(weight, {2, 33}), StorageFormat::kFp4, kMx);
  EXPECT_EQ(q.values->shape(), (Dims{2, 17}));
  EXPECT_EQ(q.values->dtype(), DType::kI8);
  EXPECT_EQ(bytes_of(q.scales), (std::vector<uint8_t>{127, 128, 127, 127}));
  std::vector<uint8_t> expected(34, 0);
  expected[0] = 0x21;
  expected[1] = 0x43;
  expected[2] = 0x65;
  expected[3] = 0xf7;
  expected[4] = 0x09;
  expected[16] = 0x0f;
  EXPECT_EQ(bytes_of(q.values), expected);
}

// Of [7, many ones and a half] the scale 2 keeps 7 in range (as 8 or 6) and makes all others
// coarse; the scale 1 cuts 7 to 6 and keeps the others exact.
TEST(QuantizeByHand, Fp4TakesHalfTheScaleWhereThatIsNearer) {
  std::vector<float> weight(32, 1.5f);
  weight[0] = 7;
  const QuantizedWeight q = quantize(view(weight, {1, 32}), StorageFormat::kFp4, kMx);
  EXPECT_EQ(bytes_of(q.scales), (std::vector<uint8_t>{127}));
  EXPECT_EQ(bytes_of(q.values)[0], 0x37);
  weight[0] = 11;  // cut to 6 it would be far off
  EXPECT_EQ(bytes_of(quantize(view(weight, {1, 32}), StorageFormat::kFp4, kMx).scales),
            (std::vector<uint8_t>{128}));
}

TEST(QuantizeByHand, MxFp8HasOneExponentPer32) {
  std::vector<float> weight(40, 1.0f);
  weight[3] = 449;
  const QuantizedWeight q = quantize(view(weight, {1, 40}), StorageFormat::kMxFp8, kMx);
  EXPECT_EQ(bytes_of(q.scales), (std::vector<uint8_t>{128, 119}));  // 2, 2^-8 (1 / 448 rounded up)
  EXPECT_EQ(bytes_of(q.values)[0], 0x30);                           // 0.5
  EXPECT_EQ(bytes_of(q.values)[3], 0x76);                           // 224
  EXPECT_EQ(bytes_of(q.values)[39], 0x78);                          // 256
}

// ---- both ways against the definition ----------------------------------------------------------

struct Case {
  StorageFormat format;
  ScaleLayout layout;
};
const Case kCases[] = {{StorageFormat::kFp8Block, {DType::kF32, 128, 128}},
                       {StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}},
                       {StorageFormat::kFp8Block, {DType::kF32, 96, 64}},
                       {StorageFormat::kFp8Block, {DType::kF8E8M0, 1, 7}},
                       {StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}},
                       {StorageFormat::kMxFp8, kMx},
                       {StorageFormat::kFp4, kMx}};

// Each value lies within half a step of the format around it, given the scale that was stored.
TEST(Quantize, EveryValueIsTheNearestOne) {
  for (const Case& c : kCases) {
    for (const auto& [n, k] :
         {std::pair<int64_t, int64_t>{200, 150}, {1, 1}, {5, 33}, {129, 257}}) {
      const auto weight = random_values(static_cast<size_t>(n * k), 3);
      const QuantizedWeight q = quantize(view(weight, {n, k}), c.format, c.layout);
      const auto got = dequantized(q.view(), {n, k});
      const int64_t cols = q.scales->dim(1);
      for (int64_t i = 0; i < n * k; ++i) {
        const int64_t row = c.layout.block_rows == 0 ? 0 : i / k / c.layout.block_rows;
        const int64_t col = c.layout.block_cols == 0 ? 0 : i % k / c.layout.block_cols;
        const int64_t at = row * cols + col;
        const double scale = c.layout.dtype == DType::kF32
                                 ? q.scales->as<float>()[at]
                                 : std::ldexp(1.0, q.scales->as<uint8_t>()[at] - 127);
        const double x = weight[static_cast<size_t>(i)];
        const double magnitude = std::abs(x) / scale;
        double step;  // between neighbours around it
        if (c.format == StorageFormat::kFp4) {
          step = magnitude < 2 ? 0.5 : magnitude < 4 ? 1 : 2;
          if (magnitude > 6) step = 2 * (magnitude - 6);  // cut: half the scale was nearer
          EXPECT_LE(magnitude, 12);
        } else {
          EXPECT_LE(magnitude, 448.0001);
          step = std::max(std::ldexp(1.0, std::max(std::ilogb(magnitude), -6) - 3), 0.0);
        }
        EXPECT_LE(std::abs(got[static_cast<size_t>(i)] - x), (0.5 * step + 1e-4) * scale)
            << name_of(c.format) << " " << n << " x " << k << " at " << i << ": " << x;
      }
    }
  }
}

// The other of the two exponents is never nearer.
TEST(Quantize, Fp4ChoosesTheBetterOfTwoExponents) {
  const auto weight = random_values(64 * 32, 11);
  const QuantizedWeight q = quantize(view(weight, {64, 32}), StorageFormat::kFp4, kMx);
  const auto got = dequantized(q.view(), {64, 32});
  constexpr std::array<double, 8> kMagnitudes = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (size_t row = 0; row < 64; ++row) {
    double error = 0, amax = 0;
    std::array<double, 2> best = {0, 0};
    for (size_t i = row * 32; i < (row + 1) * 32; ++i) {
      amax = std::max(amax, std::abs(double{weight[i]}));
      error += (got[i] - weight[i]) * (got[i] - weight[i]);
    }
    const double up = std::exp2(std::ceil(std::log2(amax / 6)));
    for (size_t i = row * 32; i < (row + 1) * 32; ++i) {
      for (size_t choice = 0; choice < 2; ++choice) {
        double nearest = 1e9;
        for (const double m : kMagnitudes) {
          const double scale = choice == 0 ? up : up / 2;
          nearest = std::min(nearest, std::abs(std::abs(weight[i]) - m * scale));
        }
        best[choice] += nearest * nearest;
      }
    }
    EXPECT_NEAR(error, std::min(best[0], best[1]), 1e-6) << row;
  }
}

// What Transformers' own operations made (tests/data/make/make_quantized.py). Its float32 scales
// are 1 / (448 / amax): within one unit of ours in the last place; powers of two are the same.
TEST(AgainstTransformers, QuantizesAlike) {
  const auto file = SafetensorsFile::open(CADRE_TEST_DATA "/quantized/transformers.safetensors");
  for (const std::string name : {"float", "ue8m0"}) {
    const bool is_float = name == "float";
    const ScaleLayout layout{is_float ? DType::kF32 : DType::kF8E8M0, 32, 32};
    const QuantizedWeight q = quantize(file.tensor("weight"), StorageFormat::kFp8Block, layout);
    const TensorView values = file.tensor(name + ".values"), scales = file.tensor(name + ".scales");
    ASSERT_EQ(q.scales->shape(), scales.shape());
    int different_values = 0;
    for (int64_t i = 0; i < values.numel(); ++i) {
      different_values += q.values->as<uint8_t>()[i] != values.as<uint8_t>()[i];
    }
    for (int64_t i = 0; i < scales.numel(); ++i) {
      if (is_float) {
        EXPECT_FLOAT_EQ(q.scales->as<float>()[i], scales.as<float>()[i]) << i;
      } else {
        EXPECT_EQ(q.scales->as<uint8_t>()[i], scales.as<uint8_t>()[i]) << i;
      }
    }
    EXPECT_LE(different_values, is_float ? 8 : 0) << name << ": values next to a tie alone";
  }
}

TEST(AgainstTransformers, DequantizesToTheSameBits) {
  const auto file = SafetensorsFile::open(CADRE_TEST_DATA "/quantized/transformers.safetensors");
  for (const std::string name : {"float", "ue8m0", "fp4"}) {
    const bool is_fp4 = name == "fp4";
    const StorageFormat format = is_fp4 ? StorageFormat::kFp4 : StorageFormat::kFp8Block;
    const ScaleLayout layout =
        is_fp4 ? kMx : ScaleLayout{name == "float" ? DType::kF32 : DType::kF8E8M0, 32, 32};
    const TensorView expected = file.tensor(name + ".dequantized");
    const Tensor out(DType::kBF16, expected.shape());
    dequantize({format, layout, file.tensor(name + ".values"), file.tensor(name + ".scales")}, out);
    EXPECT_EQ(std::memcmp(out->data(), expected.data(), expected.nbytes()), 0) << name;
  }
}

TEST(Quantize, ExpertsAndThreadsAndStridesChangeNothing) {
  ThreadPool pool(3);
  for (const Case& c : kCases) {
    const auto weight = random_values(3 * 130 * 70, 5);
    const QuantizedWeight all = quantize(view(weight, {3, 130, 70}), c.format, c.layout, &pool);
    EXPECT_EQ(all.values->rank(), 3);
    EXPECT_EQ(all.scales->rank(), 3);
    std::vector<float> transposed(weight.size());
    for (size_t e = 0; e < 3; ++e) {
      const TensorView one = view(weight, {3, 130, 70})[static_cast<int64_t>(e)];
      const QuantizedWeight q = quantize(one, c.format, c.layout);
      EXPECT_EQ(std::memcmp(q.values->data(), all.values.view()[static_cast<int64_t>(e)].data(),
                            q.values->nbytes()),
                0);
      EXPECT_EQ(std::memcmp(q.scales->data(), all.scales.view()[static_cast<int64_t>(e)].data(),
                            q.scales->nbytes()),
                0);
      for (size_t i = 0; i < 130 * 70; ++i) {
        transposed[e * 9100 + i % 70 * 130 + i / 70] = weight[e * 9100 + i];
      }
    }
    const TensorView columns(transposed.data(), DType::kF32, {3, 130, 70}, {9100, 1, 130});
    const QuantizedWeight from_columns = quantize(columns, c.format, c.layout);
    EXPECT_EQ(bytes_of(from_columns.values), bytes_of(all.values)) << name_of(c.format);
    const Tensor out(DType::kBF16, {3, 130, 70}), threaded(DType::kBF16, {3, 130, 70});
    dequantize(all.view(), out);
    dequantize(all.view(), threaded, &pool);
    EXPECT_EQ(bytes_of(out), bytes_of(threaded));
  }
}

TEST(Quantize, TakesEveryPlainDtype) {
  const std::vector<float> values = {0.5f, -1, 3, 0.25f};
  const Tensor bf16(DType::kBF16, {2, 2}), fp16(DType::kF16, {2, 2});
  for (size_t i = 0; i < 4; ++i) {
    bf16->as<BFloat16>()[i] = BFloat16(values[i]);
    fp16->as<Float16>()[i] = Float16(values[i]);
  }
  const ScaleLayout layout{DType::kF32, 0, 0};
  const auto expected =
      bytes_of(quantize(view(values, {2, 2}), StorageFormat::kFp8Tensor, layout).values);
  for (const Tensor& weight : {bf16, fp16}) {
    EXPECT_EQ(bytes_of(quantize(weight.view(), StorageFormat::kFp8Tensor, layout).values),
              expected);
  }
}

TEST(Quantize, NamesThePlaceOfWhatIsNotFinite) {
  for (const float bad : {kInf, -kInf, std::nanf("")}) {
    for (const Case& c : kCases) {
      std::vector<float> weight(2 * 3 * 40, 1.0f);
      weight[1 * 120 + 2 * 40 + 37] = bad;
      expect_error<InvalidArgument>(
          [&] {
            quantize(view(weight, {2, 3, 40}), c.format, c.layout);
          },
          {"[1, 2, 37]", "float32 [2, 3, 40]"});
    }
  }
}

TEST(Quantize, RefusesWhatDoesNotFit) {
  const std::vector<float> values(16);
  const ScaleLayout blocks{DType::kF32, 128, 128};
  const auto refuse = [&](const TensorView& weight, StorageFormat format, ScaleLayout layout,
                          const std::string& part) {
    expect_error<InvalidArgument>([&] { quantize(weight, format, layout); }, {part});
  };
  refuse({values.data(), DType::kF32, {16}}, StorageFormat::kFp8Block, blocks, "[16]");
  refuse({values.data(), DType::kI32, {4, 4}}, StorageFormat::kFp8Block, blocks, "int32");
  refuse({nullptr, DType::kF32, {4, 4}}, StorageFormat::kFp8Block, blocks, "weight");
  refuse(view(values, {4, 4}), StorageFormat::kBF16, blocks, "bfloat16");
  refuse(view(values, {4, 4}), StorageFormat::kFp4, blocks, "fp4");
  refuse(view(values, {4, 4}), StorageFormat::kFp8Block, {DType::kF32, 0, 1}, "0 x 1");
  constexpr int64_t kHuge = int64_t{1} << 40;
  expect_error<InvalidArgument>(
      [&] {
        quantize({values.data(), DType::kF32, {kHuge, kHuge}}, StorageFormat::kFp8Block, blocks);
      },
      {"2^63 - 1"});
}

TEST(Dequantize, NamesBothShapesAndDtypes) {
  const std::vector<uint8_t> values(64 * 64);
  const std::vector<float> scales(64);
  const Tensor out(DType::kBF16, {4, 64});
  const ScaleLayout blocks{DType::kF32, 2, 32};
  const auto refuse = [&](const QuantizedTensor& weight, std::initializer_list<std::string> parts) {
    expect_error<InvalidArgument>([&] { dequantize(weight, out); }, parts);
  };
  const TensorView v(values.data(), DType::kF8E4M3, {4, 64});
  const TensorView s(scales.data(), DType::kF32, {2, 2});
  EXPECT_NO_THROW(dequantize({StorageFormat::kFp8Block, blocks, v, s}, out));
  refuse({StorageFormat::kFp8Block, blocks, {values.data(), DType::kF8E4M3, {4, 63}}, s},
         {"values", "float8_e4m3 [4, 64]", "[4, 63]", "bfloat16 [4, 64]"});
  refuse({StorageFormat::kFp8Block, blocks, {values.data(), DType::kU8, {4, 64}}, s},
         {"values", "float8_e4m3", "uint8"});
  refuse({StorageFormat::kFp8Block, blocks, v, {scales.data(), DType::kF32, {2, 1}}},
         {"scales", "float32 [2, 2]", "[2, 1]"});
  refuse({StorageFormat::kFp8Block, blocks, v, {scales.data(), DType::kF32, {4}}},
         {"scales", "float32 [2, 2]", "[4]"});
  refuse({StorageFormat::kFp8Block, blocks, v, {scales.data(), DType::kBF16, {2, 2}}},
         {"scales", "float32", "bfloat16"});
  refuse({StorageFormat::kFp4,
          kMx,
          {values.data(), DType::kI8, {4, 64}},
          {scales.data(), DType::kF8E8M0, {4, 2}}},
         {"values", "int8 or uint8 [4, 32]", "[4, 64]"});
  refuse({StorageFormat::kFp4, kMx, {values.data(), DType::kI8, {4, 32}}, {}},
         {"scales", "float8_e8m0 [4, 2]"});
  refuse({StorageFormat::kBF16, blocks, v, s}, {"bfloat16"});
}

TEST(Dequantize, ReadsStridedValuesAndScales) {
  const auto weight = random_values(6 * 64, 8);
  const QuantizedWeight q = quantize(view(weight, {6, 64}), StorageFormat::kMxFp8, kMx);
  const auto all = dequantized(q.view(), {6, 64});
  // Every second row, and the scales from a transposed copy.
  std::vector<uint8_t> turned(12);
  for (size_t i = 0; i < 12; ++i) turned[i % 2 * 6 + i / 2] = q.scales->as<uint8_t>()[i];
  const QuantizedTensor odd{
      StorageFormat::kMxFp8, kMx,
      TensorView(q.values->as<uint8_t>() + 64, DType::kF8E4M3, {3, 64}, {128, 1}),
      TensorView(turned.data() + 1, DType::kF8E8M0, {3, 2}, {2, 6})};
  const auto got = dequantized(odd, {3, 64});
  for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(got[i], all[(i / 64 * 2 + 1) * 64 + i % 64]);
}

}  // namespace
}  // namespace cadre

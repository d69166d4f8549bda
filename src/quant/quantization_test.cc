// Configs, layouts and containers of scales.
#include "cadre/quantization.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "cadre/error.h"
#include "cadre/float16.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

using test::expect_error;

TEST(FineGrainedFP8Config, MeansAFormatAndALayout) {
  FineGrainedFP8Config config;
  EXPECT_EQ(storage_format_of(config), StorageFormat::kFp8Block);
  EXPECT_EQ(scale_layout_of(config), (ScaleLayout{DType::kF32, 128, 128}));
  config.weight_block_size = {{64, 32}};
  config.scale_fmt = ScaleFormat::kUe8m0;
  EXPECT_EQ(scale_layout_of(config), (ScaleLayout{DType::kF8E8M0, 64, 32}));
  config.weight_block_size.reset();
  EXPECT_EQ(storage_format_of(config), StorageFormat::kFp8Tensor);
  EXPECT_EQ(scale_layout_of(config), (ScaleLayout{DType::kF32, 0, 0}));
}

TEST(FineGrainedFP8Config, NamesTheFieldThatIsWrong) {
  FineGrainedFP8Config config;
  config.weight_block_size = {{128, 0}};
  expect_error<InvalidArgument>([&] { validate(config); }, {"weight_block_size", "[128, 0]"});
  expect_error<InvalidArgument>([&] { scale_layout_of(config); }, {"weight_block_size"});
  config.weight_block_size = {{-1, 128}};
  expect_error<InvalidArgument>([&] { storage_format_of(config); }, {"[-1, 128]"});
  config = {};
  config.activation_scheme = ActivationScheme::kNone;
  expect_error<InvalidArgument>([&] { validate(config); }, {"activation_scheme"});
}

TEST(ScaleLayout, EachFormatTakesItsOwn) {
  EXPECT_EQ(scale_layout_of(StorageFormat::kFp8Block), (ScaleLayout{DType::kF32, 128, 128}));
  EXPECT_EQ(scale_layout_of(StorageFormat::kFp4), (ScaleLayout{DType::kF8E8M0, 1, 32}));
  for (const StorageFormat format : {StorageFormat::kFp8Block, StorageFormat::kFp8Tensor,
                                     StorageFormat::kMxFp8, StorageFormat::kFp4}) {
    EXPECT_NO_THROW(validate(format, scale_layout_of(format)));
  }
  EXPECT_NO_THROW(validate(StorageFormat::kFp8Block, {DType::kF8E8M0, 1, 96}));
  for (const auto& [format, layout] : std::vector<std::pair<StorageFormat, ScaleLayout>>{
           {StorageFormat::kFp8Block, {DType::kBF16, 128, 128}},
           {StorageFormat::kFp8Block, {DType::kF32, 0, 128}},
           {StorageFormat::kFp8Tensor, {DType::kF32, 128, 128}},
           {StorageFormat::kMxFp8, {DType::kF32, 1, 32}},
           {StorageFormat::kFp4, {DType::kF8E8M0, 1, 16}},
           {StorageFormat::kBF16, {DType::kF32, 0, 0}}}) {
    EXPECT_THROW(validate(format, layout), InvalidArgument) << name_of(format);
  }
}

TEST(ScaleLayout, LastBlocksNeedNotBeFull) {
  const ScaleLayout blocks{DType::kF32, 128, 128};
  EXPECT_EQ(scale_shape(blocks, 128, 256), (Dims{1, 2}));
  EXPECT_EQ(scale_shape(blocks, 129, 1), (Dims{2, 1}));
  EXPECT_EQ(scale_shape({DType::kF32, 0, 0}, 500, 70), (Dims{1, 1}));
  EXPECT_EQ(scale_shape({DType::kF8E8M0, 1, 32}, 7, 65), (Dims{7, 3}));
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  EXPECT_EQ(scale_shape(blocks, kMax, kMax), (Dims{kMax / 128 + 1, kMax / 128 + 1}));
  expect_error<InvalidArgument>([&] { scale_shape(blocks, -1, 5); }, {"[-1, 5]"});
}

TEST(ScaleContainers, EachFormatHasItsRunTimeDtype) {
  for (const DType floats : {DType::kF32, DType::kBF16, DType::kF16}) {
    EXPECT_EQ(scale_dtype("s", StorageFormat::kFp8Block, floats), DType::kF32);
    EXPECT_EQ(scale_dtype("s", StorageFormat::kFp8Tensor, floats), DType::kF32);
    EXPECT_EQ(scale_dtype("s", StorageFormat::kFp4, floats), DType::kF8E8M0);
  }
  for (const DType bits : {DType::kF8E8M0, DType::kU8}) {
    EXPECT_EQ(scale_dtype("s", StorageFormat::kFp8Block, bits), DType::kF8E8M0);
    EXPECT_EQ(scale_dtype("s", StorageFormat::kFp8Tensor, bits), DType::kF32);
    EXPECT_EQ(scale_dtype("s", StorageFormat::kMxFp8, bits), DType::kF8E8M0);
  }
  // e4m3 scales (NVFP4) are no exponents: they are refused, not reinterpreted.
  expect_error<InvalidArgument>(
      [] { scale_dtype("model.w.scale", StorageFormat::kFp4, DType::kF8E4M3); },
      {"model.w.scale", "fp4", "float8_e4m3"});
  EXPECT_THROW(scale_dtype("s", StorageFormat::kFp8Block, DType::kI8), InvalidArgument);
  EXPECT_THROW(scale_dtype("s", StorageFormat::kBF16, DType::kF32), InvalidArgument);
}

TEST(ScaleContainers, BitsStayWhereTheyAre) {
  const std::vector<uint8_t> bits = {0, 1, 127, 254, 255, 128};
  Tensor storage;
  for (const DType from : {DType::kU8, DType::kF8E8M0}) {
    const TensorView scales(bits.data(), from, {2, 3});
    const TensorView out = convert_scales("s", scales, DType::kF8E8M0, storage);
    EXPECT_EQ(out.data(), bits.data());
    EXPECT_EQ(out.dtype(), DType::kF8E8M0);
    EXPECT_EQ(out.shape(), (Dims{2, 3}));
  }
  const std::vector<float> floats = {1.5f, 2};
  const TensorView same(floats.data(), DType::kF32, {2});
  EXPECT_EQ(convert_scales("s", same, DType::kF32, storage).data(), floats.data());
  EXPECT_FALSE(storage);
}

TEST(ScaleContainers, BecomeFloatsExactly) {
  Tensor storage;
  const std::vector<uint8_t> bits = {0, 1, 127, 254, 255};
  const TensorView wide =
      convert_scales("s", TensorView(bits.data(), DType::kU8, {5}), DType::kF32, storage);
  EXPECT_EQ(wide.as<float>()[0], 0x1p-127f);
  EXPECT_EQ(wide.as<float>()[1], 0x1p-126f);
  EXPECT_EQ(wide.as<float>()[2], 1);
  EXPECT_EQ(wide.as<float>()[3], 0x1p127f);
  EXPECT_TRUE(std::isnan(wide.as<float>()[4]));
  const std::vector<BFloat16> halves = {BFloat16(1.5f), BFloat16(-3), BFloat16(7), BFloat16(0.25f)};
  const TensorView columns(halves.data(), DType::kBF16, {2, 2}, {1, 2});  // transposed in memory
  const TensorView out = convert_scales("s", columns, DType::kF32, storage);
  EXPECT_EQ(std::vector<float>(out.as<float>(), out.as<float>() + 4),
            (std::vector<float>{1.5f, 7, -3, 0.25f}));
  const std::vector<Float16> fp16 = {Float16(0.75f)};
  EXPECT_EQ(convert_scales("s", TensorView(fp16.data(), DType::kF16, {1}), DType::kF32, storage)
                .as<float>()[0],
            0.75f);
}

TEST(ScaleContainers, PowersOfTwoBecomeExponents) {
  Tensor storage;
  const std::vector<float> powers = {0x1p-127f, 0x1p-126f, 0.5f, 1, 2, 0x1p127f};
  const TensorView out =
      convert_scales("s", TensorView(powers.data(), DType::kF32, {6}), DType::kF8E8M0, storage);
  EXPECT_EQ(out.dtype(), DType::kF8E8M0);
  EXPECT_EQ(std::vector<uint8_t>(out.as<uint8_t>(), out.as<uint8_t>() + 6),
            (std::vector<uint8_t>{0, 1, 126, 127, 128, 254}));
}

TEST(ScaleContainers, OtherValuesAreNamedInsteadOfRounded) {
  Tensor storage;
  constexpr float kInf = std::numeric_limits<float>::infinity();
  for (const float bad : {1.5f, 0.0f, -1.0f, -2.0f, 0x1p-128f, 0x1.8p-127f, kInf, std::nanf("")}) {
    const std::vector<float> values = {1, 2, 4, bad, 1, 1};
    expect_error<InvalidArgument>(
        [&] {
          convert_scales("w.scale", TensorView(values.data(), DType::kF32, {2, 3}), DType::kF8E8M0,
                         storage);
        },
        {"w.scale", "powers of two", "[1, 0]", "[2, 3]"});
  }
  const std::vector<float> values = {1, 1.5f};
  expect_error<InvalidArgument>(
      [&] {
        convert_scales("w.scale", TensorView(values.data(), DType::kF32, {2}), DType::kF8E8M0,
                       storage);
      },
      {"got 1.5 "});
  expect_error<InvalidArgument>(
      [&] {
        convert_scales("w.scale", TensorView(values.data(), DType::kF8E4M3, {2}), DType::kF32,
                       storage);
      },
      {"w.scale", "float8_e4m3"});
}

}  // namespace
}  // namespace cadre

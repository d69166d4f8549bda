#include "cadre/storage_format.h"

#include <gtest/gtest.h>

#include <set>
#include <stdexcept>

namespace cadre {
namespace {

TEST(StorageFormat, NamesAreTheUsersNames) {
  EXPECT_EQ(name_of(StorageFormat::kF32), "float32");
  EXPECT_EQ(name_of(StorageFormat::kF16), "float16");
  EXPECT_EQ(name_of(StorageFormat::kBF16), "bfloat16");
  EXPECT_EQ(name_of(StorageFormat::kFp8Block), "fp8");
  EXPECT_EQ(name_of(StorageFormat::kFp8Tensor), "fp8-tensor");
  EXPECT_EQ(name_of(StorageFormat::kMxFp8), "mxfp8");
  EXPECT_EQ(name_of(StorageFormat::kFp4), "fp4");
  EXPECT_THROW(name_of(static_cast<StorageFormat>(kNumStorageFormats)), std::logic_error);
}

TEST(ActivationScheme, NamesAreTheUsersNames) {
  EXPECT_EQ(name_of(ActivationScheme::kNone), "none");
  EXPECT_EQ(name_of(ActivationScheme::kDynamic), "dynamic");
  EXPECT_EQ(name_of(ActivationScheme::kStatic), "static");
}

TEST(StorageFormat, PlainFormatsAreThoseOfTheComputeTypes) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const auto format = plain_format(dtype);
    EXPECT_EQ(format.has_value(), is_compute_dtype(dtype)) << name_of(dtype);
    if (format) {
      EXPECT_EQ(name_of(*format), name_of(dtype));
      EXPECT_FALSE(is_quantized(*format));
    }
  }
}

TEST(StorageFormat, PlainDtypeIsTheOtherWayRound) {
  for (int i = 0; i < kNumStorageFormats; ++i) {
    const auto format = static_cast<StorageFormat>(i);
    const auto dtype = plain_dtype(format);
    EXPECT_EQ(dtype.has_value(), !is_quantized(format)) << name_of(format);
    if (dtype) {
      EXPECT_EQ(plain_format(*dtype), format);
    }
  }
}

TEST(StorageFormat, TheOtherFourAreQuantized) {
  std::set<StorageFormat> quantized;
  for (int i = 0; i < kNumStorageFormats; ++i) {
    if (is_quantized(static_cast<StorageFormat>(i)))
      quantized.insert(static_cast<StorageFormat>(i));
  }
  EXPECT_EQ(quantized, (std::set<StorageFormat>{StorageFormat::kFp8Block, StorageFormat::kFp8Tensor,
                                                StorageFormat::kMxFp8, StorageFormat::kFp4}));
}

TEST(StorageFormat, RowBytesCountTwoNibblesAByte) {
  EXPECT_EQ(row_bytes(StorageFormat::kF32, 5), 20);
  EXPECT_EQ(row_bytes(StorageFormat::kBF16, 5), 10);
  EXPECT_EQ(row_bytes(StorageFormat::kFp8Block, 5), 5);
  EXPECT_EQ(row_bytes(StorageFormat::kMxFp8, 5), 5);
  EXPECT_EQ(row_bytes(StorageFormat::kFp4, 6), 3);
  EXPECT_EQ(row_bytes(StorageFormat::kFp4, 5), 3);
}

TEST(ScaleLayout, ComparesAllFields) {
  const ScaleLayout blocks = {DType::kF32, 128, 128};
  EXPECT_EQ(blocks, (ScaleLayout{DType::kF32, 128, 128}));
  EXPECT_NE(blocks, (ScaleLayout{DType::kU8, 128, 128}));
  EXPECT_NE(blocks, (ScaleLayout{DType::kF32, 0, 128}));
  EXPECT_NE(blocks, (ScaleLayout{DType::kF32, 128, 32}));
  EXPECT_EQ(ScaleLayout().block_rows, 0);
}

}  // namespace
}  // namespace cadre

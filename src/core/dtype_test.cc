#include "cadre/dtype.h"

#include <gtest/gtest.h>

#include <set>
#include <string>

#include "core/str_cat.h"

namespace cadre {
namespace {

DType dtype_at(int i) { return static_cast<DType>(i); }

TEST(DType, BothNamesRoundTripAndAreDistinct) {
  std::set<std::string_view> names;
  for (int i = 0; i < kNumDTypes; ++i) {
    EXPECT_EQ(parse_dtype(name_of(dtype_at(i))), dtype_at(i));
    EXPECT_EQ(parse_safetensors_dtype(safetensors_name(dtype_at(i))), dtype_at(i));
    names.insert(name_of(dtype_at(i)));
    names.insert(safetensors_name(dtype_at(i)));
  }
  EXPECT_EQ(names.size(), 2u * kNumDTypes);
}

TEST(DType, NamesAndSizesAreThoseOfTheFormat) {
  const struct {
    DType dtype;
    const char* name;
    const char* file_name;
    size_t bytes;
  } kExpected[] = {
      {DType::kF64, "float64", "F64", 8},
      {DType::kF32, "float32", "F32", 4},
      {DType::kF16, "float16", "F16", 2},
      {DType::kBF16, "bfloat16", "BF16", 2},
      {DType::kF8E4M3, "float8_e4m3", "F8_E4M3", 1},
      {DType::kF8E5M2, "float8_e5m2", "F8_E5M2", 1},
      {DType::kF8E8M0, "float8_e8m0", "F8_E8M0", 1},
      {DType::kI64, "int64", "I64", 8},
      {DType::kI32, "int32", "I32", 4},
      {DType::kI16, "int16", "I16", 2},
      {DType::kI8, "int8", "I8", 1},
      {DType::kU64, "uint64", "U64", 8},
      {DType::kU32, "uint32", "U32", 4},
      {DType::kU16, "uint16", "U16", 2},
      {DType::kU8, "uint8", "U8", 1},
      {DType::kBool, "bool", "BOOL", 1},
  };
  for (const auto& expected : kExpected) {
    EXPECT_EQ(name_of(expected.dtype), expected.name);
    EXPECT_EQ(safetensors_name(expected.dtype), expected.file_name);
    EXPECT_EQ(size_of(expected.dtype), expected.bytes);
  }
}

TEST(DType, TakesTheFormsOfPyTorch) {
  EXPECT_EQ(parse_dtype("torch.float32"), DType::kF32);
  EXPECT_EQ(parse_dtype("torch.bfloat16"), DType::kBF16);
  EXPECT_EQ(parse_dtype("half"), DType::kF16);
  EXPECT_EQ(parse_dtype("float"), DType::kF32);
  EXPECT_EQ(parse_dtype("double"), DType::kF64);
  EXPECT_EQ(parse_dtype("torch.float8_e4m3fn"), DType::kF8E4M3);
  EXPECT_EQ(parse_dtype("torch.float8_e8m0fnu"), DType::kF8E8M0);
}

TEST(DType, UnknownNamesAreEmpty) {
  for (const char* name : {"", "F32", "torch.", "Float32", "float33", " float32"})
    EXPECT_EQ(parse_dtype(name), std::nullopt) << name;
  for (const char* name : {"", "f32", "float32", "F4", "F6_E2M3", "BF16 "})
    EXPECT_EQ(parse_safetensors_dtype(name), std::nullopt) << name;
}

TEST(DType, ComputeTypesAreTheThreeFloats) {
  std::set<DType> compute;
  for (int i = 0; i < kNumDTypes; ++i) {
    if (is_compute_dtype(dtype_at(i))) compute.insert(dtype_at(i));
  }
  EXPECT_EQ(compute, (std::set<DType>{DType::kF32, DType::kF16, DType::kBF16}));
}

TEST(DType, AValueOutsideTheEnumIsAnInternalError) {
  EXPECT_THROW(size_of(dtype_at(kNumDTypes)), std::logic_error);
}

}  // namespace
}  // namespace cadre

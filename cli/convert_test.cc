#include "convert.h"

#include <gtest/gtest.h>

#include <cstring>

#include "cadre/error.h"
#include "cadre/float16.h"

namespace cadre::cli {
namespace {

// A view of `values` that starts one byte past an aligned address.
template <typename T>
class Unaligned {
 public:
  Unaligned(DType dtype, std::vector<T> values, const Dims& shape)
      : bytes_(values.size() * sizeof(T) + 8) {
    const size_t skew = 8 - reinterpret_cast<uintptr_t>(bytes_.data()) % 8 + 1;
    bytes_.resize(values.size() * sizeof(T) + 16);
    std::memcpy(bytes_.data() + skew, values.data(), values.size() * sizeof(T));
    view_ = TensorView(bytes_.data() + skew, dtype, shape);
  }
  const TensorView& view() const { return view_; }

 private:
  std::vector<std::byte> bytes_;
  TensorView view_;
};

TEST(Convert, AppendsFloatsOfEveryComputeDtypeFromUnalignedMemory) {
  std::vector<float> out = {9};
  append_floats(Unaligned<float>(DType::kF32, {1, -2.5f}, {2}).view(), out);
  append_floats(Unaligned<BFloat16>(DType::kBF16, {BFloat16(0.5f), BFloat16(3)}, {1, 2}).view(),
                out);
  append_floats(Unaligned<Float16>(DType::kF16, {Float16(0.25f)}, {1, 1}).view(), out);
  EXPECT_EQ(out, (std::vector<float>{9, 1, -2.5f, 0.5f, 3, 0.25f}));
}

TEST(Convert, AppendsRowsOfAStridedTensor) {
  const std::vector<float> data = {1, 2, 99, 3, 4, 99};
  std::vector<float> out;
  append_floats(TensorView(data.data(), DType::kF32, {2, 2}, {3, 1}), out);
  EXPECT_EQ(out, (std::vector<float>{1, 2, 3, 4}));
}

TEST(Convert, AppendsIntegersOfBothWidths) {
  std::vector<int64_t> out;
  append_integers(Unaligned<int64_t>(DType::kI64, {int64_t{1} << 40, -1}, {2}).view(), out);
  append_integers(Unaligned<int32_t>(DType::kI32, {7, -8}, {2, 1}).view(), out);
  EXPECT_EQ(out, (std::vector<int64_t>{int64_t{1} << 40, -1, 7, -8}));
}

TEST(Convert, RefusesOtherDtypesByName) {
  const int64_t value = 1;
  const TensorView integers(&value, DType::kI64, {1});
  std::vector<float> floats;
  EXPECT_THROW(append_floats(integers, floats), InvalidArgument);
  const float number = 1;
  std::vector<int64_t> ids;
  EXPECT_THROW(append_integers(TensorView(&number, DType::kF32, {1}), ids), InvalidArgument);
  EXPECT_THROW(to_dtype(TensorView(&number, DType::kF32, {1}), DType::kI8), InvalidArgument);
}

TEST(Convert, ToDtypeRoundsOnceToTheTarget) {
  const std::vector<float> data = {1.00390625f, -3};  // 1 + 2^-8: halfway between two bfloat16
  const TensorView view(data.data(), DType::kF32, {1, 2});
  const Tensor bf16 = to_dtype(view, DType::kBF16);
  EXPECT_EQ(bf16->shape(), (Dims{1, 2}));
  EXPECT_EQ(static_cast<float>(bf16->as<BFloat16>()[0]), 1.0f);
  EXPECT_EQ(static_cast<float>(to_dtype(view, DType::kF16)->as<Float16>()[0]), 1.00390625f);
  EXPECT_EQ(to_dtype(view, DType::kF32)->as<float>()[1], -3.0f);
}

}  // namespace
}  // namespace cadre::cli

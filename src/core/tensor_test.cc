#include "cadre/tensor.h"

#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <limits>
#include <numeric>

#include "cadre/error.h"

namespace cadre {
namespace {

constexpr int64_t kHuge = int64_t{1} << 40;

class Numbers : public ::testing::Test {
 protected:
  Numbers() { std::iota(data_.begin(), data_.end(), 0); }
  std::array<int32_t, 24> data_;
};

TEST(Dims, KeepsUpToSixDimensions) {
  const Dims dims = {2, 3, 4, 5, 6, 7};
  EXPECT_EQ(dims.rank(), 6);
  EXPECT_EQ(dims[5], 7);
  EXPECT_EQ(to_string(dims), "[2, 3, 4, 5, 6, 7]");
  EXPECT_EQ(to_string(Dims()), "[]");
  EXPECT_THROW((Dims{1, 1, 1, 1, 1, 1, 1}), InvalidArgument);
}

TEST(Dims, EqualMeansSameRankAndNumbers) {
  EXPECT_EQ((Dims{2, 3}), (Dims{2, 3}));
  EXPECT_NE((Dims{2, 3}), (Dims{2, 3, 1}));
  EXPECT_NE((Dims{2, 3}), (Dims{3, 2}));
  EXPECT_EQ(Dims(), Dims());
}

TEST(NumElements, MultipliesAndRefusesOverflow) {
  EXPECT_EQ(num_elements({}), 1);
  EXPECT_EQ(num_elements({2, 3, 4}), 24);
  EXPECT_EQ(num_elements({kHuge, 1 << 20}), int64_t{1} << 60);
  EXPECT_EQ(num_elements({std::numeric_limits<int64_t>::max()}),
            std::numeric_limits<int64_t>::max());
  EXPECT_THROW(num_elements({kHuge, kHuge}), InvalidArgument);
  EXPECT_THROW(num_elements({2, std::numeric_limits<int64_t>::max()}), InvalidArgument);
}

TEST(NumElements, AnEmptyShapeHasNoneWhateverTheOtherDimensions) {
  EXPECT_EQ(num_elements({kHuge, 0, kHuge, kHuge}), 0);
  EXPECT_EQ(num_elements({kHuge, kHuge, kHuge, 0}), 0);
}

TEST(NumElements, NegativeDimensionsAreRefusedAlsoBesideAZero) {
  EXPECT_THROW(num_elements({2, -1}), InvalidArgument);
  EXPECT_THROW(num_elements({0, -1}), InvalidArgument);
}

TEST(ContiguousStrides, AreRowMajor) {
  EXPECT_EQ(contiguous_strides({2, 3, 4}), (Dims{12, 4, 1}));
  EXPECT_EQ(contiguous_strides({}), Dims());
}

TEST(ContiguousStrides, NeverOverflow) {
  EXPECT_THROW(contiguous_strides({kHuge, kHuge, kHuge}), InvalidArgument);
  EXPECT_EQ(contiguous_strides({0, kHuge, kHuge, kHuge}).rank(), 4);
  EXPECT_THROW(TensorView(nullptr, DType::kF32, {1, -1}), InvalidArgument);
}

TEST_F(Numbers, IndexingGoesThroughTheStrides) {
  const TensorView view(data_.data(), DType::kI32, {2, 3, 4});
  EXPECT_EQ(view[1][2].as<int32_t>()[3], 23);
  EXPECT_EQ(view[1].shape(), (Dims{3, 4}));
  EXPECT_EQ(view[1].strides(), (Dims{4, 1}));
  EXPECT_EQ(view.numel(), 24);
  EXPECT_EQ(view.nbytes(), 96u);
  EXPECT_EQ(view[1][2][3].rank(), 0);
  EXPECT_EQ(*view[1][2][3].as<int32_t>(), 23);
}

TEST_F(Numbers, SlicingKeepsTheStrides) {
  const TensorView view(data_.data(), DType::kI32, {6, 4});
  const TensorView rows = view.slice(2, 5);
  EXPECT_EQ(rows.shape(), (Dims{3, 4}));
  EXPECT_EQ(rows[0].as<int32_t>()[0], 8);
  EXPECT_EQ(view.slice(6, 6).numel(), 0);
  const TensorView transposed(data_.data(), DType::kI32, {4, 6}, Dims{1, 4});
  EXPECT_EQ(*transposed.slice(1, 3)[1][5].as<int32_t>(), 22);
}

TEST_F(Numbers, IndicesOutsideAreInternalErrors) {
  const TensorView view(data_.data(), DType::kI32, {6, 4});
  EXPECT_THROW(view[6], std::logic_error);
  EXPECT_THROW(view[-1], std::logic_error);
  EXPECT_THROW(view.slice(-1, 2), std::logic_error);
  EXPECT_THROW(view.slice(3, 2), std::logic_error);
  EXPECT_THROW(view.slice(0, 7), std::logic_error);
  EXPECT_THROW(view[0][0][0], std::logic_error);
  EXPECT_THROW(TensorView(data_.data(), DType::kI32, {2, 3}, Dims{1}), std::logic_error);
}

TEST_F(Numbers, AddressesBeyondFourGigabytesAreExact) {
  // Only the arithmetic: nothing is read.
  const TensorView view(nullptr, DType::kBF16, {8, kHuge / 8}, Dims{kHuge / 8, 1});
  const auto base = reinterpret_cast<uintptr_t>(view[7].data());
  EXPECT_EQ(base, static_cast<uintptr_t>(kHuge / 8 * 7 * 2));
}

TEST_F(Numbers, ContiguityIgnoresStridesThatDoNotMatter) {
  EXPECT_TRUE(TensorView(data_.data(), DType::kI32, {2, 12}).is_contiguous());
  EXPECT_TRUE(TensorView(data_.data(), DType::kI32, {1, 12}, Dims{99, 1}).is_contiguous());
  EXPECT_TRUE(TensorView(data_.data(), DType::kI32, {0, 3}, Dims{7, 7}).is_contiguous());
  EXPECT_TRUE(TensorView(data_.data(), DType::kI32, {0, kHuge, kHuge}).is_contiguous());
  EXPECT_FALSE(TensorView(data_.data(), DType::kI32, {2, 3}, Dims{4, 1}).is_contiguous());
  EXPECT_FALSE(TensorView(data_.data(), DType::kI32, {2, 3}, Dims{1, 2}).is_contiguous());
}

TEST_F(Numbers, ReshapeNeedsContiguityAndTheSameCount) {
  const TensorView view(data_.data(), DType::kI32, {2, 3, 4});
  EXPECT_EQ(view.reshape({6, 4})[5].as<int32_t>()[3], 23);
  EXPECT_THROW(view.reshape({5, 4}), std::logic_error);
  EXPECT_THROW(TensorView(data_.data(), DType::kI32, {2, 3}, Dims{4, 1}).reshape({6}),
               std::logic_error);
}

TEST_F(Numbers, ReadingWithAnotherElementSizeIsRefused) {
  const TensorView view(data_.data(), DType::kI32, {24});
  EXPECT_NO_THROW(view.as<float>());
  try {
    view.as<double>();
    FAIL();
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("8 bytes"), message.npos) << message;
    EXPECT_NE(message.find("int32 [24]"), message.npos) << message;
  }
}

TEST_F(Numbers, MutableViewsWriteThrough) {
  const MutableTensorView view(data_.data(), DType::kI32, {6, 4});
  view[1].as<int32_t>()[2] = -1;
  view.slice(2, 4)[1].as<int32_t>()[0] = -2;
  view.reshape({24}).as<int32_t>()[0] = -3;
  EXPECT_EQ(data_[6], -1);
  EXPECT_EQ(data_[12], -2);
  EXPECT_EQ(data_[0], -3);
}

TEST(TensorView, AbsentMeansNoDataAndNoRank) {
  EXPECT_FALSE(TensorView());
  EXPECT_TRUE(TensorView(nullptr, DType::kF32, {0, 4}));
  EXPECT_EQ(describe("bias", TensorView()), "bias: absent");
}

TEST(TensorView, DescribeNamesDtypeShapeAndDevice) {
  EXPECT_EQ(describe("hidden_states", TensorView(nullptr, DType::kBF16, {3, 64})),
            "hidden_states: bfloat16 [3, 64] on cpu");
  EXPECT_EQ(describe("x", TensorView(nullptr, DType::kF32, {1}, {DeviceType::kCuda, 1})),
            "x: float32 [1] on cuda:1");
}

TEST(TensorView, BytesThatOverflowAreRefused) {
  EXPECT_THROW(TensorView(nullptr, DType::kF64, {int64_t{1} << 61}).nbytes(), InvalidArgument);
  EXPECT_EQ(TensorView(nullptr, DType::kU8, {int64_t{1} << 61}).nbytes(), size_t{1} << 61);
}

TEST(Tensor, OwnsAlignedMemory) {
  const Tensor tensor(DType::kF32, {3, 5});
  EXPECT_TRUE(tensor);
  EXPECT_EQ(tensor->shape(), (Dims{3, 5}));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(tensor->data()) % 64, 0u);
  for (int64_t i = 0; i < 15; ++i) tensor->as<float>()[i] = static_cast<float>(i);
  const Tensor shared = tensor;  // a second owner of the same memory
  EXPECT_EQ(shared->as<float>()[14], 14);
  EXPECT_FALSE(Tensor());
}

TEST(Tensor, EmptyTensorsHaveMemoryToo) {
  const Tensor tensor(DType::kBF16, {0, 64});
  EXPECT_NE(tensor->data(), nullptr);
  EXPECT_EQ(tensor->nbytes(), 0u);
}

TEST(Tensor, ImpossibleShapesAreRefused) {
  EXPECT_THROW(Tensor(DType::kF32, {-1}), InvalidArgument);
  EXPECT_THROW(Tensor(DType::kF32, {kHuge, kHuge}), InvalidArgument);
  EXPECT_THROW(Tensor(DType::kF64, {int64_t{1} << 61}), InvalidArgument);
}

}  // namespace
}  // namespace cadre

// Copies of weights on the CPU: what is needed is said before anything is read, places are aligned
// and evenly spaced, names keep their place.
#include "models/weight_placement.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "cadre/error.h"
#include "models/damaged_checkpoint.h"
#include "models/host_memory.h"

namespace cadre::test {
namespace {

TEST(WeightPlacement, SaysWhatItNeedsBeforeItBegins) {
  if (!available_host_memory()) GTEST_SKIP() << "nobody knows how much memory there is";
  const int64_t n = int64_t{1} << 20, k = int64_t{1} << 22;
  const QuantizedTensor huge{StorageFormat::kFp8Block,
                             {DType::kF32, 128, 128},
                             TensorView(nullptr, DType::kF8E4M3, {n, k}),
                             TensorView(nullptr, DType::kF32, {n / 128, k / 128})};
  WeightPlacement placement({}, DType::kBF16);
  placement.add_dequantized("w", huge, "experts", DType::kBF16, {n, k});
  EXPECT_EQ(placement.bytes(), size_t{1} << 43);
  ThreadPool threads(1);
  const std::string message = message_of<DeviceError>([&] { placement.load(threads, {}); });
  for (const char* part : {"dequantised weights in bfloat16", "need 8", "experts", "is free"}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
}

TEST(WeightPlacement, MatricesOfALayerLieEvenly) {
  const std::vector<uint8_t> codes(4 * 3 * 32, 0x38);  // 1
  const std::vector<float> scales = {1, 2, 4, 8};
  WeightPlacement placement({}, DType::kF32);
  for (int64_t e = 0; e < 4; ++e) {
    const QuantizedTensor matrix{StorageFormat::kFp8Tensor,
                                 {DType::kF32, 0, 0},
                                 TensorView(codes.data() + e * 96, DType::kF8E4M3, {3, 32}),
                                 TensorView(scales.data() + e, DType::kF32, {1, 1})};
    const std::string name = "expert" + std::to_string(e);
    placement.add_dequantized(name, matrix, "experts", DType::kF32, {3, 32});
    placement.add_dequantized(name, matrix, "experts", DType::kF32, {3, 32});  // known
  }
  std::vector<int64_t> told;
  ThreadPool threads(2);
  placement.load(threads, [&](std::string_view, int64_t done, int64_t) { told.push_back(done); });
  EXPECT_FALSE(told.empty());
  EXPECT_EQ(placement.bytes(), size_t{4} * 512) << "384 bytes each, at multiples of 256";
  EXPECT_FALSE(placement.holds("expert4"));
  const auto at = [&](int64_t e) { return placement.view("expert" + std::to_string(e)); };
  for (int64_t e = 0; e < 4; ++e) {
    EXPECT_EQ(static_cast<const char*>(at(e).data()) - static_cast<const char*>(at(0).data()),
              e * 512);
    for (int64_t i = 0; i < 96; ++i) {
      ASSERT_EQ(at(e).as<float>()[i], scales[static_cast<size_t>(e)]);
    }
  }
}

TEST(WeightPlacement, ScalesComeToOtherContainers) {
  const std::vector<float> powers = {0.5f, 1, 0x1p-127f, 0x1p127f};
  WeightPlacement placement({}, DType::kBF16);
  placement.add_scales("s", TensorView(powers.data(), DType::kF32, {2, 2}), "experts",
                       DType::kF8E8M0);
  ThreadPool threads(1);
  placement.load(threads, {});
  const auto* codes = placement.view("s").as<uint8_t>();
  EXPECT_EQ(std::vector<uint8_t>(codes, codes + 4), (std::vector<uint8_t>{126, 127, 0, 254}));
}

}  // namespace
}  // namespace cadre::test

// The choice of kernels from addresses and strides alone; no GPU is needed.
#include "backends/cuda/grouped_mm/choose_path.h"

#include <gtest/gtest.h>

namespace cadre::cuda {
namespace {

const void* address(uintptr_t value) { return reinterpret_cast<const void*>(value); }

DeviceMatrices matrices(uintptr_t at, int64_t row_stride, int64_t expert_stride) {
  DeviceMatrices m;
  m.first = {address(at), row_stride, 1};
  m.expert_stride = expert_stride;
  return m;
}

class ChoosePath : public testing::Test {
 protected:
  ChoosePath() {
    config_ = {.num_experts = 4, .hidden_size = 64, .intermediate_size = 48, .top_k = 2};
    weights_.gate = matrices(0x10000, 64, 2 * 48 * 64);
    weights_.up = matrices(0x10000 + 48 * 64 * 2, 64, 2 * 48 * 64);
    weights_.down = matrices(0x90000, 48, 64 * 48);
  }
  GroupedPath choice(DType dtype = DType::kBF16, int capability = 90) const {
    return choose_path(config_, dtype, weights_, capability);
  }

  ExpertsConfig config_;
  DeviceWeights weights_;
};

TEST_F(ChoosePath, TakesHopperForFusedTensorsInBothShortTypes) {
  EXPECT_EQ(choice(DType::kBF16), GroupedPath::kHopper);
  EXPECT_EQ(choice(DType::kF16), GroupedPath::kHopper);
}

TEST_F(ChoosePath, TakesPortableForFloat32AndOtherGpus) {
  EXPECT_EQ(choice(DType::kF32), GroupedPath::kPortable);
  for (const int capability : {0, 80, 86, 89, 100, 120}) {
    EXPECT_EQ(choice(DType::kBF16, capability), GroupedPath::kPortable) << capability;
  }
}

TEST_F(ChoosePath, TakesHopperForInterleavedRowsAndGapsBetweenExperts) {
  weights_.gate = matrices(0x10000, 128, 2 * 48 * 64 + 8);
  weights_.up = matrices(0x10000 + 64 * 2, 128, 2 * 48 * 64 + 8);
  EXPECT_EQ(choice(), GroupedPath::kHopper);
}

TEST_F(ChoosePath, DoesNotLookAtTheGateWhereThereIsNone) {
  config_.has_gate = false;
  weights_.gate = {};
  EXPECT_EQ(choice(), GroupedPath::kHopper);
}

TEST_F(ChoosePath, TakesPortableForTransposedWeights) {
  weights_.down.first.row_stride = 1;
  weights_.down.first.col_stride = 64;
  EXPECT_EQ(choice(), GroupedPath::kPortable);
}

TEST_F(ChoosePath, TakesPortableForExpertsThatLieUnevenly) {
  const DeviceMatrix table[1] = {};
  weights_.up.table = table;
  EXPECT_EQ(choice(), GroupedPath::kPortable);
}

TEST_F(ChoosePath, TakesPortableForWhatIsNotAlignedTo16Bytes) {
  for (DeviceMatrices* m : {&weights_.gate, &weights_.up, &weights_.down}) {
    const DeviceMatrices before = *m;
    m->first.data = static_cast<const char*>(before.first.data) + 2;
    EXPECT_EQ(choice(), GroupedPath::kPortable) << "address";
    *m = before;
    m->first.row_stride += 4;
    EXPECT_EQ(choice(), GroupedPath::kPortable) << "row stride";
    *m = before;
    m->expert_stride += 4;
    EXPECT_EQ(choice(), GroupedPath::kPortable) << "expert stride";
    m->expert_stride = -before.expert_stride;
    EXPECT_EQ(choice(), GroupedPath::kPortable) << "experts in reverse";
    *m = before;
  }
  EXPECT_EQ(choice(), GroupedPath::kHopper);
}

TEST_F(ChoosePath, TakesPortableForSizesThatAreNoMultipleOf8) {
  config_.hidden_size = 60;
  EXPECT_EQ(choice(), GroupedPath::kPortable);
  config_.hidden_size = 64;
  config_.intermediate_size = 44;
  EXPECT_EQ(choice(), GroupedPath::kPortable);
}

TEST_F(ChoosePath, IgnoresTheExpertStrideOfASingleExpert) {
  config_.num_experts = 1;
  weights_.gate.expert_stride = weights_.up.expert_stride = weights_.down.expert_stride = 0;
  EXPECT_EQ(choice(), GroupedPath::kHopper);
}

TEST_F(ChoosePath, TakesPortableForStridesBeyondTheCopyEngine) {
  weights_.down.expert_stride = int64_t{1} << 39;  // 2^40 bytes
  EXPECT_EQ(choice(), GroupedPath::kPortable);
}

}  // namespace
}  // namespace cadre::cuda

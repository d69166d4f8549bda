// grouped_mm on a GPU against the float64 reference: sizes around the tiles, every gate function,
// layouts, routing at its worst, the same bits every time. On Hopper most cases run its own kernels
// (choose_path_test.cc says which), elsewhere the portable ones.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <memory>
#include <vector>

#include "backends/cuda/grouped_mm/grouped_mm_fixture.h"

namespace cadre::cuda {
namespace {

using namespace test;

class GroupedMm : public testing::Test {
 protected:
  void SetUp() override {
    DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
    if (runtime == nullptr || runtime->device_count() == 0) GTEST_SKIP() << "needs a GPU";
    stream_ = runtime->make_stream(0, nullptr);
  }
  const Stream& stream() const { return stream_->get(); }

  std::unique_ptr<DeviceStream> stream_;
};

TEST_F(GroupedMm, HoldsTheBoundForAnyNumberOfTokens) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    for (const int64_t tokens : {1, 9, 64, 65, 129, 192, 257, 400, 780}) {
      Case c;
      c.tokens = tokens;
      c.dtype = dtype;
      c.config = {.num_experts = 3, .hidden_size = 192, .intermediate_size = 136, .top_k = 1};
      Experts experts(c, stream());
      EXPECT_LE(experts.run(), experts.bound()) << tokens << " " << name_of(dtype);
    }
  }
}

TEST_F(GroupedMm, HoldsTheBoundForSizesBesideTheTiles) {
  const int64_t sizes[][2] = {{8, 8},     {64, 128},  {256, 128}, {72, 120},  {264, 136},
                              {512, 384}, {520, 264}, {768, 392}, {1032, 72}, {248, 648}};
  for (const auto& [hidden, intermediate] : sizes) {
    Case c;
    c.tokens = 100;
    c.config.num_experts = 3;
    c.config.top_k = 1;
    c.config.hidden_size = hidden;
    c.config.intermediate_size = intermediate;
    Experts experts(c, stream());
    EXPECT_LE(experts.run(), experts.bound()) << hidden << " " << intermediate;
  }
}

TEST_F(GroupedMm, HoldsTheBoundForLongRunsOfOneExpert) {
  for (const int64_t tokens : {300, 2100, 4500}) {
    for (const Ids ids : {Ids::kOneExpert, Ids::kLastExpert}) {
      Case c;
      c.tokens = tokens;
      c.config = {.num_experts = 5, .hidden_size = 136, .intermediate_size = 72, .top_k = 1};
      c.ids = ids;
      Experts experts(c, stream());
      EXPECT_LE(experts.run(), experts.bound()) << tokens;
    }
  }
}

TEST_F(GroupedMm, TakesAnyNumberOfExperts) {
  for (const int64_t count : {1, 2, 33, 60, 128, 257, 1025}) {
    Case c;
    c.tokens = 200;
    c.config = {.num_experts = count, .hidden_size = 64, .intermediate_size = 24, .top_k = 1};
    Experts experts(c, stream());
    EXPECT_LE(experts.run(), experts.bound()) << count;
  }
}

TEST_F(GroupedMm, TakesEveryWayOfRouting) {
  for (const Ids ids : {Ids::kOneExpert, Ids::kLastExpert, Ids::kEverySecond, Ids::kRepeated,
                        Ids::kSentinels, Ids::kNone}) {
    for (const int64_t tokens : {0, 3, 333}) {
      Case c;
      c.ids = ids;
      c.tokens = tokens;
      c.id_dtype = tokens == 3 ? DType::kI32 : DType::kI64;
      c.weights_dtype = tokens == 3 ? DType::kBF16 : DType::kF32;
      c.output_f32 = tokens == 3;
      c.row_gap = tokens == 3 ? 5 : 0;
      Experts experts(c, stream());
      EXPECT_LE(experts.run(), experts.bound()) << static_cast<int>(ids) << " " << tokens;
    }
  }
}

TEST_F(GroupedMm, AppliesEveryGateFunction) {
  for (const bool has_bias : {false, true}) {
    for (const bool has_gate : {true, false}) {
      for (const Activation activation :
           {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
            Activation::kRelu2}) {
        Case c;
        c.tokens = 70;
        c.config.has_gate = has_gate;
        c.config.has_bias = has_bias;
        c.config.activation = activation;
        c.config.intermediate_size = 200;
        Experts experts(c, stream());
        EXPECT_LE(experts.run(), experts.bound())
            << has_bias << has_gate << " " << name_of(activation);
      }
    }
  }
}

TEST_F(GroupedMm, AppliesLimitsAndAlpha) {
  for (const bool has_alpha : {false, true}) {
    Case c;
    c.tokens = 170;
    c.config.swiglu_limit = 0.75f;
    if (has_alpha) c.config.swiglu_alpha = 1.702f;
    c.config.has_bias = has_alpha;
    c.config.is_concatenated = !has_alpha;
    Experts experts(c, stream());
    EXPECT_LE(experts.run(), experts.bound()) << has_alpha;
  }
}

TEST_F(GroupedMm, ReadsInterleavedRows) {
  Case c;
  c.tokens = 300;
  c.config.is_concatenated = false;
  Experts experts(c, stream());
  EXPECT_LE(experts.run(), experts.bound());
}

// f32, transposed weights, sizes that are no multiple of 8: choose_path() gives them to the
// portable kernels on every GPU.
TEST_F(GroupedMm, RunsWhatTheHopperKernelsDoNotTake) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const bool transposed : {false, true}) {
      Case c;
      c.tokens = 130;
      c.dtype = dtype;
      c.config.is_transposed = transposed;
      c.config.has_bias = transposed;
      if (!transposed) {
        c.config.hidden_size = 60;
        c.config.intermediate_size = 44;
      }
      Experts experts(c, stream());
      EXPECT_LE(experts.run(), experts.bound()) << name_of(dtype) << " " << transposed;
    }
  }
}

TEST_F(GroupedMm, KeepsNanToTheTokensThatMeetIt) {
  Case c;
  c.tokens = 260;
  Experts experts(c, stream());
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const int64_t elements = experts.gate_up().host().numel() / c.config.num_experts;
  for (int64_t i = 0; i < elements; ++i) set(experts.gate_up().host(), 4 * elements + i, nan);
  set(experts.x().host(), 17 * c.config.hidden_size + 3, nan);
  experts.prepare();
  experts.upload_call();
  experts.forward();
  experts.out().download(stream());
  for (int64_t t = 0; t < c.tokens; ++t) {
    bool expected = t == 17;
    for (int64_t s = 0; s < c.config.top_k; ++s)
      expected |= experts.id(t * c.config.top_k + s) == 4;
    for (int64_t i = 0; i < c.config.hidden_size; ++i) {
      const auto value =
          static_cast<float>(experts.out().host().as<BFloat16>()[t * c.config.hidden_size + i]);
      ASSERT_EQ(std::isnan(value), expected) << t << " " << i;
    }
  }
}

TEST_F(GroupedMm, GivesTheSameBitsEveryTimeAndFromAGraph) {
  for (const DType dtype : {DType::kBF16, DType::kF16}) {
    Case c;
    c.tokens = 700;
    c.dtype = dtype;
    c.config = {.num_experts = 5, .hidden_size = 256, .intermediate_size = 136, .top_k = 2};
    Experts experts(c, stream());
    EXPECT_LE(experts.run(), experts.bound());
    const std::vector<char> first = experts.result();
    for (int i = 0; i < 100; ++i) {
      experts.poison();
      experts.forward();
      ASSERT_EQ(experts.result(), first) << "call " << i;
    }
    const auto graph = device_runtime(kDevice).capture(stream(), [&] { experts.forward(); });
    for (int i = 0; i < 100; ++i) {
      experts.poison();
      graph->launch(stream());
      ASSERT_EQ(experts.result(), first) << "replay " << i;
    }
    experts.draw_ids();  // another routing in the same graph
    experts.upload_call();
    graph->launch(stream());
    EXPECT_LE(experts.error(), experts.bound());
    EXPECT_NE(experts.result(), first);
  }
}

// On Hopper the last tiles of down are cut along K here (hopper_gemm_cuts_k()), those of the last
// tokens among them.
TEST_F(GroupedMm, AddsPartsOfLongSumsInOneOrder) {
  Case c;
  c.tokens = 4400;
  c.config = {.num_experts = 2, .hidden_size = 1024, .intermediate_size = 4096, .top_k = 1};
  Experts experts(c, stream());
  experts.prepare();
  experts.upload_call();
  experts.forward();
  EXPECT_LE(experts.error(0, 8), experts.bound());
  EXPECT_LE(experts.error(c.tokens - 16, c.tokens), experts.bound());
  const std::vector<char> first = experts.result();
  for (int i = 0; i < 20; ++i) {
    experts.poison();
    experts.forward();
    ASSERT_TRUE(experts.result() == first) << "call " << i;
  }
}

// More rows between the products than a chunk holds, against calls that each fit one.
TEST_F(GroupedMm, GivesTheSameBitsInChunks) {
  Case c;
  c.tokens = 8300;
  c.config = {.num_experts = 64, .hidden_size = 4096, .intermediate_size = 64, .top_k = 64};
  Experts experts(c, stream());
  experts.prepare();
  experts.upload_call();
  experts.forward();
  const std::vector<char> whole = experts.result();
  experts.poison();
  experts.forward(0, 1000);
  experts.forward(1000, 8300);
  EXPECT_TRUE(experts.result() == whole);
}

}  // namespace
}  // namespace cadre::cuda

// deepgemm on a GPU against the float64 emulation of the same quantised arithmetic: sizes around
// the tiles and blocks, scales of every kind, gate functions, routing at its worst, the same bits
// every time.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <limits>
#include <memory>
#include <vector>

#include "backends/cuda/deepgemm/deepgemm_fixture.h"

namespace cadre::cuda {
namespace {

using namespace test;

class DeepGemm : public testing::Test {
 protected:
  void SetUp() override {
    DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
    if (runtime == nullptr || runtime->device_count() == 0) GTEST_SKIP() << "needs a GPU";
    ExpertsQuery query;
    query.device = kDevice;
    query.format = StorageFormat::kFp8Block;
    query.scale_layout = {DType::kF32, 128, 128};
    query.activation_scheme = ActivationScheme::kDynamic;
    query.config = Case().config;
    const Support support = make_deepgemm()->supports(query);
    if (!support) GTEST_SKIP() << to_string(support);
    stream_ = runtime->make_stream(0, nullptr);
  }
  const Stream& stream() const { return stream_->get(); }

  // The error of a case, kept in the test's report.
  double error_of(const Case& c) {
    Experts experts(c, stream());
    const double error = experts.run();
    worst_ = std::max(worst_, std::isnan(error) ? 1e9 : error / experts.bound());
    EXPECT_LE(error, experts.bound());
    return error;
  }
  void TearDown() override { std::printf("worst error over bound: %.3f\n", worst_); }

  std::unique_ptr<DeviceStream> stream_;
  double worst_ = 0;
};

TEST_F(DeepGemm, HoldsTheBoundForAnyNumberOfTokens) {
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    for (const int64_t tokens : {1, 2, 8, 17, 33, 64, 65, 129, 192, 256, 400, 1024, 4096, 16384}) {
      Case c;
      c.tokens = tokens;
      c.dtype = dtype;
      c.config = {.num_experts = 3, .hidden_size = 192, .intermediate_size = 144, .top_k = 2};
      error_of(c);
      if (HasFailure()) FAIL() << tokens << " " << name_of(dtype);
    }
  }
}

TEST_F(DeepGemm, HoldsTheBoundForLongSums) {
  for (const int64_t tokens : {24, 96}) {
    for (const bool full_range : {false, true}) {
      for (const bool output_f32 : {false, true}) {
        Case c;
        c.tokens = tokens;
        c.output_f32 = output_f32;
        c.full_range = full_range;
        c.config = {.num_experts = 2, .hidden_size = 2048, .intermediate_size = 768, .top_k = 1};
        std::printf("K = 2048, full range %d: error %.2e\n", full_range, error_of(c));
      }
    }
  }
}

// Few tokens and few experts: sums of down in parts.
TEST_F(DeepGemm, HoldsTheBoundForSumsInParts) {
  for (const int64_t intermediate : {4096, 4240, 8320}) {
    for (const bool has_bias : {false, true}) {
      Case c;
      c.tokens = 12;
      c.config = {.num_experts = 3, .hidden_size = 272, .top_k = 2};
      c.config.intermediate_size = intermediate;
      c.config.has_bias = has_bias;
      error_of(c);
    }
  }
}

TEST_F(DeepGemm, HoldsTheBoundForSizesBesideTheTiles) {
  const int64_t sizes[][2] = {{16, 16},   {64, 96},   {96, 64},   {160, 192},
                              {192, 320}, {320, 576}, {576, 768}, {768, 160},
                              {128, 128}, {256, 384}, {144, 272}, {1040, 80}};
  for (const auto& [hidden, intermediate] : sizes) {
    for (const int64_t tokens : {30, 100}) {
      Case c;
      c.tokens = tokens;
      c.config.num_experts = 3;
      c.config.top_k = 1;
      c.config.hidden_size = hidden;
      c.config.intermediate_size = intermediate;
      error_of(c);
      if (HasFailure()) FAIL() << tokens << " " << hidden << " " << intermediate;
    }
  }
}

TEST_F(DeepGemm, ReadsScalesOfEveryKind) {
  const ScaleLayout layouts[] = {{DType::kF32, 128, 128},    {DType::kF8E8M0, 128, 128},
                                 {DType::kF32, 0, 0},        {DType::kF8E8M0, 0, 0},
                                 {DType::kF32, 256, 128},    {DType::kF32, 128, 0},
                                 {DType::kF8E8M0, 384, 128}, {DType::kF32, 0, 128}};
  for (const ScaleLayout& layout : layouts) {
    for (const bool fused : {false, true}) {
      for (const int64_t inner : {208, 320, 464}) {
        if (layout.block_rows == 0 && layout.block_cols != 0) continue;  // not a format
        for (const int64_t tokens : {20, 150}) {
          Case c;
          c.tokens = tokens;
          c.scales = layout;
          c.fused = fused;
          c.config.hidden_size = 320;
          c.config.intermediate_size = inner;
          error_of(c);
          if (HasFailure()) {
            FAIL() << tokens << " " << layout.block_rows << " " << layout.block_cols << " "
                   << inner;
          }
        }
      }
    }
  }
}

TEST_F(DeepGemm, HoldsTheBoundForLongRunsOfOneExpert) {
  for (const int64_t tokens : {33, 40, 64, 300, 2100, 4500}) {
    for (const Ids ids : {Ids::kOneExpert, Ids::kLastExpert}) {
      Case c;
      c.tokens = tokens;
      c.config = {.num_experts = 5, .hidden_size = 144, .intermediate_size = 80, .top_k = 1};
      c.ids = ids;
      error_of(c);
    }
  }
}

TEST_F(DeepGemm, TakesAnyNumberOfExperts) {
  for (const int64_t count : {1, 2, 33, 60, 128, 257, 1025}) {
    for (const int64_t tokens : {50, 200}) {
      Case c;
      c.tokens = tokens;
      c.config = {.num_experts = count, .hidden_size = 320, .intermediate_size = 144, .top_k = 1};
      error_of(c);
    }
  }
}

TEST_F(DeepGemm, TakesEveryWayOfRouting) {
  for (const Ids ids : {Ids::kOneExpert, Ids::kLastExpert, Ids::kEverySecond, Ids::kRepeated,
                        Ids::kSentinels, Ids::kNone}) {
    for (const int64_t tokens : {0, 3, 64, 333}) {
      Case c;
      c.ids = ids;
      c.tokens = tokens;
      c.id_dtype = tokens == 3 ? DType::kI32 : DType::kI64;
      c.weights_dtype = tokens == 3 ? DType::kBF16 : DType::kF32;
      c.output_f32 = tokens == 3;
      c.row_gap = tokens == 3 ? 5 : 0;
      error_of(c);
      if (HasFailure()) FAIL() << static_cast<int>(ids) << " " << tokens;
    }
  }
}

TEST_F(DeepGemm, AppliesEveryGateFunction) {
  for (const bool has_bias : {false, true}) {
    for (const bool has_gate : {true, false}) {
      for (const Activation activation :
           {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh, Activation::kRelu,
            Activation::kRelu2}) {
        for (const int64_t tokens : {22, 70}) {
          Case c;
          c.tokens = tokens;
          c.config.has_gate = has_gate;
          c.config.has_bias = has_bias;
          c.config.activation = activation;
          c.config.intermediate_size = 208;
          error_of(c);
          if (HasFailure()) FAIL() << has_bias << has_gate << " " << name_of(activation);
        }
      }
    }
  }
}

TEST_F(DeepGemm, AppliesLimitsAndAlpha) {
  for (const bool has_alpha : {false, true}) {
    for (const int64_t tokens : {60, 170}) {
      Case c;
      c.tokens = tokens;
      c.config.swiglu_limit = 0.75f;
      if (has_alpha) c.config.swiglu_alpha = 1.702f;
      c.config.has_bias = has_alpha;
      c.fused = has_alpha;
      error_of(c);
    }
  }
}

TEST_F(DeepGemm, TakesWeightsThatTheCopyEngineDoesNot) {
  for (const int64_t hidden : {192, 60}) {
    Case c;
    c.tokens = 70;
    c.config.hidden_size = hidden;
    c.weight_shift = 1;
    c.weight_gap = 3;
    error_of(c);
  }
}

TEST_F(DeepGemm, RefusesBeforehandWhatItDoesNotServe) {
  ExpertsQuery query;
  query.config = Case().config;
  query.device = kDevice;
  query.format = StorageFormat::kFp8Block;
  query.scale_layout = {DType::kF32, 128, 128};
  query.activation_scheme = ActivationScheme::kStatic;
  const auto backend = make_deepgemm();
  EXPECT_NE(to_string(backend->supports(query)).find("static"), std::string::npos);
  query.activation_scheme = ActivationScheme::kDynamic;
  EXPECT_TRUE(backend->supports(query).ok());
  query.format = StorageFormat::kFp4;
  query.scale_layout = {DType::kF8E8M0, 1, 32};
  EXPECT_FALSE(backend->supports(query).ok());
  query.activation_scheme = ActivationScheme::kNone;
  EXPECT_TRUE(backend->supports(query).ok());
  query.format = StorageFormat::kF32;
  query.compute_dtype = DType::kF32;
  EXPECT_TRUE(backend->supports(query).ok());
}

TEST_F(DeepGemm, KeepsNanToTheTokensThatMeetIt) {
  for (const int64_t tokens : {60, 260}) {
    Case c;
    c.tokens = tokens;
    Experts experts(c, stream());
    Projection& gate = experts.first();
    const int64_t bytes = gate.rows * gate.row_stride;
    std::fill_n(gate.codes.host<uint8_t>() + 4 * bytes, bytes, uint8_t{0x7f});  // expert 4
    experts.set_x(17, 3, std::numeric_limits<float>::quiet_NaN());
    experts.set_x(18, 150, std::numeric_limits<float>::infinity());
    experts.prepare();
    experts.upload_call();
    experts.forward();
    experts.result();
    for (int64_t t = 0; t < c.tokens; ++t) {
      bool expected = t == 17 || t == 18;
      for (int64_t s = 0; s < c.config.top_k; ++s) {
        expected |= experts.id(t * c.config.top_k + s) == 4;
      }
      for (int64_t i = 0; i < c.config.hidden_size; ++i) {
        ASSERT_EQ(std::isnan(experts.value(t * c.config.hidden_size + i)), expected)
            << t << " " << i;
      }
    }
  }
}

TEST_F(DeepGemm, GivesTheSameBitsEveryTimeAndFromAGraph) {
  for (const int64_t tokens : {64, 700}) {
    for (const DType dtype : {DType::kBF16, DType::kF16}) {
      Case c;
      c.tokens = tokens;
      c.dtype = dtype;
      c.config = {.num_experts = 5, .hidden_size = 256, .intermediate_size = 144, .top_k = 2};
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
}

}  // namespace
}  // namespace cadre::cuda

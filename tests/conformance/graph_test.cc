// Calls that were recorded once are right for the routing of each replay. Every backend records but
// `eager`, which reads the routing on the host.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/checker.h"
#include "conformance/device_under_test.h"
#include "conformance/placed_call.h"
#include "experts/relative_error.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

class Graph : public DeviceTest {
 protected:
  // Records the call of `p`, then replays it with its own routing and with others.
  void check(const CaseParams& p) {
    ExpertsQuery query = query_of(p);
    query.device = test_stream().device;
    for (const BackendEntry& entry : runnable_backends()) {
      if (entry.name == "eager") continue;
      if (p.quantized && !entry.backend->supports(query)) continue;
      SCOPED_TRACE(entry.name + " " + describe(p));
      ExpertsCase c(p);
      PlacedCall call(*entry.backend, c.query(), c.weights(), c.tokens(), test_stream());
      const auto direct = call.run();
      call.capture();
      const auto replayed = call.replay();
      EXPECT_EQ(std::memcmp(direct.data(), replayed.data(), direct.size() * sizeof(double)), 0)
          << "a replay gives other bits than the call";
      for (int change = 1; change <= 4; ++change) {
        reroute(c, change);
        const std::vector<double> reference = reference_of(c);
        const auto out = call.replay();
        EXPECT_LE(cadre::test::relative_error(out, reference), bound_of(c, *entry.backend))
            << "replay with routing " << change;
        const auto again = call.run();
        EXPECT_EQ(std::memcmp(out.data(), again.data(), out.size() * sizeof(double)), 0)
            << "routing " << change;
      }
    }
  }

  // 1: others, 2: all to one expert, 3: half of the tokens to none, 4: none at all.
  static void reroute(ExpertsCase& c, int change) {
    const CaseParams& p = c.params();
    for (int64_t t = 0; t < p.num_tokens; ++t) {
      for (int64_t s = 0; s < p.config.top_k; ++s) {
        int64_t id = (t * 5 + s + 1) % p.config.num_experts;
        if (change == 2) id = p.config.num_experts - 1;
        if (change == 3 && t % 2 == 0) id = -1;
        if (change == 4) id = p.config.num_experts;
        c.set_id(t, s, id);
      }
    }
  }
};

TEST_F(Graph, ReplaysAreRightForTheRoutingOfTheMoment) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t tokens : {1, 8, 64, 300}) {
      CaseParams p;
      p.compute_dtype = p.stored_dtype = dtype;
      p.num_tokens = tokens;
      p.config.num_experts = 16;
      p.config.top_k = 4;
      p.config.hidden_size = 128;
      p.config.intermediate_size = 96;
      p.output_f32 = true;
      check(p);
    }
  }
}

TEST_F(Graph, LayoutsThatNeedOtherKernelsRecordToo) {
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    for (const bool transposed : {false, true}) {
      CaseParams p;
      p.compute_dtype = p.stored_dtype = dtype;
      p.num_tokens = 33;
      p.config.hidden_size = 70;
      p.config.intermediate_size = 41;
      p.config.is_transposed = transposed;
      p.config.is_concatenated = false;
      p.config.has_bias = true;
      p.byte_shift = 4;
      check(p);
    }
  }
}

TEST_F(Graph, QuantisedExpertsRecordToo) {
  struct Format {
    StorageFormat format;
    ScaleLayout layout;
    ActivationScheme activations;
  };
  const ScaleLayout groups{DType::kF8E8M0, 1, 32};
  for (const Format& format :
       {Format{StorageFormat::kFp8Block, {DType::kF32, 128, 128}, ActivationScheme::kDynamic},
        Format{StorageFormat::kFp8Block, {DType::kF8E8M0, 96, 64}, ActivationScheme::kDynamic},
        Format{StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}, ActivationScheme::kDynamic},
        Format{StorageFormat::kMxFp8, groups, ActivationScheme::kNone},
        Format{StorageFormat::kFp4, groups, ActivationScheme::kNone},
        Format{StorageFormat::kFp4, groups, ActivationScheme::kDynamic}}) {
    for (const int64_t tokens : {1, 8, 100}) {
      CaseParams p;
      p.num_tokens = tokens;
      p.config = {.num_experts = 8, .hidden_size = 256, .intermediate_size = 160, .top_k = 4};
      p.quantized = format.format;
      p.scale_layout = format.layout;
      p.activations = format.activations;
      p.output_f32 = true;
      check(for_device_under_test(p));
    }
  }
}

}  // namespace
}  // namespace cadre::test

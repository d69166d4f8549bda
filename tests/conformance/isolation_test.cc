// What must not spread: NaN and Inf of one token, weights of experts that nobody chose, slots
// without an expert.
#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "conformance/checker.h"
#include "conformance/device_under_test.h"

namespace cadre::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};
constexpr float kInf = std::numeric_limits<float>::infinity();

// Runs body(case, backend, name) for each compute dtype and backend on a fresh case.
template <typename Body>
void for_each_backend(CaseParams params, Body body) {
  for (const DType dtype : kDTypes) {
    params.compute_dtype = dtype;
    for (const BackendEntry& entry : runnable_backends()) {
      SCOPED_TRACE(entry.name + " " + std::string(name_of(dtype)));
      ExpertsCase c(for_device_under_test(params));
      body(c, *entry.backend);
    }
  }
}

class Isolation : public DeviceTest {
 protected:
  std::vector<double> run(ExpertsCase& c, ExpertsBackend& backend) {
    return run_backend(backend, c.query(), c.weights(), c.tokens(), test_stream());
  }
};

TEST_F(Isolation, NaNOrInfOfOneTokenNeverReachesAnother) {
  CaseParams params;
  params.num_tokens = 14;
  params.config.hidden_size = 33;  // odd: a pair of k must not reach into the next row
  params.config.intermediate_size = 31;
  for (const float bad : {std::nanf(""), kInf}) {
    for_each_backend(params, [&](ExpertsCase& c, ExpertsBackend& backend) {
      const auto clean = run(c, backend);
      for (const int64_t column : {0, 32}) c.set_hidden(5, column, bad);
      const auto out = run(c, backend);
      for (size_t i = 0; i < out.size(); ++i) {
        if (i / 33 == 5) {
          EXPECT_FALSE(std::isfinite(out[i])) << i;
        } else {
          EXPECT_EQ(out[i], clean[i]) << i;
        }
      }
    });
  }
}

TEST_F(Isolation, ExpertsThatNobodyChoseAreNotRead) {
  CaseParams params;
  params.config.top_k = 1;
  for_each_backend(params, [&](ExpertsCase& c, ExpertsBackend& backend) {
    for (int64_t t = 0; t < 9; ++t) c.set_id(t, 0, t % 2 == 0 ? 3 : -1);
    const auto clean = run(c, backend);
    for (int64_t e = 0; e < 8; ++e) {
      if (e != 3) c.set_expert_weights(e, e % 2 == 0 ? kInf : std::nanf(""));
    }
    EXPECT_EQ(run(c, backend), clean);
    for (const double value : clean) EXPECT_TRUE(std::isfinite(value));
  });
}

TEST_F(Isolation, SlotsWithoutExpertGiveZeroRowsWhateverTheirWeight) {
  CaseParams params;
  params.routing = Routing::kAllInvalid;  // the routing weights are NaN
  for_each_backend(params, [&](ExpertsCase& c, ExpertsBackend& backend) {
    for (const double value : run(c, backend)) EXPECT_EQ(value, 0);
  });
}

TEST_F(Isolation, EveryInt64IsASafeId) {
  CaseParams params;
  params.config.top_k = 1;
  params.num_tokens = 4;
  constexpr int64_t kIds[] = {std::numeric_limits<int64_t>::min(),
                              std::numeric_limits<int64_t>::max(), int64_t{1} << 32, -8};
  for_each_backend(params, [&](ExpertsCase& c, ExpertsBackend& backend) {
    for (int64_t t = 0; t < 4; ++t) c.set_id(t, 0, kIds[t]);
    for (const double value : run(c, backend)) EXPECT_EQ(value, 0);
  });
}

// gate = min(gate, L) alone: a gate far below -L is not clamped. With the clamp on both sides the
// silu would be silu(-L) instead of about 0.
TEST_F(Isolation, AGateFarBelowTheLimitIsNotClamped) {
  CaseParams params;
  params.config.swiglu_limit = 0.5f;
  params.scale = 30;
  for_each_backend(params, [&](ExpertsCase& c, ExpertsBackend& backend) {
    EXPECT_EQ(check_against(reference_of(c), backend, c, test_stream()), "");
  });
}

}  // namespace
}  // namespace cadre::test

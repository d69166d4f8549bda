// The same call gives the same bits, however often.
#include <gtest/gtest.h>

#include <cstring>

#include "conformance/checker.h"
#include "conformance/device_under_test.h"
#include "conformance/placed_call.h"

namespace cadre::test {
namespace {

class Invariance : public DeviceTest {};

bool same_bits(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}

TEST_F(Invariance, AHundredRepetitionsGiveTheSameBits) {
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const int64_t tokens : {1, 40, 300}) {
      CaseParams p;
      p.num_tokens = tokens;
      p.config.num_experts = 5;
      p.config.top_k = 3;
      p.config.hidden_size = 152;
      p.config.intermediate_size = 136;
      p.config.has_bias = true;
      p.compute_dtype = p.stored_dtype = dtype;
      p.routing = Routing::kSentinels;
      p.output_f32 = true;
      ExpertsCase c(p);
      for (const BackendEntry& entry : runnable_backends()) {
        PlacedCall call(*entry.backend, c.query(), c.weights(), c.tokens(), test_stream(4));
        const auto first = call.run();
        for (int i = 0; i < 100; ++i) {
          ASSERT_TRUE(same_bits(call.run(), first))
              << entry.name << " " << describe(p) << ", repetition " << i;
        }
      }
    }
  }
}

}  // namespace
}  // namespace cadre::test

// The packed form of the experts: every runnable backend against the float64 reference with it, and
// the same bits as without.
#include <gtest/gtest.h>

#include <cstring>
#include <limits>

#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "conformance/checker.h"
#include "experts/relative_error.h"
#include "support/allocation_counter.h"

namespace cadre::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

std::shared_ptr<ExpertsWeights> packed_copy(const ExpertsCase& c, ThreadPool& pool) {
  auto weights = std::make_shared<ExpertsWeights>(*c.weights());
  prepack(c.params().config, *weights, pool);
  return weights;
}

class Packed : public testing::Test {
 protected:
  void check(const CaseParams& params) {
    ExpertsCase c(params);
    const std::vector<double> reference = reference_of(c);
    const auto packed = packed_copy(c, pool_);
    for (const BackendEntry& entry : runnable_backends()) {
      const auto in_place =
          run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), stream_);
      EXPECT_LE(relative_error(c.tokens().output, reference), bound_of(c, *entry.backend))
          << entry.name << " in place " << describe(params);
      const auto out = run_backend(*entry.backend, c.query(), packed, c.tokens(), stream_);
      EXPECT_LE(relative_error(c.tokens().output, reference), bound_of(c, *entry.backend))
          << entry.name << " " << describe(params);
      EXPECT_EQ(std::memcmp(out.data(), in_place.data(), out.size() * sizeof(double)), 0)
          << entry.name << " " << describe(params);
    }
  }
  ThreadPool pool_{2};
  Stream stream_ = Stream::cpu(pool_);
};

TEST_F(Packed, FormatsAndLayouts) {
  for (int flags = 0; flags < 16; ++flags) {
    for (const DType compute : kDTypes) {
      for (const DType stored : kDTypes) {
        CaseParams p;
        p.compute_dtype = compute;
        p.stored_dtype = stored;
        p.config.has_gate = (flags & 1) != 0;
        p.config.has_bias = (flags & 2) != 0;
        p.config.is_transposed = (flags & 4) != 0;
        p.config.is_concatenated = (flags & 8) != 0;
        p.expert_gap = flags;
        p.config.hidden_size = 170;
        p.config.intermediate_size = 41;
        p.output_f32 = true;
        check(p);
      }
    }
  }
}

TEST_F(Packed, SizesOnAndOffEveryEdge) {
  for (const int64_t size : {1, 31, 32, 33, 64, 65, 96, 127, 128, 129, 160, 288}) {
    for (const bool is_hidden : {true, false}) {
      for (const DType dtype : kDTypes) {
        CaseParams p;
        p.compute_dtype = p.stored_dtype = dtype;
        (is_hidden ? p.config.hidden_size : p.config.intermediate_size) = size;
        (is_hidden ? p.config.intermediate_size : p.config.hidden_size) = 96;
        p.num_tokens = size == 1 ? 100 : 30;
        p.output_f32 = true;
        check(p);
      }
    }
  }
}

TEST_F(Packed, NumbersOfTokensAndRoutings) {
  for (const int64_t tokens : {1, 2, 7, 17, 64, 300}) {
    for (const Routing routing : {Routing::kRandom, Routing::kSkewed, Routing::kSentinels}) {
      CaseParams p;
      p.num_tokens = tokens;
      p.routing = routing;
      p.config.hidden_size = 192;
      p.config.intermediate_size = 160;
      p.output_f32 = true;
      check(p);
    }
  }
}

// Kernels cut an expert's rows into tiles and blocks: each number of them, and the edges.
TEST_F(Packed, NumbersOfRowsOfOneExpert) {
  for (const int64_t rows :
       {1,   2,   3,   4,   5,   6,   7,   8,   9,   12,  13,  14,  15,  16, 17, 18,
        19,  24,  25,  31,  32,  33,  34,  47,  48,  49,  64,  65,  80,  81, 96, 97,
        112, 113, 120, 128, 129, 144, 145, 160, 161, 176, 177, 191, 192, 193}) {
    CaseParams p;
    p.config = {.num_experts = 1, .hidden_size = 288, .intermediate_size = 160, .top_k = 1};
    p.num_tokens = rows;
    p.output_f32 = true;
    check(p);
  }
}

// Kernels for few rows and for many read the weights in different ways.
TEST_F(Packed, ATokenHasTheSameBitsInEveryBatch) {
  for (const DType dtype : kDTypes) {
    CaseParams p;
    p.config = {.num_experts = 3, .hidden_size = 416, .intermediate_size = 288, .top_k = 2};
    p.compute_dtype = p.stored_dtype = dtype;
    p.num_tokens = 300;
    p.output_f32 = true;
    ExpertsCase c(p);
    const auto packed = packed_copy(c, pool_);
    for (const BackendEntry& entry : runnable_backends()) {
      const auto all = run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), stream_);
      for (const int64_t batch : {1, 2, 7, 12, 64, 300}) {
        for (int64_t begin = 0; begin + batch <= 300; begin += std::max<int64_t>(batch, 41)) {
          for (const bool is_packed : {false, true}) {
            const std::shared_ptr<const ExpertsWeights> weights = is_packed ? packed : c.weights();
            const auto some = run_backend(*entry.backend, c.query(), weights,
                                          c.slice(begin, begin + batch), stream_);
            EXPECT_EQ(
                std::memcmp(some.data(), all.data() + begin * 416, some.size() * sizeof(double)), 0)
                << entry.name << " " << name_of(dtype) << " packed " << is_packed << " batch "
                << batch << " from " << begin;
          }
        }
      }
    }
  }
}

// Kernels read nothing but the packed form.
TEST_F(Packed, TheValuesInPlaceAreNotRead) {
  CaseParams p;
  p.config.hidden_size = 160;
  ExpertsCase c(p);
  const auto packed = packed_copy(c, pool_);
  for (const BackendEntry& entry : runnable_backends()) {
    const auto expected = run_backend(*entry.backend, c.query(), packed, c.tokens(), stream_);
    for (int64_t e = 0; e < p.config.num_experts; ++e) {
      c.set_expert_weights(e, std::numeric_limits<float>::quiet_NaN());
    }
    EXPECT_EQ(run_backend(*entry.backend, c.query(), packed, c.tokens(), stream_), expected)
        << entry.name;
  }
}

TEST_F(Packed, AForwardTakesNoMemoryFromTheHeap) {
  for (const DType dtype : kDTypes) {
    CaseParams p;
    p.compute_dtype = dtype;
    p.num_tokens = 70;
    ExpertsCase c(p);
    const auto packed = packed_copy(c, pool_);
    const RoutedTokens tokens = c.tokens();
    for (const BackendEntry& entry : runnable_backends()) {
      const auto prepared = entry.backend->prepare(c.query(), packed);
      EXPECT_EQ(prepared->added_bytes, 0u) << "the packed form belongs to the weights";
      Workspace workspace({}, entry.backend->workspace_bytes(c.query(), 70, 2));
      entry.backend->forward(*prepared, tokens, workspace, Stream::cpu(pool_));
      const AllocationCounter counter;
      entry.backend->forward(*prepared, tokens, workspace, Stream::cpu(pool_));
      EXPECT_EQ(counter.count(), 0) << entry.name << " " << name_of(dtype);
    }
  }
}

TEST_F(Packed, OfAnotherLayerIsRefused) {
  ExpertsCase c({});
  CaseParams other;
  other.config.intermediate_size += 64;
  const ExpertsCase d(other);
  auto weights = std::make_shared<ExpertsWeights>(*c.weights());
  weights->packed = packed_copy(d, pool_)->packed;
  for (const BackendEntry& entry : runnable_backends()) {
    try {
      entry.backend->prepare(c.query(), weights);
      ADD_FAILURE() << entry.name;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("weights.packed"), std::string::npos) << e.what();
    }
  }
}

}  // namespace
}  // namespace cadre::test

// Every runnable backend against the float64 reference, over the case grid of the pitfalls page:
// each dimension through all its values, the small ones crossed, then random mixtures of
// everything.
#include <gtest/gtest.h>

#include "conformance/checker.h"
#include "conformance/device_under_test.h"

namespace cadre::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

class Grid : public DeviceTest {
 protected:
  void check(const CaseParams& params) {
    ExpertsCase c(for_device_under_test(params));
    const std::vector<double> reference = reference_of(c);
    for (const BackendEntry& entry : runnable_backends()) {
      // Threads change no bit (cpu_bits_test.cc), and joins are slow on a busy machine.
      const Stream& stream = test_stream(num_cases_ % 8 == 0 ? 3 : 1);
      EXPECT_EQ(check_against(reference, *entry.backend, c, stream), "") << entry.name;
    }
    ++num_cases_;
    ++params_.seed;
  }
  // The default case in each compute dtype, after a change.
  template <typename Change>
  void check_all_dtypes(Change change) {
    for (const DType dtype : kDTypes) {
      CaseParams params = params_;
      params.compute_dtype = dtype;
      params.stored_dtype = dtype == DType::kF32 ? DType::kBF16 : dtype;
      change(params);
      check(params);
    }
  }

  int num_cases_ = 0;
  CaseParams params_;
};

TEST_F(Grid, NumbersOfTokens) {
  for (const int64_t tokens :
       {0, 1, 2, 3, 8, 9, 31, 32, 63, 64, 65, 127, 128, 129, 256, 257, 4097}) {
    check_all_dtypes([&](CaseParams& p) {
      p.num_tokens = tokens;
      if (tokens > 300) p.config.hidden_size = p.config.intermediate_size = 17;
    });
  }
}

TEST_F(Grid, NumbersOfExpertsAndSlots) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1},    {2, 1},    {2, 2},    {6, 2},   {6, 6},
                                               {8, 8},    {60, 4},   {128, 8},  {160, 6}, {256, 8},
                                               {257, 10}, {384, 22}, {512, 10}, {1025, 8}};
  for (const auto& size : sizes) {
    check_all_dtypes([&](CaseParams& p) {
      p.config.num_experts = size.first;
      p.config.top_k = size.second;
      p.config.intermediate_size = 10;
      p.num_tokens = 21;
    });
  }
  check_all_dtypes([](CaseParams& p) {  // k = E, more than a byte of slots
    p.config.num_experts = p.config.top_k = 300;
    p.config.hidden_size = p.config.intermediate_size = 8;
    p.num_tokens = 5;
  });
}

TEST_F(Grid, HiddenAndIntermediateSizes) {
  for (const int64_t size :
       {1, 5, 8, 64, 96, 127, 128, 129, 192, 320, 576, 768, 1025, 2880, 4096, 7168, 8192}) {
    for (const bool is_hidden : {true, false}) {
      check_all_dtypes([&](CaseParams& p) {
        (is_hidden ? p.config.hidden_size : p.config.intermediate_size) = size;
        (is_hidden ? p.config.intermediate_size : p.config.hidden_size) = 9;
        p.config.num_experts = 3;
        p.num_tokens = 3;
      });
    }
  }
}

TEST_F(Grid, Routings) {
  for (const int64_t tokens : {1, 7, 70, 400}) {
    for (int routing = 0; routing <= static_cast<int>(Routing::kOneInvalid); ++routing) {
      for (const DType ids : {DType::kI32, DType::kI64}) {
        check_all_dtypes([&](CaseParams& p) {
          p.num_tokens = tokens;
          p.routing = static_cast<Routing>(routing);
          p.id_dtype = ids;
          p.weights_in_compute_dtype = ids == DType::kI32;
          p.config.top_k = 3;
          p.config.hidden_size = p.config.intermediate_size = 20;
        });
      }
    }
  }
}

TEST_F(Grid, LayoutsOfWeights) {
  for (int flags = 0; flags < 32; ++flags) {
    for (const DType stored : kDTypes) {
      if (is_gpu_under_test() && stored != kDTypes[0]) continue;  // stored in the compute dtype
      check_all_dtypes([&](CaseParams& p) {
        p.stored_dtype = stored;
        p.config.has_gate = (flags & 1) != 0;
        p.config.has_bias = (flags & 2) != 0;
        p.config.is_transposed = (flags & 4) != 0;
        p.config.is_concatenated = (flags & 8) != 0;
        p.expert_gap = (flags & 16) != 0 ? 7 : 0;
        p.bias_dtype = stored;
        p.config.intermediate_size = 41;
        p.config.hidden_size = 70;
      });
    }
  }
}

TEST_F(Grid, OneTensorPerExpert) {
  for (const bool has_gate : {true, false}) {
    for (const int64_t gap : {0, 3}) {
      check_all_dtypes([&](CaseParams& p) {
        p.per_expert_tensors = true;
        p.config.has_gate = has_gate;
        p.expert_gap = gap;
      });
    }
  }
}

TEST_F(Grid, GatesWithValuesBeyondBothClamps) {
  struct Gate {
    Activation activation;
    bool has_gate;
    std::optional<float> limit, alpha;
  };
  const Gate gates[] = {
      {Activation::kSilu, true, {}, {}},       {Activation::kGelu, true, {}, {}},
      {Activation::kGeluTanh, true, {}, {}},   {Activation::kRelu, true, {}, {}},
      {Activation::kRelu2, true, {}, {}},      {Activation::kSilu, false, {}, {}},
      {Activation::kGelu, false, {}, {}},      {Activation::kGeluTanh, false, {}, {}},
      {Activation::kRelu, false, {}, {}},      {Activation::kRelu2, false, {}, {}},
      {Activation::kSilu, true, 0.5f, {}},     {Activation::kGelu, true, 1.0f, {}},
      {Activation::kSilu, true, 7.0f, 1.702f}, {Activation::kSilu, true, {}, 1.702f}};
  for (const Gate& gate : gates) {
    for (const float scale : {1.0f, 8.0f}) {  // 8: gate and up reach far beyond +-7
      check_all_dtypes([&](CaseParams& p) {
        p.config.activation = gate.activation;
        p.config.has_gate = gate.has_gate;
        p.config.swiglu_limit = gate.limit;
        p.config.swiglu_alpha = gate.alpha;
        p.config.has_bias = true;
        p.scale = scale;
      });
    }
  }
}

TEST_F(Grid, StridesAlignmentsAndOutputDtypes) {
  for (const size_t shift : {0u, 1u, 2u, 3u, 6u}) {
    for (const int64_t gap : {0, 5}) {
      for (const bool wide : {false, true}) {
        check_all_dtypes([&](CaseParams& p) {
          p.byte_shift = shift;
          p.row_gap = gap;
          p.expert_gap = gap;
          p.output_f32 = wide;
          p.config.hidden_size = 67;
        });
      }
    }
  }
}

// Everything mixed: case i of a series.
class Mixtures : public Grid {
 protected:
  void check_series(uint64_t state, int count);
};

void Mixtures::check_series(uint64_t state, int count) {
  const auto pick = [&](auto... values) {
    const int64_t all[] = {static_cast<int64_t>(values)...};
    state = state * 6364136223846793005u + 1442695040888963407u;
    return all[(state >> 33) % sizeof...(values)];
  };
  for (int i = 0; i < count; ++i) {
    CaseParams p;
    p.seed = static_cast<uint32_t>(1000 + i);
    p.num_tokens = pick(1, 2, 5, 33, 100);
    p.config.num_experts = pick(1, 3, 8, 60, 129);
    p.config.top_k = std::min<int64_t>(p.config.num_experts, pick(1, 2, 6));
    p.config.hidden_size = pick(1, 7, 64, 130, 200);
    p.config.intermediate_size = pick(1, 9, 32, 65, 140);
    // The sum of one lone output can cancel to almost nothing; a norm needs more than one.
    if (p.config.hidden_size == 1) p.num_tokens = 100;
    p.compute_dtype = kDTypes[pick(0, 1, 2)];
    p.stored_dtype = kDTypes[pick(0, 1, 2)];
    p.bias_dtype = kDTypes[pick(0, 1, 2)];
    p.id_dtype = pick(0, 1) != 0 ? DType::kI32 : DType::kI64;
    p.weights_in_compute_dtype = pick(0, 1) != 0;
    p.output_f32 = pick(0, 1) != 0;
    p.routing = static_cast<Routing>(pick(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
    p.config.has_gate = pick(0, 1, 1) != 0;
    p.config.has_bias = pick(0, 1) != 0;
    p.config.is_transposed = pick(0, 1) != 0;
    p.config.is_concatenated = pick(0, 1) != 0;
    p.config.activation = static_cast<Activation>(pick(0, 1, 2, 3, 4));
    if (p.config.has_gate && pick(0, 1) != 0) p.config.swiglu_limit = 1.0f;
    if (p.config.has_gate && pick(0, 1) != 0) p.config.swiglu_alpha = 1.5f;
    p.expert_gap = pick(0, 0, 11);
    p.row_gap = pick(0, 0, 3);
    p.byte_shift = static_cast<size_t>(pick(0, 1, 2));
    check(p);
  }
}

TEST_F(Mixtures, ThreeHundred) { check_series(12345, 300); }

// Small enough for compute-sanitizer.
TEST_F(Mixtures, AFew) { check_series(54321, 12); }

}  // namespace
}  // namespace cadre::test

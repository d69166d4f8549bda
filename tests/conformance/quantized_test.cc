// Quantised experts on every backend that says it serves them: against the float64 emulation of the
// same arithmetic, and against the dequantised layer.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <set>
#include <vector>

#include "conformance/checker.h"
#include "conformance/device_under_test.h"
#include "conformance/placed_call.h"
#include "experts/device_experts.h"
#include "experts/host_experts.h"

namespace cadre::test {
namespace {

constexpr DType kDTypes[] = {DType::kBF16, DType::kF32, DType::kF16};
constexpr ScaleLayout kMx{DType::kF8E8M0, 1, 32};

struct Format {
  StorageFormat format;
  ScaleLayout layout;
  ActivationScheme activations = ActivationScheme::kDynamic;
};

const Format kFp8{StorageFormat::kFp8Block, {DType::kF32, 128, 128}};
const Format kFp8Ue8m0{StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}};
const Format kFp8Odd{StorageFormat::kFp8Block, {DType::kF32, 96, 64}};
const Format kFp8OddUe8m0{StorageFormat::kFp8Block, {DType::kF8E8M0, 64, 96}};
const Format kFp8Rows{StorageFormat::kFp8Block, {DType::kF32, 1, 128}};
const Format kFp8Tensor{StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}};
const Format kMxFp8{StorageFormat::kMxFp8, kMx, ActivationScheme::kNone};
const Format kFp4{StorageFormat::kFp4, kMx, ActivationScheme::kNone};
const Format kFp4Dynamic{StorageFormat::kFp4, kMx};  // `deepgemm` alone
const Format kFormats[] = {kFp8,       kFp8Ue8m0, kFp8Odd, kFp8OddUe8m0, kFp8Rows,
                           kFp8Tensor, kMxFp8,    kFp4,    kFp4Dynamic};
// One of each kind, where all would take too long.
const Format kFewFormats[] = {kFp8, kFp8Odd, kFp8Tensor, kMxFp8, kFp4, kFp4Dynamic};

CaseParams with_format(const Format& format) {
  CaseParams p;
  p.num_tokens = 5;
  p.config = {.num_experts = 3, .hidden_size = 160, .intermediate_size = 96, .top_k = 2};
  p.quantized = format.format;
  p.scale_layout = format.layout;
  p.activations = format.activations;
  return p;
}

class Quantized : public DeviceTest {
 protected:
  // Every backend that serves it. `exact` false: where e4m3 activations cost more than usual.
  void check(CaseParams params, bool exact = true) {
    params.seed = ++seed_;
    params = for_device_under_test(params);
    const std::vector<BackendEntry> entries = serving(params);
    if (entries.empty()) return;
    const ExpertsCase c(params);
    const std::vector<double> reference = reference_of(c);
    const std::vector<double> truth = exact ? exact_reference_of(c) : std::vector<double>();
    const Stream& stream = test_stream(seed_ % 8 == 0 ? 3 : 1);
    for (const BackendEntry& entry : entries) {
      EXPECT_EQ(check_against(reference, *entry.backend, c, stream, truth), "") << entry.name;
    }
  }
  // Each format after a change, each time in another compute dtype.
  template <typename Change>
  void check_formats(std::span<const Format> formats, Change change, bool exact = true) {
    ++round_;
    for (const Format& format : formats) {
      CaseParams p = with_format(format);
      p.compute_dtype = kDTypes[(round_ + seed_) % 3];
      change(p);
      check(p, exact);
    }
  }
  static std::vector<BackendEntry> serving(const CaseParams& params) {
    ExpertsQuery query = query_of(params);
    query.device = test_stream().device;
    std::vector<BackendEntry> entries;
    for (const BackendEntry& entry : runnable_backends()) {
      if (entry.backend->supports(query)) entries.push_back(entry);
    }
    return entries;
  }
  // Runs body(case, backend) on a fresh case for each format, compute dtype and backend.
  template <typename Body>
  void for_each_backend(std::span<const Format> formats, Body body) {
    for (const Format& format : formats) {
      for (const DType dtype : {DType::kBF16, DType::kF32}) {
        CaseParams p = with_format(format);
        p.compute_dtype = dtype;
        p.output_f32 = true;
        p.num_tokens = 14;
        p = for_device_under_test(p);
        for (const BackendEntry& entry : serving(p)) {
          SCOPED_TRACE(entry.name + " " + describe(p));
          ExpertsCase c(p);
          body(c, *entry.backend);
        }
      }
    }
  }
  static std::vector<double> run(const ExpertsCase& c, ExpertsBackend& backend) {
    return run_backend(backend, c.query(), c.weights(), c.tokens(), test_stream());
  }

  uint32_t seed_ = 0;
  uint32_t round_ = 0;
};

// These three serve every format; `deepgemm` has its own list of shapes.
TEST_F(Quantized, TheBackendsOfTheSpecificationServeThem) {
  if (std::getenv("CADRE_TEST_BACKEND") != nullptr)
    GTEST_SKIP() << "one backend alone was asked for";
  for (const Format& format : {kFp8, kFp8Ue8m0, kFp8Odd, kFp8Tensor, kMxFp8, kFp4}) {
    for (const DType dtype : kDTypes) {
      CaseParams p = with_format(format);
      p.compute_dtype = dtype;
      std::set<std::string> names;
      for (const BackendEntry& entry : serving(p)) names.insert(entry.name);
      for (const char* name : {"eager", "batched_mm", "grouped_mm"}) {
        EXPECT_EQ(names.count(name), 1u) << name << " " << describe(p);
      }
    }
  }
}

TEST_F(Quantized, FormatsAndSizes) {
  const std::pair<int64_t, int64_t> sizes[] = {{64, 96},   {96, 160},  {160, 192}, {192, 320},
                                               {320, 576}, {576, 768}, {768, 64},  {128, 256},
                                               {33, 47},   {1, 5},     {130, 1}};
  for (const auto& size : sizes) {
    check_formats(
        kFormats,
        [&](CaseParams& p) {
          p.config.hidden_size = size.first;
          p.config.intermediate_size = size.second;
          if (size.first == 1) p.num_tokens = 100;
          if (size.first > 300) p.num_tokens = p.config.num_experts = 2;
        },
        /*exact=*/size.first > 32 && size.second > 32);
  }
}

TEST_F(Quantized, NumbersOfTokens) {
  for (const int64_t tokens : {0, 1, 2, 7, 33, 64, 129, 300}) {
    check_formats(kFewFormats, [&](CaseParams& p) {
      p.num_tokens = tokens;
      p.config.num_experts = 9;
      if (tokens > 50) p.config.hidden_size = p.config.intermediate_size = 72;
    });
  }
}

TEST_F(Quantized, LayoutsOfWeights) {
  for (int flags = 0; flags < 16; ++flags) {
    for (const Format& format : kFormats) {
      const bool is_concatenated = (flags & 8) != 0;
      if (!is_concatenated && format.layout.block_rows > 1) continue;
      const Format one[] = {format};
      check_formats(one, [&](CaseParams& p) {
        p.config.has_gate = (flags & 1) != 0;
        p.config.has_bias = (flags & 2) != 0;
        p.config.is_transposed = (flags & 4) != 0;
        p.config.is_concatenated = is_concatenated;
        p.expert_gap = (flags & 2) != 0 ? 7 : 0;
        p.bias_dtype = flags % 3 == 0 ? DType::kF32 : DType::kBF16;
      });
    }
  }
}

TEST_F(Quantized, OneTensorPerExpert) {
  for (const bool has_gate : {true, false}) {
    for (const int64_t gap : {0, 3}) {
      check_formats(kFormats, [&](CaseParams& p) {
        p.per_expert_tensors = true;
        p.config.has_gate = has_gate;
        p.expert_gap = gap;
      });
    }
  }
}

TEST_F(Quantized, Routings) {
  for (int routing = 0; routing <= static_cast<int>(Routing::kOneInvalid); ++routing) {
    for (const DType ids : {DType::kI32, DType::kI64}) {
      check_formats(kFewFormats, [&](CaseParams& p) {
        p.num_tokens = ids == DType::kI32 ? 70 : 7;
        p.routing = static_cast<Routing>(routing);
        p.id_dtype = ids;
        p.weights_in_compute_dtype = ids == DType::kI32;
        p.config.num_experts = 8;
        p.config.top_k = 3;
        p.config.hidden_size = 64;
        p.config.intermediate_size = 40;
      });
    }
  }
}

TEST_F(Quantized, GatesWithValuesBeyondBothClamps) {
  struct Gate {
    Activation activation;
    bool has_gate;
    std::optional<float> limit, alpha;
  };
  const Gate gates[] = {
      {Activation::kGelu, true, {}, {}},      {Activation::kGeluTanh, true, {}, {}},
      {Activation::kRelu, true, {}, {}},      {Activation::kRelu2, false, {}, {}},
      {Activation::kSilu, false, {}, {}},     {Activation::kSilu, true, 0.5f, {}},
      {Activation::kSilu, true, 7.0f, 1.702f}};
  for (const Gate& gate : gates) {
    for (const float scale : {1.0f, 8.0f}) {
      check_formats(
          kFewFormats,
          [&](CaseParams& p) {
            p.config.activation = gate.activation;
            p.config.has_gate = gate.has_gate;
            p.config.swiglu_limit = gate.limit;
            p.config.swiglu_alpha = gate.alpha;
            p.config.has_bias = true;
            p.scale = scale;
          },
          /*exact=*/gate.has_gate);
    }
  }
}

TEST_F(Quantized, ZeroBlocksAndOneHugeValue) {
  for (const bool zeros : {true, false}) {
    check_formats(
        kFormats,
        [&](CaseParams& p) {
          p.has_zero_blocks = zeros;
          p.has_huge_value = !zeros;
          p.config.hidden_size = 320;
          p.config.intermediate_size = 288;
        },
        /*exact=*/zeros);
  }
}

// Zeros have no largest value: their scale is that of the floor, and their codes are zero.
TEST_F(Quantized, RowsOfZerosAreZeros) {
  for_each_backend(kFewFormats, [&](ExpertsCase& c, ExpertsBackend& backend) {
    const auto before = run(c, backend);
    for (int64_t k = 0; k < 160; ++k) c.set_hidden(3, k, k % 2 == 0 ? 0.0f : -0.0f);
    const auto out = run(c, backend);
    for (size_t i = 0; i < out.size(); ++i) {
      if (i / 160 == 3) {
        EXPECT_EQ(out[i], 0) << i;
      } else {
        EXPECT_EQ(out[i], before[i]) << i;
      }
    }
  });
}

TEST_F(Quantized, StridesAlignmentsAndOutputDtypes) {
  for (const size_t shift : {0u, 1u, 2u, 3u, 6u}) {
    for (const bool wide : {false, true}) {
      check_formats(kFewFormats, [&](CaseParams& p) {
        p.byte_shift = shift;
        p.row_gap = wide ? 5 : 0;
        p.expert_gap = wide ? 5 : 0;
        p.output_f32 = wide;
        p.config.hidden_size = 167;
      });
    }
  }
}

// One scale for each matrix's activations, from the checkpoint.
TEST_F(Quantized, StaticActivations) {
  for (const Format& format : {kFp8, kFp8Odd, kFp8Tensor}) {
    Format fixed = format;
    fixed.activations = ActivationScheme::kStatic;
    const Format one[] = {fixed};
    for (const int64_t tokens : {1, 30}) {
      check_formats(
          one, [&](CaseParams& p) { p.num_tokens = tokens; }, /*exact=*/false);
    }
    CaseParams p = with_format(fixed);
    p.compute_dtype = DType::kBF16;
    for (const BackendEntry& entry : serving(p)) {
      EXPECT_EQ(entry.name, "eager") << "static scales are eager's";
    }
  }
}

// FP8 weights with activations as they are: no backend must, those that do are held to it.
TEST_F(Quantized, Fp8WeightsAlone) {
  for (const Format& format : {kFp8, kFp8Ue8m0, kFp8Tensor}) {
    Format alone = format;
    alone.activations = ActivationScheme::kNone;
    const Format one[] = {alone};
    check_formats(one, [](CaseParams&) {});
  }
}

TEST_F(Quantized, NaNOrInfOfOneTokenNeverReachesAnother) {
  for (const float bad : {std::nanf(""), std::numeric_limits<float>::infinity()}) {
    for_each_backend(kFewFormats, [&](ExpertsCase& c, ExpertsBackend& backend) {
      const auto clean = run(c, backend);
      for (const int64_t column : {0, 159}) c.set_hidden(5, column, bad);
      const auto out = run(c, backend);
      for (size_t i = 0; i < out.size(); ++i) {
        if (i / 160 == 5) {
          EXPECT_FALSE(std::isfinite(out[i])) << i;
        } else {
          EXPECT_EQ(out[i], clean[i]) << i;
        }
      }
    });
  }
}

TEST_F(Quantized, ScalesOfExpertsThatNobodyChoseAreNotRead) {
  for_each_backend(kFewFormats, [&](ExpertsCase& c, ExpertsBackend& backend) {
    for (int64_t t = 0; t < 14; ++t) {
      for (int64_t s = 0; s < 2; ++s) c.set_id(t, s, t % 2 == 0 ? 1 : -1);
    }
    const auto clean = run(c, backend);
    for (const int64_t e : {0, 2}) c.set_expert_weights(e, std::nanf(""));
    EXPECT_EQ(run(c, backend), clean);
    for (const double value : clean) EXPECT_TRUE(std::isfinite(value));
  });
}

// The scale of a chosen expert's first block is NaN: so is what is computed from it, and only that.
TEST_F(Quantized, NaNScalesReachTheirOwnTokensAlone) {
  for_each_backend(kFewFormats, [&](ExpertsCase& c, ExpertsBackend& backend) {
    for (int64_t t = 0; t < 14; ++t) {
      for (int64_t s = 0; s < 2; ++s) c.set_id(t, s, t == 4 ? 2 : s);
    }
    const auto clean = run(c, backend);
    c.set_expert_weights(2, std::nanf(""));
    const auto out = run(c, backend);
    bool has_nan = false;
    for (size_t i = 0; i < out.size(); ++i) {
      if (i / 160 == 4) {
        has_nan = has_nan || std::isnan(out[i]);
      } else {
        EXPECT_EQ(out[i], clean[i]) << i;
      }
    }
    EXPECT_TRUE(has_nan);
  });
}

TEST_F(Quantized, SlotsWithoutExpertGiveZeroRowsWhateverTheirWeight) {
  for_each_backend(kFewFormats, [&](ExpertsCase& c, ExpertsBackend& backend) {
    constexpr int64_t kIds[] = {std::numeric_limits<int64_t>::min(),
                                std::numeric_limits<int64_t>::max(), int64_t{1} << 32, 3};
    for (int64_t t = 0; t < 14; ++t) {
      for (int64_t s = 0; s < 2; ++s) c.set_id(t, s, kIds[t % 4]);
    }
    for (const double value : run(c, backend)) EXPECT_EQ(value, 0);
  });
}

TEST_F(Quantized, RepetitionsGiveTheSameBits) {
  for (const int64_t tokens : {1, 40, 200}) {
    for (const Format& format : kFewFormats) {
      CaseParams p = with_format(format);
      p.num_tokens = tokens;
      p.routing = Routing::kSentinels;
      p.output_f32 = true;
      p = for_device_under_test(p);
      const ExpertsCase c(p);
      for (const BackendEntry& entry : serving(p)) {
        PlacedCall call(*entry.backend, c.query(), c.weights(), c.tokens(), test_stream(4));
        const auto first = call.run();
        for (int i = 0; i < 30; ++i) {
          const auto again = call.run();
          ASSERT_EQ(std::memcmp(again.data(), first.data(), first.size() * sizeof(double)), 0)
              << entry.name << " " << describe(p) << ", repetition " << i;
        }
      }
    }
  }
}

// Everything mixed.
TEST_F(Quantized, Mixtures) {
  uint64_t state = 4711;
  const auto pick = [&](auto... values) {
    const int64_t all[] = {static_cast<int64_t>(values)...};
    state = state * 6364136223846793005u + 1442695040888963407u;
    return all[(state >> 33) % sizeof...(values)];
  };
  for (int i = 0; i < 100; ++i) {
    const Format& format = kFormats[pick(0, 1, 2, 3, 4, 5, 6, 7, 8)];
    CaseParams p = with_format(format);
    p.num_tokens = pick(1, 2, 5, 33, 100);
    p.config.num_experts = pick(1, 3, 8, 60);
    p.config.top_k = std::min<int64_t>(p.config.num_experts, pick(1, 2, 6));
    p.config.hidden_size = pick(7, 64, 130, 200, 288);
    p.config.intermediate_size = pick(9, 32, 65, 140, 256);
    p.compute_dtype = kDTypes[pick(0, 1, 2)];
    p.bias_dtype = kDTypes[pick(0, 1, 2)];
    p.id_dtype = pick(0, 1) != 0 ? DType::kI32 : DType::kI64;
    p.weights_in_compute_dtype = pick(0, 1) != 0;
    p.output_f32 = pick(0, 1) != 0;
    p.routing = static_cast<Routing>(pick(0, 1, 2, 3, 4, 5, 6, 7, 8, 9));
    p.config.has_gate = pick(0, 1, 1) != 0;
    p.config.has_bias = pick(0, 1) != 0;
    p.config.is_transposed = pick(0, 1) != 0;
    p.config.is_concatenated = pick(0, 1) != 0 || format.layout.block_rows > 1;
    p.config.activation = static_cast<Activation>(pick(0, 1, 2, 3, 4));
    if (p.config.has_gate && pick(0, 1) != 0) p.config.swiglu_limit = 1.0f;
    if (p.config.has_gate && pick(0, 1) != 0) p.config.swiglu_alpha = 1.5f;
    p.expert_gap = pick(0, 0, 11);
    p.row_gap = pick(0, 0, 3);
    p.byte_shift = static_cast<size_t>(pick(0, 1, 2));
    p.has_zero_blocks = pick(0, 0, 1) != 0;
    check(p, /*exact=*/false);
  }
}

// copy_to_device keeps every bit, and HostExperts brings it back.
TEST_F(Quantized, GoToTheDeviceAndBackUnchanged) {
  for (const Format& format : kFormats) {
    CaseParams p = with_format(format);
    p.config.is_transposed = true;
    p.config.hidden_size = 70;
    p.config.intermediate_size = 41;
    const ExpertsCase c(p);
    ExpertsQuery query = c.query();
    query.device = test_stream().device;
    const auto there = copy_to_device(query, c.weights(), test_stream());
    EXPECT_EQ(there->device, query.device);
    EXPECT_EQ(there->format, format.format);
    EXPECT_EQ(there->scale_layout, format.layout);
    const HostExperts back(p.config, *there, c.tokens().top_k_index, test_stream());
    std::vector<double> expected(static_cast<size_t>(c.tokens().hidden_states.numel()));
    std::vector<double> got = expected;
    reference_forward(p.config, *c.weights(), c.tokens(), expected.data(), format.activations);
    reference_forward(p.config, back.get(), c.tokens(), got.data(), format.activations);
    EXPECT_EQ(got, expected) << describe(p);
  }
}

}  // namespace
}  // namespace cadre::test

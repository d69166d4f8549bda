// The checker itself must be able to fail: backends that are wrong on purpose.
#include "conformance/checker.h"

#include <gtest/gtest.h>

#include <cstring>

#include "cadre/thread_pool.h"

namespace cadre::test {
namespace {

enum class Fault {
  kNone,
  kScaled,         // one percent off
  kLeavesARow,     // the last row is not written
  kSwapsGateAndUp  // [up; gate]
};

// grouped_mm with a fault.
class FaultyBackend : public ExpertsBackend {
 public:
  explicit FaultyBackend(Fault fault) : fault_(fault) {}
  Support supports(const ExpertsQuery& query) const override { return inner_.supports(query); }
  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    if (fault_ == Fault::kSwapsGateAndUp) {
      auto swapped = std::make_shared<ExpertsWeights>(*weights);
      std::swap(swapped->gate, swapped->up);
      weights = swapped;
    }
    return inner_.prepare(query, weights);
  }
  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int num_threads) const override {
    return inner_.workspace_bytes(query, max_tokens, num_threads);
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    inner_.forward(experts, tokens, workspace, stream);
    const int64_t width = tokens.output.dim(1);
    float* last = tokens.output.as<float>() + (tokens.output.dim(0) - 1) * tokens.output.stride(0);
    if (fault_ == Fault::kScaled) {
      for (int64_t i = 0; i < width; ++i) last[i] *= 1.01f;
    }
    if (fault_ == Fault::kLeavesARow) {
      std::memset(last, 0xff, static_cast<size_t>(width) * sizeof(float));
    }
  }

 private:
  ExpertsBackend& inner_ = find_backend("grouped_mm", DeviceType::kCpu);
  Fault fault_;
};

std::string verdict(Fault fault) {
  CaseParams params;
  params.output_f32 = true;
  params.compute_dtype = DType::kF32;
  ExpertsCase c(params);
  ThreadPool pool(2);
  FaultyBackend backend(fault);
  return check_against(reference_of(c), backend, c, Stream::cpu(pool));
}

TEST(Checker, PassesASoundBackend) { EXPECT_EQ(verdict(Fault::kNone), ""); }

TEST(Checker, CatchesWrongValues) {
  const std::string text = verdict(Fault::kScaled);
  EXPECT_NE(text.find("relative error 0.00"), std::string::npos) << text;
  EXPECT_NE(text.find("worst at token 8"), std::string::npos) << text;
}

TEST(Checker, CatchesARowThatIsNotWritten) {
  EXPECT_NE(verdict(Fault::kLeavesARow).find("nan above the stated bound"), std::string::npos);
}

TEST(Checker, CatchesSwappedGateAndUp) {
  EXPECT_NE(verdict(Fault::kSwapsGateAndUp).find("relative error"), std::string::npos);
}

// The reference itself as a backend, with or without what quantised experts are prone to lose.
class ReferenceBackend : public ExpertsBackend {
 public:
  explicit ReferenceBackend(ActivationScheme activations, bool loses_offset = false)
      : activations_(activations), loses_offset_(loses_offset) {}
  Support supports(const ExpertsQuery&) const override { return {}; }
  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    auto copy = std::make_shared<ExpertsWeights>(*weights);
    for (ExpertMatrix& m : copy->up) {
      if (loses_offset_) m.scale_row_offset = 0;
    }
    return std::make_unique<PreparedExperts>(query, copy);
  }
  size_t workspace_bytes(const ExpertsQuery&, int64_t, int) const override { return 0; }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace&,
           const Stream&) override {
    std::vector<double> out(static_cast<size_t>(tokens.output.numel()));
    reference_forward(experts.query.config, *experts.weights, tokens, out.data(), activations_);
    for (size_t i = 0; i < out.size(); ++i) {
      tokens.output.as<float>()[i] = static_cast<float>(out[i]);
    }
  }

 private:
  ActivationScheme activations_;
  bool loses_offset_;
};

std::string quantized_verdict(ExpertsBackend&& backend) {
  CaseParams params;
  params.config.hidden_size = 192;
  params.config.intermediate_size = 96;  // up begins inside a block
  params.output_f32 = true;
  params.quantized = StorageFormat::kFp8Block;
  params.scale_layout = {DType::kF32, 64, 128};
  params.activations = ActivationScheme::kDynamic;
  const ExpertsCase c(params);
  ThreadPool pool(1);
  return check_against(reference_of(c), backend, c, Stream::cpu(pool), exact_reference_of(c));
}

TEST(Checker, PassesTheArithmeticOfQuantisedExperts) {
  EXPECT_EQ(quantized_verdict(ReferenceBackend(ActivationScheme::kDynamic)), "");
}

TEST(Checker, CatchesActivationsThatAreNotQuantised) {
  const std::string text = quantized_verdict(ReferenceBackend(ActivationScheme::kNone));
  EXPECT_NE(text.find("above the emulation bound 0.001"), std::string::npos) << text;
}

TEST(Checker, AsksTheBackendForItsBound) {
  class Coarse : public ReferenceBackend {
   public:
    Coarse() : ReferenceBackend(ActivationScheme::kNone) {}
    double emulation_bound(const ExpertsQuery&, DType) const override { return 0.1; }
  };
  EXPECT_EQ(quantized_verdict(Coarse()), "");
}

TEST(Checker, CatchesScalesOfTheWrongBlock) {
  const std::string text = quantized_verdict(ReferenceBackend(ActivationScheme::kDynamic, true));
  EXPECT_NE(text.find("above the emulation bound"), std::string::npos) << text;
}

TEST(Checker, ReportsARefusal) {
  CaseParams params;
  params.config.num_experts = 2;
  ExpertsCase c(params);
  ThreadPool pool(1);
  class Refusing : public FaultyBackend {
   public:
    Refusing() : FaultyBackend(Fault::kNone) {}
    Support supports(const ExpertsQuery&) const override { return {{"needs three experts"}}; }
  } backend;
  EXPECT_NE(
      check_against(reference_of(c), backend, c, Stream::cpu(pool)).find("needs three experts"),
      std::string::npos);
}

TEST(Checker, RunsOnABackendRegisteredAtRunTime) {
  register_backend("faulty_for_test",
                   [] { return std::make_unique<FaultyBackend>(Fault::kScaled); });
  bool found = false;
  for (const BackendEntry& entry : runnable_backends()) found |= entry.name == "faulty_for_test";
  EXPECT_TRUE(found);
}

}  // namespace
}  // namespace cadre::test

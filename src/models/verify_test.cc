// Every fixture model's experts pass; a backend that is wrong on purpose does not.
#include "models/verify.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "cadre/error.h"

namespace cadre::test {
namespace {

std::string folder_of(const std::string& name) {
  return std::string(CADRE_TEST_DATA) + "/models/" + name;
}

std::vector<ExpertsCheck> checks_of(Model& model, const VerifyOptions& options,
                                    VerifySummary* summary = nullptr) {
  std::vector<ExpertsCheck> checks;
  const VerifySummary result = verify_experts(model, options, [&](const ExpertsCheck& check) {
    checks.push_back(check);
    return true;
  });
  if (summary) *summary = result;
  return checks;
}

/// Those of the build, and what other tests of this program have registered.
std::set<std::string> runnable_on(const Model& model) {
  std::set<std::string> names;
  for (const std::string& name : backend_names()) {
    if (supports(name, model.experts_query())) names.insert(name);
  }
  return names;
}

TEST(Verify, EveryFamilyPassesOnEveryBackendAndLayer) {
  for (const std::string name :
       {"mixtral", "olmoe", "qwen2_moe", "qwen2_moe_dense_layers", "qwen3_moe"}) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      SCOPED_TRACE(name + " " + std::string(name_of(dtype)));
      const auto model = Model::from_pretrained(folder_of(name), {.dtype = dtype});
      VerifySummary summary;
      const auto checks = checks_of(*model, {.num_threads = 2}, &summary);
      const std::set<std::string> runnable = runnable_on(*model);
      EXPECT_EQ(summary.num_checks,
                model->info().num_moe_layers * static_cast<int64_t>(runnable.size()));
      EXPECT_EQ(summary.num_failed, 0);
      EXPECT_LE(summary.worst_error, 1);
      std::set<std::string> backends;
      for (const ExpertsCheck& check : checks) {
        EXPECT_TRUE(check.ok()) << check.backend << " layer " << check.layer;
        EXPECT_GT(check.relative_error, 0);  // float64 against float32: never equal
        EXPECT_EQ(check.bound, stated_bound(dtype, check.format));
        EXPECT_GT(check.seconds, 0);
        backends.insert(check.backend);
      }
      EXPECT_EQ(backends, runnable);
    }
  }
}

// Quantised layers are held to the arithmetic that they run in, on every backend that serves them.
TEST(Verify, QuantisedLayersAreHeldToTheirOwnArithmetic) {
  struct Case {
    const char* name;
    StorageFormat format;
    double bound;  // in float32
  };
  for (const Case& c : {Case{"qwen3_moe_fp8", StorageFormat::kFp8Block, 1e-3},
                        Case{"qwen3_moe_fp8_ue8m0", StorageFormat::kFp8Block, 1e-3},
                        Case{"deepseek_v3_fp8", StorageFormat::kFp8Block, 1e-3},
                        Case{"gpt_oss_mxfp4", StorageFormat::kFp4, 1e-5},
                        Case{"deepseek_v4_fp4", StorageFormat::kFp4, 1e-5}}) {
    SCOPED_TRACE(c.name);
    const auto model = Model::from_pretrained(folder_of(c.name), {.dtype = DType::kF32});
    VerifySummary summary;
    std::set<std::string> backends;
    for (const ExpertsCheck& check : checks_of(*model, {.num_threads = 2}, &summary)) {
      EXPECT_EQ(check.format, c.format);
      EXPECT_EQ(check.bound, c.bound);
      EXPECT_TRUE(check.ok()) << check.backend << " layer " << check.layer << ": "
                              << check.relative_error;
      backends.insert(check.backend);
    }
    EXPECT_EQ(summary.num_failed, 0);
    for (const char* name : {"eager", "batched_mm", "grouped_mm"}) {
      EXPECT_EQ(backends.count(name), 1u) << name;
    }
  }
}

TEST(Verify, LayersAreTheModelsOwnNumbers) {
  const auto model = Model::from_pretrained(folder_of("qwen2_moe_dense_layers"));
  ASSERT_LT(model->info().num_moe_layers, model->info().num_layers);
  std::set<int64_t> layers;
  for (const ExpertsCheck& check : checks_of(*model, {})) layers.insert(check.layer);
  std::set<int64_t> expected;
  MoeHooks hooks;
  hooks.on_output = [&](const MoeLayerRecord& record) { expected.insert(record.layer); };
  const std::vector<TokenId> ids = {1};
  const std::vector<int64_t> counts = {1};
  const Tensor logits(DType::kF32, {1, model->info().vocab_size});
  model->forward({ids, counts}, *model->new_cache(1, 1), logits, &hooks);
  EXPECT_EQ(layers, expected);
}

TEST(Verify, TakesTheFirstLayersAndStopsWhenAsked) {
  const auto model = Model::from_pretrained(folder_of("qwen3_moe"));
  ASSERT_GT(model->info().num_moe_layers, 1);
  EXPECT_EQ(checks_of(*model, {.num_layers = 1}).size(), runnable_on(*model).size());
  int count = 0;
  const VerifySummary summary =
      verify_experts(*model, {}, [&](const ExpertsCheck&) { return ++count < 2; });
  EXPECT_EQ(summary.num_checks, 2);
}

TEST(Verify, RefusesOptionsOutOfRange) {
  const auto model = Model::from_pretrained(folder_of("qwen3_moe"));
  const auto run = [&](const VerifyOptions& options) {
    return [&model, options] { checks_of(*model, options); };
  };
  for (const VerifyOptions& options :
       {VerifyOptions{.num_tokens = 0}, VerifyOptions{.num_tokens = int64_t{1} << 40},
        VerifyOptions{.num_layers = -1}, VerifyOptions{.num_layers = 1000}}) {
    EXPECT_THROW(run(options)(), InvalidArgument);
  }
}

/// eager, with something done to its output.
class Tampered final : public ExpertsBackend {
 public:
  using Tamper = void (*)(MutableTensorView output);
  explicit Tampered(Tamper tamper) : tamper_(tamper) {}

  Support supports(const ExpertsQuery& query) const override { return eager().supports(query); }
  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    return eager().prepare(query, std::move(weights));
  }
  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int threads) const override {
    return eager().workspace_bytes(query, max_tokens, threads);
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    eager().forward(experts, tokens, workspace, stream);
    tamper_(tokens.output);
  }

 private:
  static ExpertsBackend& eager() { return find_backend("eager", DeviceType::kCpu); }

  Tamper tamper_;
};

void add_tampered(const std::string& name, Tampered::Tamper tamper) {
  register_backend(name, [tamper] { return std::make_unique<Tampered>(tamper); });
}

// The last test of the program: registered backends stay.
TEST(VerifyLast, ABackendThatIsWrongOnPurposeFails) {
  add_tampered("swapped", [](MutableTensorView out) {
    std::swap_ranges(out[0].as<float>(), out[0].as<float>() + out.dim(1), out[1].as<float>());
  });
  add_tampered("slightly_off", [](MutableTensorView out) {
    for (int64_t i = 0; i < out.numel(); ++i) out.as<float>()[i] *= 1.0001f;
  });
  add_tampered("last_row_unwritten", [](MutableTensorView out) {
    std::memset(out[out.dim(0) - 1].mutable_data(), 0xff, out[0].nbytes());
  });
  const auto model = Model::from_pretrained(folder_of("qwen3_moe"), {.dtype = DType::kF32});
  VerifySummary summary;
  std::map<std::string, bool> passed;
  for (const ExpertsCheck& check : checks_of(*model, {.num_layers = 1}, &summary)) {
    passed[check.backend] = check.ok();
    EXPECT_EQ(std::isnan(check.relative_error), check.backend == "last_row_unwritten");
  }
  for (const char* right : {"eager", "batched_mm", "grouped_mm"}) EXPECT_TRUE(passed.at(right));
  for (const char* wrong : {"swapped", "slightly_off", "last_row_unwritten"}) {
    EXPECT_FALSE(passed.at(wrong)) << wrong;
  }
  EXPECT_EQ(summary.num_failed, 3);
  EXPECT_TRUE(std::isinf(summary.worst_error));
}

}  // namespace
}  // namespace cadre::test

// The checks that stand before every backend's work, and those of the reference.
#include <gtest/gtest.h>

#include <array>
#include <cmath>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "cadre/thread_pool.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

constexpr int64_t kT = 3, kE = 2, kH = 4, kI = 2, kK = 2;

class Forward : public testing::Test {
 protected:
  Forward() {
    config.num_experts = kE;
    config.hidden_size = kH;
    config.intermediate_size = kI;
    config.top_k = kK;
    weight_values.fill(0.5f);
    weights = std::make_shared<ExpertsWeights>(make_experts_weights(
        config, {TensorView(weight_values.data(), DType::kF32, {kE, 2 * kI, kH}),
                 TensorView(weight_values.data(), DType::kF32, {kE, kH, kI})}));
    query.config = config;
    query.compute_dtype = DType::kF32;
    query.format = StorageFormat::kF32;
    tokens.hidden_states = TensorView(x.data(), DType::kF32, {kT, kH});
    tokens.top_k_index = TensorView(ids.data(), DType::kI32, {kT, kK});
    tokens.top_k_weights = TensorView(routing.data(), DType::kF32, {kT, kK});
    tokens.output = MutableTensorView(out.data(), DType::kF32, {kT, kH});
  }

  std::string refusal() {
    try {
      ExpertsBackend& backend = find_backend("eager", DeviceType::kCpu);
      const auto prepared = backend.prepare(query, weights);
      Workspace workspace({}, backend.workspace_bytes(query, kT, 1));
      backend.forward(*prepared, tokens, workspace, stream);
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "accepted";
  }
  void expect_refusal(const std::string& part) {
    const std::string text = refusal();
    EXPECT_NE(text.find(part), std::string::npos) << text;
  }

  ExpertsConfig config;
  ExpertsQuery query;
  std::array<float, 64> weight_values{}, x{}, routing{}, out{};
  std::array<int32_t, 64> ids{};
  std::shared_ptr<const ExpertsWeights> weights;
  RoutedTokens tokens;
  ThreadPool pool{1};
  Stream stream = Stream::cpu(pool);
};

TEST_F(Forward, RunsWhatFits) { EXPECT_EQ(refusal(), "accepted"); }

TEST_F(Forward, RefusesWrongShapes) {
  tokens.hidden_states = TensorView(x.data(), DType::kF32, {kT, kH + 1});
  expect_refusal("hidden_states: expected [3, 4], got hidden_states: float32 [3, 5]");
  tokens.hidden_states = TensorView(x.data(), DType::kF32, {kT, kH, 1});
  expect_refusal("hidden_states: expected [num_tokens, 4]");
  tokens.hidden_states = TensorView(x.data(), DType::kF32, {kT + 1, kH});
  expect_refusal("top_k_index: expected [4, 2]");
}

TEST_F(Forward, RefusesIdsAndWeightsOfDifferentShapes) {
  tokens.top_k_weights = TensorView(routing.data(), DType::kF32, {kT, 8});
  expect_refusal("top_k_weights: expected [3, 2], got top_k_weights: float32 [3, 8]");
}

TEST_F(Forward, RefusesWrongDtypes) {
  tokens.top_k_index = TensorView(ids.data(), DType::kF32, {kT, kK});
  expect_refusal("top_k_index: expected int32 or int64, got top_k_index: float32");
  tokens.top_k_index = TensorView(ids.data(), DType::kI32, {kT, kK});
  tokens.top_k_weights = TensorView(routing.data(), DType::kF16, {kT, kK});
  expect_refusal("top_k_weights: expected float32 or the compute dtype float32");
  tokens.top_k_weights = TensorView(routing.data(), DType::kF32, {kT, kK});
  tokens.output = MutableTensorView(out.data(), DType::kBF16, {kT, kH});
  expect_refusal("output: expected float32 or the compute dtype float32, got output: bfloat16");
  tokens.hidden_states = TensorView(x.data(), DType::kBF16, {kT, kH});
  expect_refusal("hidden_states: expected float32, the dtype these experts were prepared for");
}

TEST_F(Forward, RefusesStridedLastDimensionsAndNullMemory) {
  tokens.hidden_states = TensorView(x.data(), DType::kF32, {kT, kH}, {8, 2});
  expect_refusal("hidden_states: expected stride 1 in the last dimension, not 2");
  tokens.hidden_states = TensorView(nullptr, DType::kF32, {kT, kH});
  expect_refusal("hidden_states: expected memory behind it");
}

TEST_F(Forward, RefusesAnOutputThatOverlapsAnInputOrItself) {
  tokens.output = MutableTensorView(x.data(), DType::kF32, {kT, kH});
  expect_refusal("output: expected memory of its own, got memory that overlaps hidden_states");
  tokens.output = MutableTensorView(routing.data() + 5, DType::kF32, {kT, kH});
  expect_refusal("overlaps top_k_weights");
  tokens.output = MutableTensorView(out.data(), DType::kF32, {kT, kH}, {1, 1});
  expect_refusal("rows that do not overlap, not stride 1");
}

TEST_F(Forward, RefusesOtherDevices) {
  tokens.top_k_index = TensorView(ids.data(), DType::kI32, {kT, kK}, Device{DeviceType::kCuda, 1});
  expect_refusal("top_k_index: expected memory on cpu, got top_k_index: int32 [3, 2] on cuda:1");
}

TEST_F(Forward, RefusesAStreamWithoutThreads) {
  stream.threads = nullptr;
  expect_refusal("stream: expected a thread pool");
}

TEST_F(Forward, TakesNoTokens) {
  tokens.hidden_states = TensorView(nullptr, DType::kF32, {0, kH});
  tokens.top_k_index = TensorView(nullptr, DType::kI32, {0, kK});
  tokens.top_k_weights = TensorView(nullptr, DType::kF32, {0, kK});
  tokens.output = MutableTensorView(nullptr, DType::kF32, {0, kH});
  EXPECT_EQ(refusal(), "accepted");
}

TEST_F(Forward, PrepareRefusesWeightsThatAreNotTheQuerys) {
  query.format = StorageFormat::kBF16;
  expect_refusal("weights: expected bfloat16 as in the query, got float32");
  query.format = StorageFormat::kF32;
  query.config.num_experts = 5;
  expect_refusal("weights.gate: expected 5 entries, got 2");
  query.config.num_experts = kE;
  weights = nullptr;
  expect_refusal("weights: expected a layer's weights, got null");
}

TEST_F(Forward, PrepareRefusesWhatSupportsRefuses) {
  query.ep_size = 4;
  ExpertsBackend& backend = find_backend("eager", DeviceType::kCpu);
  EXPECT_THROW(backend.prepare(query, weights), Unsupported);
}

TEST_F(Forward, ReferenceChecksItsInputs) {
  std::array<double, 64> truth{};
  tokens.top_k_weights = TensorView(routing.data(), DType::kF32, {kT, 8});
  EXPECT_THROW(reference_forward(config, *weights, tokens, truth.data()), InvalidArgument);
  ExpertsWeights quantised = *weights;
  quantised.format = StorageFormat::kFp4;
  tokens.top_k_weights = TensorView(routing.data(), DType::kF32, {kT, kK});
  test::expect_error<InvalidArgument>(
      [&] { reference_forward(config, quantised, tokens, truth.data()); },
      {"gate[0]", "expected scales beside fp4 values"});
}

// By hand: x = 1 everywhere, W = 0.5: gate = up = 2, h = silu(2) * 2, y = h (two of 0.5), twice
// with weight 1 and 2.
TEST_F(Forward, ReferenceGivesTheValueByHand) {
  x.fill(1);
  routing = {1, 2};
  ids = {0, 1};
  tokens.hidden_states = TensorView(x.data(), DType::kF32, {1, kH});
  tokens.top_k_index = TensorView(ids.data(), DType::kI32, {1, kK});
  tokens.top_k_weights = TensorView(routing.data(), DType::kF32, {1, kK});
  std::array<double, kH> truth{};
  reference_forward(config, *weights, tokens, truth.data());
  for (const double value : truth) EXPECT_DOUBLE_EQ(value, 3 * 2 * 2 / (1 + std::exp(-2.0)));
}

}  // namespace
}  // namespace cadre

// The 20 cases that Transformers computed (tests/data/experts): independent truth for the reference
// and for every backend.
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <optional>

#include "cadre/float16.h"
#include "conformance/checker.h"
#include "conformance/device_under_test.h"
#include "io/safetensors.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

// A tensor's values rounded to another dtype.
Tensor converted(const TensorView& from, DType dtype) {
  Tensor to(dtype, from.shape());
  const std::vector<double> values = to_doubles(from);
  for (size_t i = 0; i < values.size(); ++i) {
    write_element(static_cast<char*>(to->mutable_data()) + i * size_of(dtype), dtype, values[i]);
  }
  return to;
}

struct Owner {
  std::shared_ptr<const void> file;
  std::vector<Tensor> converted;
};

struct Fixture {
  SafetensorsFile file;
  ExpertsConfig config;

  explicit Fixture(const std::filesystem::path& path) : file(SafetensorsFile::open(path)) {
    const auto get = [&](const char* key) {
      return nlohmann::json::parse(file.header().metadata.at(key));
    };
    config.num_experts = get("num_experts").get<int64_t>();
    config.hidden_size = get("hidden_size").get<int64_t>();
    config.intermediate_size = get("intermediate_size").get<int64_t>();
    config.top_k = get("top_k").get<int64_t>();
    config.activation = parse_activation(get("hidden_act").get<std::string>());
    config.has_gate = get("has_gate").get<bool>();
    config.has_bias = get("has_bias").get<bool>();
    config.is_transposed = get("is_transposed").get<bool>();
    config.is_concatenated = get("is_concatenated").get<bool>();
    if (!get("swiglu_limit").is_null()) config.swiglu_limit = get("swiglu_limit").get<float>();
    if (!get("swiglu_alpha").is_null()) config.swiglu_alpha = get("swiglu_alpha").get<float>();
  }

  TensorView tensor(const std::string& name) const { return file.tensor(name); }

  /// As stored; with a dtype, converted to it as the loader does for GPUs.
  std::shared_ptr<const ExpertsWeights> weights(std::optional<DType> dtype = {}) const {
    FusedExperts fused;
    auto owner = std::make_shared<Owner>(Owner{file.owner(), {}});
    const auto matrix = [&](const std::string& name) -> TensorView {
      if (!dtype) return tensor(name);
      return owner->converted.emplace_back(converted(tensor(name), *dtype)).view();
    };
    const std::string up = config.has_gate ? "gate_up_proj" : "up_proj";
    fused.gate_up_proj = matrix(up);
    fused.down_proj = matrix("down_proj");
    if (config.has_bias) {
      fused.gate_up_proj_bias = tensor(up + "_bias");
      fused.down_proj_bias = tensor("down_proj_bias");
    }
    return std::make_shared<ExpertsWeights>(make_experts_weights(config, fused, owner));
  }

  RoutedTokens tokens(const MutableTensorView& hidden) const {
    return {hidden, tensor("top_k_index"), tensor("top_k_weights"), {}};
  }
};

struct Format {
  StorageFormat format;
  ScaleLayout layout;
  ActivationScheme activations;
  double cost;  // of rounding the weights, against Transformers' float32 output
};
const Format kFormats[] = {
    {StorageFormat::kFp8Block, {DType::kF32, 128, 128}, ActivationScheme::kDynamic, 6e-2},
    {StorageFormat::kFp8Block, {DType::kF8E8M0, 128, 128}, ActivationScheme::kDynamic, 6e-2},
    {StorageFormat::kFp4, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone, 0.3}};

// [E, R, C] with the last two dimensions the other way round.
TensorView turned(const TensorView& t) {
  return {
      t.data(), t.dtype(), {t.dim(0), t.dim(2), t.dim(1)}, {t.stride(0), t.stride(2), t.stride(1)}};
}

// A fixture's experts, quantised by our own code; their format in `layout` may have other rows.
struct QuantizedFixture {
  QuantizedWeight up, down;
  std::shared_ptr<const ExpertsWeights> weights;
  ExpertsConfig config;

  QuantizedFixture(const Fixture& fixture, const Format& format) : config(fixture.config) {
    ScaleLayout layout = format.layout;
    if (!config.is_concatenated) layout.block_rows = 1;  // gate and up rows take turns
    const std::string name = config.has_gate ? "gate_up_proj" : "up_proj";
    const auto quantized = [&](const TensorView& t) {
      return quantize(config.is_transposed ? turned(t) : t, format.format, layout);
    };
    up = quantized(fixture.tensor(name));
    down = quantized(fixture.tensor("down_proj"));
    config.is_transposed = false;
    QuantizedFusedExperts fused{up.view(), down.view()};
    if (config.has_bias) {
      fused.gate_up_proj_bias = fixture.tensor(name + "_bias");
      fused.down_proj_bias = fixture.tensor("down_proj_bias");
    }
    weights =
        std::make_shared<ExpertsWeights>(make_experts_weights(config, fused, fixture.file.owner()));
  }
};

std::vector<std::filesystem::path> fixture_paths() {
  std::vector<std::filesystem::path> paths;
  for (const auto& entry : std::filesystem::directory_iterator(CADRE_TEST_DATA "/experts")) {
    if (entry.path().extension() == ".safetensors") paths.push_back(entry.path());
  }
  std::sort(paths.begin(), paths.end());
  return paths;
}

class Fixtures : public DeviceTest {};

TEST_F(Fixtures, AreAllThere) { EXPECT_EQ(fixture_paths().size(), 20u); }

TEST_F(Fixtures, TheReferenceAgreesWithTransformers) {
  for (const auto& path : fixture_paths()) {
    const Fixture fixture(path);
    const TensorView hidden = fixture.tensor("hidden_states");
    std::vector<double> out(static_cast<size_t>(hidden.numel()));
    reference_forward(fixture.config, *fixture.weights(),
                      fixture.tokens(converted(hidden, DType::kF32)), out.data());
    EXPECT_LE(relative_error(out, to_doubles(fixture.tensor("output"))), 1e-6) << path;
  }
}

TEST_F(Fixtures, EveryBackendAgreesWithTransformersInEveryComputeDtype) {
  for (const auto& path : fixture_paths()) {
    const Fixture fixture(path);
    const auto expected = to_doubles(fixture.tensor("output"));
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const Tensor hidden = converted(fixture.tensor("hidden_states"), dtype);
      const auto weights =
          fixture.weights(is_gpu_under_test() ? std::optional(dtype) : std::nullopt);
      ExpertsQuery query;
      query.config = fixture.config;
      query.compute_dtype = dtype;
      query.format = weights->format;
      for (const BackendEntry& entry : runnable_backends()) {
        RoutedTokens tokens = fixture.tokens(hidden);
        const Tensor output(dtype, hidden->shape());
        tokens.output = output;
        const auto out = run_backend(*entry.backend, query, weights, tokens, test_stream(1));
        EXPECT_LE(relative_error(out, expected), stated_bound(dtype, query.format))
            << path << " " << entry.name << " " << name_of(dtype);
      }
    }
  }
}

TEST_F(Fixtures, QuantisedByOurOwnCodeStayNearTransformers) {
  for (const auto& path : fixture_paths()) {
    const Fixture fixture(path);
    for (const Format& format : kFormats) {
      const QuantizedFixture quantized(fixture, format);
      const TensorView hidden = fixture.tensor("hidden_states");
      std::vector<double> out(static_cast<size_t>(hidden.numel()));
      reference_forward(quantized.config, *quantized.weights,
                        fixture.tokens(converted(hidden, DType::kF32)), out.data());
      EXPECT_LE(relative_error(out, to_doubles(fixture.tensor("output"))), format.cost)
          << path << " " << name_of(format.format) << " " << name_of(format.layout.dtype);
    }
  }
}

TEST_F(Fixtures, QuantisedByOurOwnCodeRunOnEveryBackendThatServesThem) {
  constexpr DType kDTypes[] = {DType::kBF16, DType::kF32, DType::kF16};
  size_t round = 0;
  for (const auto& path : fixture_paths()) {
    const Fixture fixture(path);
    for (const Format& format : kFormats) {
      const QuantizedFixture quantized(fixture, format);
      for (const DType dtype : {kDTypes[round++ % 4 % 3]}) {
        const Tensor hidden = converted(fixture.tensor("hidden_states"), dtype);
        RoutedTokens tokens = fixture.tokens(hidden);
        ExpertsQuery query;
        query.config = quantized.config;
        query.device = test_stream(1).device;
        query.compute_dtype = dtype;
        query.format = format.format;
        query.scale_layout = quantized.weights->scale_layout;
        query.activation_scheme = format.activations;
        std::vector<double> same(static_cast<size_t>(hidden->numel())), exact = same;
        reference_forward(query.config, *quantized.weights, tokens, same.data(),
                          format.activations);
        reference_forward(query.config, *quantized.weights, tokens, exact.data());
        for (const BackendEntry& entry : runnable_backends()) {
          if (!entry.backend->supports(query)) continue;
          const Tensor output(DType::kF32, hidden->shape());
          tokens.output = output;
          const auto out =
              run_backend(*entry.backend, query, quantized.weights, tokens, test_stream(1));
          SCOPED_TRACE(path.string() + " " + entry.name + " " + std::string(name_of(dtype)));
          EXPECT_LE(relative_error(out, same), entry.backend->emulation_bound(query, DType::kF32));
          EXPECT_LE(relative_error(out, exact), stated_bound(dtype, query.format));
        }
      }
    }
  }
}

}  // namespace
}  // namespace cadre::test

// grouped_mm and eager on a GPU with quantised weights against the float64 reference that rounds
// activations as they do: formats, blocks, sizes around the tiles of the Hopper kernels, gate
// functions, the same bits every time. tests/conformance has the rest of the grid.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <random>
#include <vector>

#include "cadre/experts.h"
#include "cadre/float16.h"
#include "cadre/quantization.h"
#include "core/str_cat.h"
#include "support/compare.h"
#include "support/gpu.h"

namespace cadre::cuda {

std::unique_ptr<ExpertsBackend> make_eager();
std::unique_ptr<ExpertsBackend> make_grouped_mm();

namespace {

using test::Gpu;

struct QuantizedCase {
  StorageFormat format = StorageFormat::kFp4;
  ScaleLayout layout = {DType::kF8E8M0, 1, 32};
  ActivationScheme activations = ActivationScheme::kNone;
  DType dtype = DType::kBF16;
  DType output = DType::kF32;
  int64_t tokens = 60;
  ExpertsConfig config = {
      .num_experts = 3, .hidden_size = 256, .intermediate_size = 192, .top_k = 2};
  bool nan_token = false;
  bool eager = false;
};

QuantizedCase fp8_case(ScaleLayout layout = {DType::kF32, 128, 128}) {
  QuantizedCase c;
  c.format = layout.block_rows == 0 ? StorageFormat::kFp8Tensor : StorageFormat::kFp8Block;
  c.layout = layout;
  c.activations = ActivationScheme::kDynamic;
  return c;
}

void set(const MutableTensorView& t, int64_t i, float value) {
  if (t.dtype() == DType::kF32) t.as<float>()[i] = value;
  if (t.dtype() == DType::kBF16) t.as<BFloat16>()[i] = BFloat16(value);
  if (t.dtype() == DType::kF16) t.as<Float16>()[i] = Float16(value);
}

class Layer {
 public:
  explicit Layer(const QuantizedCase& c) : c_(c) {
    const ExpertsConfig& f = c.config;
    const int64_t up = f.has_gate ? 2 * f.intermediate_size : f.intermediate_size;
    gate_up_ = make({f.num_experts, up, f.hidden_size});
    down_ = make({f.num_experts, f.hidden_size, f.intermediate_size});
    if (f.has_bias) {
      gate_up_bias_ = random(DType::kF32, {f.num_experts, up}, 0.5f);
      down_bias_ = random(DType::kF32, {f.num_experts, f.hidden_size}, 0.5f);
    }
    x_ = random(c.dtype, {c.tokens, f.hidden_size}, 1);
    if (c.nan_token) set(x_, 3 * f.hidden_size + 5, std::numeric_limits<float>::quiet_NaN());
    weights_ = random(DType::kF32, {c.tokens, f.top_k}, 1);
    ids_ = Tensor(DType::kI64, {c.tokens, f.top_k});
    for (int64_t i = 0; i < ids_->numel(); ++i) {
      // Some name no expert.
      ids_->as<int64_t>()[i] =
          static_cast<int64_t>(random_() % static_cast<uint64_t>(f.num_experts + 1)) -
          (random_() % 8 == 0 ? 1 : 0);
    }
  }

  /// Twice, launched and from a graph where the backend can.
  void check() {
    const Gpu gpu;
    const auto backend = c_.eager ? make_eager() : make_grouped_mm();
    ExpertsQuery query;
    query.config = c_.config;
    query.device = Gpu::device();
    query.compute_dtype = c_.dtype;
    query.format = c_.format;
    query.scale_layout = c_.layout;
    query.activation_scheme = c_.activations;
    const Support support = backend->supports(query);
    ASSERT_TRUE(support.ok()) << to_string(support);
    const std::vector<Tensor> on_gpu = upload(gpu);
    const auto prepared = backend->prepare(
        query, std::make_shared<ExpertsWeights>(
                   experts(on_gpu[0], on_gpu[1], on_gpu[2], on_gpu[3], on_gpu[4], on_gpu[5])));
    Workspace workspace(Gpu::device(), backend->workspace_bytes(query, c_.tokens, 1));
    const Tensor out(c_.output, {c_.tokens, c_.config.hidden_size}, Gpu::device());
    const RoutedTokens call{on_gpu[6], on_gpu[7], on_gpu[8], out};
    const auto poison = [&] {
      Gpu::runtime().fill(out->mutable_data(), 0xff, out->nbytes(), gpu.stream());
    };
    poison();
    backend->forward(*prepared, call, workspace, gpu.stream());
    const Tensor first = gpu.to_host(out);
    compare(first);
    std::unique_ptr<DeviceGraph> graph;
    if (backend->can_be_captured()) {
      graph = Gpu::runtime().capture(
          gpu.stream(), [&] { backend->forward(*prepared, call, workspace, gpu.stream()); });
    }
    for (int i = 0; i < 5; ++i) {
      poison();
      if (graph != nullptr) {
        graph->launch(gpu.stream());
      } else {
        backend->forward(*prepared, call, workspace, gpu.stream());
      }
      const Tensor again = gpu.to_host(out);
      ASSERT_EQ(std::memcmp(first->data(), again->data(), again->nbytes()), 0);
    }
  }

 private:
  Tensor random(DType dtype, const Dims& shape, float deviation) {
    Tensor t(dtype, shape);
    std::normal_distribution<float> normal(0, deviation);
    for (int64_t i = 0; i < t->numel(); ++i) set(t, i, normal(random_));
    return t;
  }
  QuantizedWeight make(const Dims& shape) {
    return quantize(random(DType::kF32, shape, 1.5f / std::sqrt(static_cast<float>(shape[2]))),
                    c_.format, c_.layout);
  }
  std::vector<Tensor> upload(const Gpu& gpu) const {
    std::vector<Tensor> result;
    for (const Tensor* t : {&gate_up_.values, &gate_up_.scales, &down_.values, &down_.scales,
                            &gate_up_bias_, &down_bias_, &x_, &ids_, &weights_}) {
      result.push_back(*t ? gpu.to_device(*t) : Tensor());
    }
    return result;
  }
  ExpertsWeights experts(const TensorView& gate_up, const TensorView& gate_up_scales,
                         const TensorView& down, const TensorView& down_scales,
                         const TensorView& gate_up_bias, const TensorView& down_bias) const {
    QuantizedFusedExperts fused;
    fused.gate_up_proj = {c_.format, c_.layout, gate_up, gate_up_scales};
    fused.down_proj = {c_.format, c_.layout, down, down_scales};
    fused.gate_up_proj_bias = gate_up_bias;
    fused.down_proj_bias = down_bias;
    std::vector<float> input_scales(static_cast<size_t>(c_.config.num_experts), 0.011f);
    if (c_.activations == ActivationScheme::kStatic) {
      fused.gate_up_input_scales = fused.down_input_scales = input_scales;
    }
    return make_experts_weights(c_.config, fused);
  }
  double bound() const {
    if (c_.activations == ActivationScheme::kNone) {
      return stated_bound(c_.dtype, *plain_format(c_.dtype));
    }
    return c_.output == DType::kBF16 ? 3e-3 : 1e-3;
  }
  void compare(const Tensor& out) const {
    std::vector<double> truth(static_cast<size_t>(out->numel()));
    const auto view = [](const Tensor& t) { return t ? TensorView(t.view()) : TensorView(); };
    reference_forward(c_.config,
                      experts(gate_up_.values, gate_up_.scales, down_.values, down_.scales,
                              view(gate_up_bias_), view(down_bias_)),
                      {x_, ids_, weights_, {}}, truth.data(), c_.activations);
    std::vector<double> values = test::to_doubles(out);
    for (size_t i = 0; i < values.size(); ++i) {
      if (!std::isnan(truth[i])) continue;
      EXPECT_TRUE(std::isnan(values[i])) << i;
      values[i] = truth[i] = 0;
    }
    EXPECT_LE(test::relative_error(values, truth), bound());
  }

  QuantizedCase c_;
  std::mt19937 random_{17};
  QuantizedWeight gate_up_;
  QuantizedWeight down_;
  Tensor gate_up_bias_;
  Tensor down_bias_;
  Tensor x_;
  Tensor ids_;
  Tensor weights_;
};

void check(const QuantizedCase& c) { Layer(c).check(); }

// Experts with so many rows that each height of tile has its turn, and sizes beside the tiles.
TEST(QuantizedExperts, EverySizeOfTile) {
  CADRE_REQUIRE_GPU();
  QuantizedCase mxfp8;
  mxfp8.format = StorageFormat::kMxFp8;
  for (const QuantizedCase& format : {QuantizedCase(), mxfp8, fp8_case()}) {
    for (const int64_t tokens : {1, 20, 60, 200}) {
      for (const auto& [hidden, intermediate] :
           {std::pair<int64_t, int64_t>{256, 192}, {64, 64}, {320, 128}, {128, 576}, {96, 160}}) {
        SCOPED_TRACE(str_cat(name_of(format.format), " ", tokens, " ", hidden, " ", intermediate));
        QuantizedCase c = format;
        c.tokens = tokens;
        c.config.hidden_size = hidden;
        c.config.intermediate_size = intermediate;
        c.output = tokens == 60 ? DType::kBF16 : DType::kF32;
        check(c);
      }
    }
  }
}

TEST(QuantizedExperts, EveryGateFunction) {
  CADRE_REQUIRE_GPU();
  for (const bool is_fp8 : {false, true}) {
    QuantizedCase c = is_fp8 ? fp8_case() : QuantizedCase();
    c.config.has_bias = true;
    c.config.activation = Activation::kGelu;
    check(c);
    c.config.has_gate = false;
    check(c);
    c.config.has_bias = false;
    check(c);
    c.config.has_gate = c.config.has_bias = true;
    c.config.swiglu_limit = 0.9f;
    c.config.swiglu_alpha = 1.702f;
    c.config.is_concatenated = is_fp8;  // GPT-OSS: rows of gate and up in turn
    check(c);
  }
}

TEST(QuantizedExperts, EveryFormatOnBothBackends) {
  CADRE_REQUIRE_GPU();
  for (const bool eager : {false, true}) {
    for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
      for (QuantizedCase c :
           {fp8_case(), fp8_case({DType::kF8E8M0, 128, 128}), fp8_case({DType::kF32, 96, 96}),
            fp8_case({DType::kF32, 0, 0}), QuantizedCase()}) {
        SCOPED_TRACE(str_cat(name_of(c.format), " ", c.layout.block_rows, " ", name_of(dtype),
                             eager ? " eager" : ""));
        c.eager = eager;
        c.dtype = dtype;
        c.config.hidden_size = 192;
        check(c);
        c.output = dtype;
        c.activations = ActivationScheme::kNone;
        check(c);
      }
    }
  }
}

TEST(QuantizedExperts, StaticScalesAreServedByEagerAlone) {
  CADRE_REQUIRE_GPU();
  QuantizedCase c = fp8_case();
  c.activations = ActivationScheme::kStatic;
  c.eager = true;
  check(c);
  ExpertsQuery query;
  query.config = c.config;
  query.device = Gpu::device();
  query.format = c.format;
  query.scale_layout = c.layout;
  query.activation_scheme = c.activations;
  const Support support = make_grouped_mm()->supports(query);
  EXPECT_FALSE(support.ok());
  EXPECT_NE(to_string(support).find("eager"), std::string::npos) << to_string(support);
}

TEST(QuantizedExperts, KeepNanToItsToken) {
  CADRE_REQUIRE_GPU();
  for (QuantizedCase c : {fp8_case(), QuantizedCase()}) {
    for (const int64_t tokens : {20, 200}) {
      c.nan_token = true;
      c.tokens = tokens;
      check(c);
    }
  }
}

}  // namespace
}  // namespace cadre::cuda

// eager on a GPU against the float64 reference: every layout flag, gate function, dtype and kind of
// routing, also where a call runs in chunks.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "cadre/float16.h"
#include "core/str_cat.h"
#include "support/compare.h"
#include "support/gpu.h"

namespace cadre::cuda {

std::unique_ptr<ExpertsBackend> make_eager();

namespace {

using test::Gpu;

void set(const MutableTensorView& tensor, int64_t i, float value) {
  if (tensor.dtype() == DType::kBF16) {
    tensor.as<BFloat16>()[i] = BFloat16(value);
  } else if (tensor.dtype() == DType::kF16) {
    tensor.as<Float16>()[i] = Float16(value);
  } else {
    tensor.as<float>()[i] = value;
  }
}

struct Case {
  ExpertsConfig config = {.num_experts = 7, .hidden_size = 72, .intermediate_size = 40, .top_k = 3};
  DType dtype = DType::kBF16;
  DType output = DType::kF32;
  DType ids = DType::kI64;
  int64_t num_tokens = 23;
  bool invalid_ids = false;
};

/// A layer and a call on both sides.
class Layer {
 public:
  explicit Layer(const Case& c) : case_(c), random_(11) {
    const ExpertsConfig& f = c.config;
    const int64_t e = f.num_experts;
    const int64_t up = f.has_gate ? 2 * f.intermediate_size : f.intermediate_size;
    const auto shape = [&](int64_t n, int64_t k) {
      return f.is_transposed ? Dims{e, k, n} : Dims{e, n, k};
    };
    host_.gate_up_proj = make(c.dtype, shape(up, f.hidden_size), 0.3f);
    host_.down_proj = make(c.dtype, shape(f.hidden_size, f.intermediate_size), 0.3f);
    if (f.has_bias) {
      host_.gate_up_proj_bias = make(DType::kF32, {e, up}, 1);
      host_.down_proj_bias = make(DType::kF32, {e, f.hidden_size}, 1);
    }
    hidden_ = Tensor(c.dtype, {c.num_tokens, f.hidden_size});
    fill(hidden_, 1);
    weights_ = Tensor(DType::kF32, {c.num_tokens, f.top_k});
    fill(weights_, 1);
    make_ids();
  }

  ExpertsQuery query() const {
    ExpertsQuery q;
    q.config = case_.config;
    q.device = Gpu::device();
    q.compute_dtype = case_.dtype;
    q.format = *plain_format(case_.dtype);
    return q;
  }

  std::vector<double> reference() const {
    std::vector<double> out(static_cast<size_t>(case_.num_tokens * case_.config.hidden_size));
    const ExpertsWeights weights = make_experts_weights(case_.config, host_);
    reference_forward(case_.config, weights, {hidden_, ids_, weights_, {}}, out.data());
    return out;
  }

  Tensor run(const Gpu& gpu) {
    if (!prepared_) prepare(gpu);
    out_ = Tensor(case_.output, {case_.num_tokens, case_.config.hidden_size}, Gpu::device());
    Gpu::runtime().fill(out_->mutable_data(), 0xff, out_->nbytes(), gpu.stream());  // NaN
    forward(gpu);
    return gpu.to_host(out_);
  }
  /// Into the output of the run before.
  void forward(const Gpu& gpu) {
    backend_->forward(*prepared_, {on_gpu_[4], on_gpu_[5], on_gpu_[6], out_}, *workspace_,
                      gpu.stream());
  }

 private:
  TensorView make(DType dtype, const Dims& shape, float deviation) {
    tensors_.emplace_back(dtype, shape);
    fill(tensors_.back(), deviation);
    return tensors_.back();
  }
  void fill(const MutableTensorView& tensor, float deviation) {
    std::normal_distribution<float> normal(0, deviation);
    for (int64_t i = 0; i < tensor.numel(); ++i) set(tensor, i, normal(random_));
  }
  void make_ids() {
    ids_ = Tensor(case_.ids, {case_.num_tokens, case_.config.top_k});
    const auto num_experts = static_cast<int>(case_.config.num_experts);
    for (int64_t i = 0; i < ids_->numel(); ++i) {
      int64_t id = static_cast<int64_t>(random_() % static_cast<unsigned>(num_experts - 1));
      if (case_.invalid_ids && i % 3 == 0) {
        id = i % 2 == 0 ? -1 : num_experts + i % 5;
        weights_->as<float>()[i] = std::numeric_limits<float>::quiet_NaN();
      }
      if (case_.ids == DType::kI64) {
        ids_->as<int64_t>()[i] = id;
      } else {
        ids_->as<int32_t>()[i] = static_cast<int32_t>(id);
      }
    }
  }
  void prepare(const Gpu& gpu) {
    FusedExperts fused;
    const TensorView* from[] = {&host_.gate_up_proj, &host_.down_proj, &host_.gate_up_proj_bias,
                                &host_.down_proj_bias};
    TensorView* to[] = {&fused.gate_up_proj, &fused.down_proj, &fused.gate_up_proj_bias,
                        &fused.down_proj_bias};
    on_gpu_.resize(7);
    for (size_t i = 0; i < 4; ++i) {
      if (!*from[i]) continue;
      on_gpu_[i] = gpu.to_device(*from[i]);
      *to[i] = on_gpu_[i];
    }
    on_gpu_[4] = gpu.to_device(hidden_);
    on_gpu_[5] = gpu.to_device(ids_);
    on_gpu_[6] = gpu.to_device(weights_);
    const auto weights =
        std::make_shared<const ExpertsWeights>(make_experts_weights(case_.config, fused));
    const Support support = backend_->supports(query());
    ASSERT_TRUE(support.ok()) << to_string(support);
    prepared_ = backend_->prepare(query(), weights);
    workspace_ = std::make_unique<Workspace>(
        Gpu::device(), backend_->workspace_bytes(query(), case_.num_tokens, 1));
  }

  Case case_;
  std::mt19937 random_;
  std::vector<Tensor> tensors_;
  FusedExperts host_;
  Tensor hidden_;
  Tensor ids_;
  Tensor weights_;
  std::unique_ptr<ExpertsBackend> backend_ = make_eager();
  std::vector<Tensor> on_gpu_;
  Tensor out_;
  std::unique_ptr<PreparedExperts> prepared_;
  std::unique_ptr<Workspace> workspace_;
};

void check(const Case& c, const std::string& what) {
  const Gpu gpu;
  Layer layer(c);
  const Tensor out = layer.run(gpu);
  const double bound = stated_bound(c.dtype, *plain_format(c.dtype));
  EXPECT_LE(test::relative_error(test::to_doubles(out), layer.reference()), bound) << what;
  const Tensor again = layer.run(gpu);
  EXPECT_EQ(std::memcmp(out->data(), again->data(), out->nbytes()), 0) << what;
}

TEST(CudaEager, EveryFlagInEveryDtype) {
  CADRE_REQUIRE_GPU();
  for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (int flags = 0; flags < 16; ++flags) {
      Case c;
      c.dtype = dtype;
      c.config.has_gate = (flags & 1) != 0;
      c.config.has_bias = (flags & 2) != 0;
      c.config.is_transposed = (flags & 4) != 0;
      c.config.is_concatenated = (flags & 8) != 0;
      c.output = flags % 3 == 0 ? dtype : DType::kF32;
      c.ids = flags % 2 == 0 ? DType::kI32 : DType::kI64;
      check(c, str_cat(name_of(dtype), " flags ", flags));
    }
  }
}

TEST(CudaEager, EveryGateFunction) {
  CADRE_REQUIRE_GPU();
  for (const Activation activation : {Activation::kSilu, Activation::kGelu, Activation::kGeluTanh,
                                      Activation::kRelu, Activation::kRelu2}) {
    Case c;
    c.config.activation = activation;
    check(c, str_cat("activation ", static_cast<int>(activation)));
    c.config.has_gate = false;
    check(c, str_cat("activation without gate ", static_cast<int>(activation)));
  }
  Case c;
  c.config.swiglu_limit = 0.5f;
  check(c, "limit");
  c.config.swiglu_alpha = 1.702f;
  check(c, "limit and alpha");
  c.config.swiglu_limit.reset();
  check(c, "alpha");
}

TEST(CudaEager, IdsOutsideAreNoExpertsAndOddSizesServe) {
  CADRE_REQUIRE_GPU();
  Case c;
  c.invalid_ids = true;
  check(c, "invalid ids");
  c.num_tokens = 1;
  check(c, "one token");
  for (const int64_t size : {1, 5, 33}) {
    c.num_tokens = 9;
    c.config.hidden_size = size;
    c.config.intermediate_size = size + 2;
    check(c, str_cat("size ", size));
  }
}

TEST(CudaEager, NoTokensNoWork) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  Case c;
  c.num_tokens = 0;
  Layer layer(c);
  EXPECT_EQ(layer.run(gpu)->numel(), 0);
}

// 256 MiB of results are one chunk; 4096 rows of an expert one product.
TEST(CudaEager, LargeCallsRunInChunks) {
  CADRE_REQUIRE_GPU();
  Case c;
  c.config = {.num_experts = 2, .hidden_size = 8192, .intermediate_size = 1, .top_k = 2};
  c.num_tokens = 4200;
  check(c, "chunks");
}

TEST(CudaEager, CannotBeRecordedAndSaysSo) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  EXPECT_FALSE(make_eager()->can_be_captured());
  Layer layer(Case{});
  layer.run(gpu);
  try {
    Gpu::runtime().capture(gpu.stream(), [&] { layer.forward(gpu); });
    FAIL();
  } catch (const Unsupported& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("graph"), message.npos) << message;
    EXPECT_NE(message.find("--no-graph"), message.npos) << message;
  }
  EXPECT_NO_THROW(layer.run(gpu));
}

}  // namespace
}  // namespace cadre::cuda

// A layer of experts and a call with random O(1) values, on the host for the reference and on the
// GPU for the backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cadre/experts.h"
#include "cadre/float16.h"
#include "core/device_runtime.h"
#include "experts/relative_error.h"

namespace cadre::cuda {
std::unique_ptr<ExpertsBackend> make_grouped_mm();

namespace test {

inline constexpr Device kDevice = {DeviceType::kCuda, 0};

enum class Ids { kRandom, kOneExpert, kLastExpert, kEverySecond, kRepeated, kSentinels, kNone };

struct Case {
  int64_t tokens = 40;
  ExpertsConfig config = {
      .num_experts = 6, .hidden_size = 192, .intermediate_size = 136, .top_k = 2};
  DType dtype = DType::kBF16;
  DType weights_dtype = DType::kF32;
  DType id_dtype = DType::kI64;
  bool output_f32 = false;
  Ids ids = Ids::kRandom;
  int64_t row_gap = 0;  // elements between rows of the hidden states
};

// Memory on the host with a copy on the device.
class Both {
 public:
  Both(DType dtype, const Dims& shape)
      : host_(dtype, shape), device_(allocate_shared_memory(kDevice, bytes(host_.view()))) {}

  const MutableTensorView& host() const { return host_.view(); }
  MutableTensorView device() const {
    return {device_.get(), host().dtype(), host().shape(), kDevice};
  }
  void upload(const Stream& stream) const { copy(device_.get(), host().data(), stream); }
  void download(const Stream& stream) const { copy(host().mutable_data(), device_.get(), stream); }

 private:
  static size_t bytes(const TensorView& t) { return std::max<size_t>(16, t.nbytes()); }
  void copy(void* to, const void* from, const Stream& stream) const {
    device_runtime(kDevice).copy(to, from, host().nbytes(), stream);
    synchronize(stream);
  }

  Tensor host_;
  std::shared_ptr<void> device_;
};

inline void set(const MutableTensorView& t, int64_t i, float value) {
  if (t.dtype() == DType::kF32) t.as<float>()[i] = value;
  if (t.dtype() == DType::kBF16) t.as<BFloat16>()[i] = BFloat16(value);
  if (t.dtype() == DType::kF16) t.as<Float16>()[i] = Float16(value);
}

class Experts {
 public:
  Experts(const Case& c, const Stream& stream)
      : c_(c),
        stream_(stream),
        gate_up_(c.dtype, weight_shape(rows_of_up(), c.config.hidden_size)),
        down_(c.dtype, weight_shape(c.config.hidden_size, c.config.intermediate_size)),
        gate_up_bias_(DType::kF32, {c.config.num_experts, rows_of_up()}),
        down_bias_(DType::kF32, {c.config.num_experts, c.config.hidden_size}),
        x_(c.dtype, {c.tokens, c.config.hidden_size + c.row_gap}),
        ids_(c.id_dtype, {c.tokens, c.config.top_k}),
        routing_(c.weights_dtype, {c.tokens, c.config.top_k}),
        out_(c.output_f32 ? DType::kF32 : c.dtype, {c.tokens, c.config.hidden_size}) {
    fill(gate_up_, 1.5f / std::sqrt(static_cast<float>(c.config.hidden_size)));
    fill(down_, 1.5f / std::sqrt(static_cast<float>(c.config.intermediate_size)));
    fill(gate_up_bias_, 0.5f);
    fill(down_bias_, 0.5f);
    fill(x_, 1.0f);
    draw_ids();
    backend_ = make_grouped_mm();
    query_.config = c.config;
    query_.device = kDevice;
    query_.compute_dtype = c.dtype;
    query_.format = plain_format(c.dtype).value();
  }

  void prepare() {
    for (const Both* b : {&gate_up_, &down_, &gate_up_bias_, &down_bias_}) b->upload(stream_);
    prepared_ = backend_->prepare(query_, weights(true));
    workspace_ =
        std::make_unique<Workspace>(kDevice, backend_->workspace_bytes(query_, c_.tokens, 1));
    device_runtime(kDevice).fill(workspace_->allocate(0), 0xff, workspace_->capacity(), stream_);
  }

  void upload_call() {
    for (const Both* b : {&x_, &ids_, &routing_}) b->upload(stream_);
    poison();
  }

  void poison() {
    if (c_.tokens == 0) return;
    device_runtime(kDevice).fill(out_.device().mutable_data(), 0xff, out_.host().nbytes(), stream_);
  }

  void forward() { backend_->forward(*prepared_, tokens(true), *workspace_, stream_); }
  void forward(int64_t first, int64_t last) {
    backend_->forward(*prepared_, slice(tokens(true), first, last), *workspace_, stream_);
  }

  std::vector<char> result() const {
    out_.download(stream_);
    const char* data = static_cast<const char*>(out_.host().data());
    return {data, data + out_.host().nbytes()};
  }

  double error() const { return error(0, c_.tokens); }
  double error(int64_t first, int64_t last) const {
    std::vector<double> truth(static_cast<size_t>((last - first) * c_.config.hidden_size));
    const RoutedTokens part = slice(tokens(false), first, last);
    reference_forward(c_.config, *weights(false), part, truth.data());
    out_.download(stream_);
    return relative_error(part.output, truth);
  }

  double run() {
    prepare();
    upload_call();
    forward();
    return error();
  }

  void draw_ids() {
    const int64_t k = c_.config.top_k;
    for (int64_t t = 0; t < c_.tokens; ++t) {
      for (int64_t s = 0; s < k; ++s) {
        set_id(t * k + s, draw_id(t, s));
        set(routing_.host(), t * k + s, 0.2f + 0.8f * uniform());
      }
    }
  }

  const Both& gate_up() const { return gate_up_; }
  const Both& x() const { return x_; }
  const Both& out() const { return out_; }
  int64_t id(int64_t pair) const {
    return c_.id_dtype == DType::kI64 ? ids_.host().as<int64_t>()[pair]
                                      : ids_.host().as<int32_t>()[pair];
  }
  double bound() const { return stated_bound(c_.dtype, query_.format); }

 private:
  int64_t rows_of_up() const { return c_.config.intermediate_size * (c_.config.has_gate ? 2 : 1); }
  Dims weight_shape(int64_t rows, int64_t columns) const {
    if (c_.config.is_transposed) std::swap(rows, columns);
    return {c_.config.num_experts, rows, columns};
  }
  float uniform() { return static_cast<float>(random_() >> 8) * 0x1p-24f; }
  void fill(const Both& b, float deviation) {
    for (int64_t i = 0; i < b.host().numel(); ++i) {
      set(b.host(), i, (uniform() - 0.5f) * 3.4641f * deviation);
    }
  }

  int64_t draw_id(int64_t token, int64_t slot) {
    const int64_t e = c_.config.num_experts;
    const int64_t distinct = (static_cast<int64_t>(random_()) + slot) % e;
    switch (c_.ids) {
      case Ids::kOneExpert:
        return 0;
      case Ids::kLastExpert:
        return e - 1;
      case Ids::kEverySecond:
        return distinct / 2 * 2;
      case Ids::kRepeated:
        return (token * 7) % e;
      case Ids::kSentinels:
        return random_() % 3 != 0
                   ? distinct
                   : (random_() % 2 != 0 ? -1 : e + static_cast<int64_t>(random_() % 3));
      case Ids::kNone:
        return -1;
      default:
        return distinct;
    }
  }
  void set_id(int64_t pair, int64_t id) {
    if (c_.id_dtype == DType::kI64) {
      ids_.host().as<int64_t>()[pair] = id;
    } else {
      ids_.host().as<int32_t>()[pair] = static_cast<int32_t>(id);
    }
  }

  static RoutedTokens slice(const RoutedTokens& all, int64_t first, int64_t last) {
    return {all.hidden_states.slice(first, last), all.top_k_index.slice(first, last),
            all.top_k_weights.slice(first, last), all.output.slice(first, last)};
  }
  static TensorView side(const Both& b, bool on_device) {
    return on_device ? TensorView(b.device()) : TensorView(b.host());
  }
  std::shared_ptr<const ExpertsWeights> weights(bool on_device) const {
    FusedExperts fused;
    fused.gate_up_proj = side(gate_up_, on_device);
    fused.down_proj = side(down_, on_device);
    if (c_.config.has_bias) {
      fused.gate_up_proj_bias = side(gate_up_bias_, on_device);
      fused.down_proj_bias = side(down_bias_, on_device);
    }
    return std::make_shared<ExpertsWeights>(make_experts_weights(c_.config, fused));
  }
  RoutedTokens tokens(bool on_device) const {
    RoutedTokens result;
    const TensorView x = side(x_, on_device);
    result.hidden_states = TensorView(x.data(), x.dtype(), {c_.tokens, c_.config.hidden_size},
                                      x.strides(), x.device());
    result.top_k_index = side(ids_, on_device);
    result.top_k_weights = side(routing_, on_device);
    result.output = on_device ? out_.device() : out_.host();
    return result;
  }

  Case c_;
  const Stream& stream_;
  std::mt19937 random_{7};
  Both gate_up_, down_, gate_up_bias_, down_bias_, x_, ids_, routing_, out_;
  std::unique_ptr<ExpertsBackend> backend_;
  ExpertsQuery query_;
  std::unique_ptr<PreparedExperts> prepared_;
  std::unique_ptr<Workspace> workspace_;
};

}  // namespace test
}  // namespace cadre::cuda

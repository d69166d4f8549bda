// A layer of FP8 experts and a call with random O(1) values, on the host for the reference and on
// the GPU for the backend.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <random>
#include <utility>
#include <vector>

#include "cadre/experts.h"
#include "cadre/float16.h"
#include "core/device_runtime.h"
#include "experts/relative_error.h"
#include "quant/float8.h"

namespace cadre::cuda {
std::unique_ptr<ExpertsBackend> make_deepgemm();

namespace test {

inline constexpr Device kDevice = {DeviceType::kCuda, 0};

enum class Ids { kRandom, kOneExpert, kLastExpert, kEverySecond, kRepeated, kSentinels, kNone };

struct Case {
  int64_t tokens = 40;
  ExpertsConfig config = {
      .num_experts = 6, .hidden_size = 192, .intermediate_size = 144, .top_k = 2};
  DType dtype = DType::kBF16;
  DType weights_dtype = DType::kF32;
  DType id_dtype = DType::kI64;
  bool output_f32 = false;
  Ids ids = Ids::kRandom;
  int64_t row_gap = 0;  // elements between rows of the hidden states
  ScaleLayout scales = {DType::kF32, 128, 128};
  bool fused = false;  // gate and up share blocks of scales where I is no multiple of a block
  // Values over the whole range. Otherwise, times a factor, a few powers of two, whose sums of 128
  // of K are exact also where tensor cores add with few bits.
  bool full_range = false;
  int64_t weight_gap = 0;    // bytes between rows of weights
  int64_t weight_shift = 0;  // bytes that weights lie beyond a multiple of 256
};

// Memory on the host with a copy on the device.
class Both {
 public:
  explicit Both(size_t bytes)
      : host_(bytes), device_(allocate_shared_memory(kDevice, std::max<size_t>(16, bytes))) {}

  template <typename T>
  T* host() {
    return reinterpret_cast<T*>(host_.data());
  }
  char* at(bool on_device) { return on_device ? static_cast<char*>(device_.get()) : host_.data(); }
  size_t size() const { return host_.size(); }
  void upload(const Stream& stream) { copy(device_.get(), host_.data(), stream); }
  void download(const Stream& stream) { copy(host_.data(), device_.get(), stream); }
  void poison(const Stream& stream) {
    if (!host_.empty()) device_runtime(kDevice).fill(device_.get(), 0xff, host_.size(), stream);
  }

 private:
  void copy(void* to, const void* from, const Stream& stream) const {
    if (host_.empty()) return;
    device_runtime(kDevice).copy(to, from, host_.size(), stream);
    synchronize(stream);
  }

  std::vector<char> host_;
  std::shared_ptr<void> device_;
};

inline void set(void* data, DType dtype, int64_t i, float value) {
  if (dtype == DType::kF32) static_cast<float*>(data)[i] = value;
  if (dtype == DType::kBF16) static_cast<BFloat16*>(data)[i] = BFloat16(value);
  if (dtype == DType::kF16) static_cast<Float16*>(data)[i] = Float16(value);
}

inline int64_t blocks_of(int64_t n, int64_t block) {
  return block == 0 ? 1 : (n + block - 1) / block;
}

// One projection of all experts: codes [E, rows, k] and scales [E, blocks, blocks].
struct Projection {
  Projection(const Case& c, int64_t row_count, int64_t k_count)
      : rows(row_count),
        k(k_count),
        row_stride(k_count + c.weight_gap),
        scale_rows(blocks_of(row_count, c.scales.block_rows)),
        scale_columns(blocks_of(k_count, c.scales.block_cols)),
        codes(static_cast<size_t>(c.config.num_experts * row_count * row_stride + c.weight_shift)),
        scales(static_cast<size_t>(c.config.num_experts * scale_rows * scale_columns) *
               size_of(c.scales.dtype)) {}

  int64_t rows, k, row_stride, scale_rows, scale_columns;
  Both codes, scales;
};

class Experts {
 public:
  Experts(const Case& c, const Stream& stream)
      : c_(c),
        stream_(stream),
        first_(c, c.fused ? 2 * c.config.intermediate_size : c.config.intermediate_size,
               c.config.hidden_size),
        up_(c, c.config.intermediate_size, c.config.hidden_size),
        down_(c, c.config.hidden_size, c.config.intermediate_size),
        biases_(static_cast<size_t>(c.config.num_experts * num_biases()) * 4),
        x_(static_cast<size_t>(c.tokens * x_stride()) * size_of(c.dtype)),
        ids_(static_cast<size_t>(c.tokens * c.config.top_k) * size_of(c.id_dtype)),
        routing_(static_cast<size_t>(c.tokens * c.config.top_k) * size_of(c.weights_dtype)),
        out_(static_cast<size_t>(c.tokens * c.config.hidden_size) * size_of(output_dtype())) {
    for (Projection* p : {&first_, &up_, &down_}) fill(*p);
    for (size_t i = 0; i < biases_.size() / 4; ++i) biases_.host<float>()[i] = uniform() - 0.5f;
    fill_tokens();
    draw_ids();
    backend_ = make_deepgemm();
    query_.config = c.config;
    query_.device = kDevice;
    query_.compute_dtype = c.dtype;
    query_.format = c.scales.block_rows == 0 ? StorageFormat::kFp8Tensor : StorageFormat::kFp8Block;
    query_.scale_layout = c.scales;
    query_.activation_scheme = ActivationScheme::kDynamic;
  }

  void prepare() {
    for (Projection* p : {&first_, &up_, &down_}) {
      p->codes.upload(stream_);
      p->scales.upload(stream_);
    }
    biases_.upload(stream_);
    prepared_ = backend_->prepare(query_, weights(true));
    workspace_ =
        std::make_unique<Workspace>(kDevice, backend_->workspace_bytes(query_, c_.tokens, 1));
    device_runtime(kDevice).fill(workspace_->allocate(0), 0xff, workspace_->capacity(), stream_);
  }

  void upload_call() {
    for (Both* b : {&x_, &ids_, &routing_}) b->upload(stream_);
    out_.poison(stream_);
  }

  void poison() { out_.poison(stream_); }
  void forward() { backend_->forward(*prepared_, tokens(true), *workspace_, stream_); }
  void forward(int64_t first, int64_t last) {
    backend_->forward(*prepared_, part(tokens(true), first, last), *workspace_, stream_);
  }

  std::vector<char> result() {
    out_.download(stream_);
    return {out_.at(false), out_.at(false) + out_.size()};
  }

  /// Of at most `most` tokens, spread over all.
  double error(int64_t most = 48) {
    out_.download(stream_);
    const int64_t count = std::min(most, c_.tokens), h = c_.config.hidden_size;
    const std::shared_ptr<const ExpertsWeights> host = weights(false);
    double difference = 0, norm = 0;
    std::vector<double> truth(static_cast<size_t>(h));
    for (int64_t i = 0; i < count; ++i) {
      const int64_t t = i * c_.tokens / count;
      const RoutedTokens one = part(tokens(false), t, t + 1);
      reference_forward(c_.config, *host, one, truth.data(), ActivationScheme::kDynamic);
      for (int64_t n = 0; n < h; ++n) {
        const double want = truth[static_cast<size_t>(n)];
        const double got = value(t * h + n);
        if (std::isnan(got)) return got;
        difference += (got - want) * (got - want);
        norm += want * want;
      }
    }
    return norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
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
        set(routing_.at(false), c_.weights_dtype, t * k + s, 0.2f + 0.8f * uniform());
      }
    }
  }

  Projection& first() { return first_; }
  void set_x(int64_t token, int64_t i, float v) {
    set(x_.at(false), c_.dtype, token * x_stride() + i, v);
  }
  double value(int64_t i) {
    if (output_dtype() == DType::kF32) return out_.host<float>()[i];
    if (output_dtype() == DType::kBF16) return static_cast<float>(out_.host<BFloat16>()[i]);
    return static_cast<float>(out_.host<Float16>()[i]);
  }
  int64_t id(int64_t pair) {
    return c_.id_dtype == DType::kI64 ? ids_.host<int64_t>()[pair] : ids_.host<int32_t>()[pair];
  }
  /// Against the float64 emulation: what sums in float32 and rounding of the output may cost. With
  /// values over the whole range Hopper's e4m3 products are added with about 13 bits within each
  /// 128 of K, and a value of h beside the middle between two codes takes the other one.
  double bound() const {
    if (c_.full_range) return 1e-2;
    if (output_dtype() == DType::kF32) return 1e-3;
    return output_dtype() == DType::kBF16 ? 3e-3 : 1.5e-3;
  }

 private:
  DType output_dtype() const { return c_.output_f32 ? DType::kF32 : c_.dtype; }
  int64_t x_stride() const { return c_.config.hidden_size + c_.row_gap; }
  int64_t num_biases() const { return 2 * c_.config.intermediate_size + c_.config.hidden_size; }
  float uniform() { return static_cast<float>(random_() >> 8) * 0x1p-24f; }

  // 0, 1, 2 and their negatives: deviation 1.41.
  float coarse() { return static_cast<float>(static_cast<int>(random_() % 5) - 2); }

  // Coarse values have a factor of their own in each group of 128: with one scale for all, sums lie
  // on a lattice and values of h exactly between two codes.
  void fill_tokens() {
    float factor = 1;
    for (int64_t i = 0; i < c_.tokens * x_stride(); ++i) {
      if (i % x_stride() % 128 == 0) factor = 1 + static_cast<float>(random_() % 8) / 8;
      const float value = c_.full_range ? (uniform() - 0.5f) * 3.4641f : coarse() / 2 * factor;
      set(x_.at(false), c_.dtype, i, value);
    }
  }

  // Weights of deviation 1.5 / sqrt(k) and a factor of up to two in each block.
  void fill(Projection& p) {
    const float deviation = c_.full_range ? 259.0f : 1.41f;
    const float unit = 1.5f / std::sqrt(static_cast<float>(p.k)) / deviation;
    for (size_t i = 0; i < p.codes.size(); ++i) {
      p.codes.host<uint8_t>()[i] =
          float_to_e4m3(c_.full_range ? (uniform() - 0.5f) * 896.0f : coarse());
    }
    const int64_t count = c_.config.num_experts * p.scale_rows * p.scale_columns;
    for (int64_t i = 0; i < count; ++i) {
      const float scale = unit * std::exp2(2 * uniform() - 1);
      if (c_.scales.dtype == DType::kF32) {
        p.scales.host<float>()[i] = scale;
      } else {
        p.scales.host<uint8_t>()[i] = static_cast<uint8_t>(127 + std::lround(std::log2(scale)));
      }
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
      ids_.host<int64_t>()[pair] = id;
    } else {
      ids_.host<int32_t>()[pair] = static_cast<int32_t>(id);
    }
  }

  // Rows [row, ...) of a projection's expert.
  ExpertMatrix matrix(Projection& p, int64_t expert, int64_t row, bool on_device) const {
    const int64_t block = c_.scales.block_rows;
    const int64_t scale_row = block == 0 ? 0 : row / block;
    ExpertMatrix m;
    m.data = p.codes.at(on_device) + c_.weight_shift + (expert * p.rows + row) * p.row_stride;
    m.row_stride = p.row_stride;
    m.scales = p.scales.at(on_device) + (expert * p.scale_rows + scale_row) * p.scale_columns *
                                            static_cast<int64_t>(size_of(c_.scales.dtype));
    m.scale_row_stride = p.scale_columns;
    m.scale_row_offset = block == 0 ? 0 : row % block;
    return m;
  }

  std::shared_ptr<const ExpertsWeights> weights(bool on_device) {
    auto w = std::make_shared<ExpertsWeights>();
    w->device = on_device ? kDevice : Device{};
    w->format = query_.format;
    w->scale_layout = c_.scales;
    const int64_t inner = c_.config.intermediate_size;
    for (int64_t e = 0; e < c_.config.num_experts; ++e) {
      if (c_.config.has_gate) w->gate.push_back(matrix(first_, e, 0, on_device));
      w->up.push_back(c_.fused ? matrix(first_, e, inner, on_device)
                               : matrix(up_, e, 0, on_device));
      w->down.push_back(matrix(down_, e, 0, on_device));
      if (!c_.config.has_bias) continue;
      const char* bias = biases_.at(on_device) + e * num_biases() * 4;
      if (c_.config.has_gate) w->gate_bias.push_back({bias});
      w->up_bias.push_back({bias + inner * 4});
      w->down_bias.push_back({bias + 2 * inner * 4});
    }
    return w;
  }

  RoutedTokens tokens(bool on_device) {
    const Device device = on_device ? kDevice : Device{};
    const Dims wide = {c_.tokens, c_.config.hidden_size}, narrow = {c_.tokens, c_.config.top_k};
    RoutedTokens result;
    result.hidden_states = TensorView(x_.at(on_device), c_.dtype, wide, {x_stride(), 1}, device);
    result.top_k_index = TensorView(ids_.at(on_device), c_.id_dtype, narrow, device);
    result.top_k_weights = TensorView(routing_.at(on_device), c_.weights_dtype, narrow, device);
    result.output = MutableTensorView(out_.at(on_device), output_dtype(), wide, device);
    return result;
  }
  static RoutedTokens part(const RoutedTokens& all, int64_t first, int64_t last) {
    return {all.hidden_states.slice(first, last), all.top_k_index.slice(first, last),
            all.top_k_weights.slice(first, last), all.output.slice(first, last)};
  }

  Case c_;
  const Stream& stream_;
  std::mt19937 random_{7};
  Projection first_, up_, down_;  // first: gate, or gate and up
  Both biases_, x_, ids_, routing_, out_;
  std::unique_ptr<ExpertsBackend> backend_;
  ExpertsQuery query_;
  std::unique_ptr<PreparedExperts> prepared_;
  std::unique_ptr<Workspace> workspace_;
};

}  // namespace test
}  // namespace cadre::cuda

// The recipe of docs/numerics.md in float64, as plainly as it can be written.
#include <algorithm>
#include <cmath>
#include <cstring>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "cadre/float16.h"
#include "core/str_cat.h"
#include "experts/check_tokens.h"
#include "experts/routing_plan.h"

namespace cadre {
namespace {

// Element `index` of memory of a plain dtype, at any alignment.
double element(const void* data, DType dtype, int64_t index) {
  const char* at = static_cast<const char*>(data) + index * static_cast<int64_t>(size_of(dtype));
  if (dtype == DType::kF32) {
    float value;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  if (dtype == DType::kBF16) {
    BFloat16 value;
    std::memcpy(&value, at, sizeof(value));
    return static_cast<float>(value);
  }
  Float16 value;
  std::memcpy(&value, at, sizeof(value));
  return static_cast<float>(value);
}

DType dtype_of(StorageFormat format) {
  if (const std::optional<DType> dtype = plain_dtype(format)) return *dtype;
  throw Unsupported(str_cat("reference_forward: expected float32, float16 or bfloat16 ",
                            "weights, got ", name_of(format), "; dequantise them first"));
}

double sigmoid(double x) { return 1 / (1 + std::exp(-x)); }

double activate(Activation activation, double x) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case Activation::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case Activation::kRelu:
      return x < 0 ? 0 : x;
    case Activation::kRelu2:
      return x < 0 ? 0 : x * x;
  }
  return x;
}

// min and max that keep a NaN value.
double clamp_above(double x, double limit) { return x > limit ? limit : x; }
double clamp_below(double x, double limit) { return x < limit ? limit : x; }

double gated(const ExpertsConfig& config, double gate, double up) {
  if (config.swiglu_limit) {
    const double limit = *config.swiglu_limit;
    gate = clamp_above(gate, limit);
    up = clamp_below(clamp_above(up, limit), -limit);
  }
  if (config.swiglu_alpha) return (up + 1) * gate * sigmoid(double{*config.swiglu_alpha} * gate);
  return activate(config.activation, gate) * up;
}

class Reference {
 public:
  Reference(const ExpertsConfig& config, const ExpertsWeights& weights)
      : config_(config), weights_(weights), dtype_(dtype_of(weights.format)) {}

  // y += weight * expert(x)
  void add(int64_t expert, const std::vector<double>& x, double weight, double* y) const {
    const auto e = static_cast<size_t>(expert);
    std::vector<double> h(static_cast<size_t>(config_.intermediate_size));
    for (size_t i = 0; i < h.size(); ++i) {
      const double up = product(weights_.up[e], i, x) + bias(weights_.up_bias, e, i);
      h[i] =
          config_.has_gate
              ? gated(config_, product(weights_.gate[e], i, x) + bias(weights_.gate_bias, e, i), up)
              : activate(config_.activation, up);
    }
    for (size_t n = 0; n < x.size(); ++n) {
      y[n] += weight * (product(weights_.down[e], n, h) + bias(weights_.down_bias, e, n));
    }
  }

 private:
  double product(const ExpertMatrix& matrix, size_t row, const std::vector<double>& x) const {
    double sum = 0;
    for (size_t k = 0; k < x.size(); ++k) {
      sum += x[k] * element(matrix.data, dtype_,
                            static_cast<int64_t>(row) * matrix.row_stride +
                                static_cast<int64_t>(k) * matrix.col_stride);
    }
    return sum;
  }

  double bias(const std::vector<ExpertVector>& biases, size_t expert, size_t i) const {
    if (biases.empty()) return 0;
    return element(biases[expert].data, weights_.bias_dtype,
                   static_cast<int64_t>(i) * biases[expert].stride);
  }

  const ExpertsConfig& config_;
  const ExpertsWeights& weights_;
  DType dtype_;
};

}  // namespace

void reference_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                       const RoutedTokens& tokens, double* output) {
  check_inputs("reference_forward", config, tokens);
  ExpertsQuery query;
  query.config = config;
  query.format = weights.format;
  check_weights("reference_forward", query, weights);
  const Reference reference(config, weights);
  std::vector<double> x(static_cast<size_t>(config.hidden_size));
  for (int64_t t = 0; t < tokens.hidden_states.dim(0); ++t) {
    double* y = output + t * config.hidden_size;
    std::fill_n(y, config.hidden_size, 0.0);
    for (int64_t k = 0; k < config.hidden_size; ++k) {
      x[static_cast<size_t>(k)] = element(tokens.hidden_states.data(), tokens.hidden_states.dtype(),
                                          t * tokens.hidden_states.stride(0) + k);
    }
    for (int64_t s = 0; s < config.top_k; ++s) {
      const int64_t expert = expert_id(tokens.top_k_index, t, s);
      if (!is_expert(expert, config.num_experts)) continue;
      const double weight = element(tokens.top_k_weights.data(), tokens.top_k_weights.dtype(),
                                    t * tokens.top_k_weights.stride(0) + s);
      reference.add(expert, x, weight, y);
    }
  }
}

}  // namespace cadre

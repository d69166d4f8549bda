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
#include "quant/activations.h"
#include "quant/float8.h"

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

uint8_t byte_at(const void* data, int64_t index) {
  return static_cast<const uint8_t*>(data)[index];
}

int64_t block_of(int64_t index, int64_t block) { return block == 0 ? 0 : index / block; }

// Row n of a matrix of any format, as it is stored.
void read_values(const ExpertsWeights& weights, const ExpertMatrix& matrix, int64_t n,
                 std::vector<double>& row) {
  const auto cols = static_cast<int64_t>(row.size());
  const int64_t begin = n * matrix.row_stride;
  if (weights.format == StorageFormat::kFp4) {
    for (int64_t k = 0; k < cols; ++k) {
      const uint8_t two = byte_at(matrix.data, begin + k / 2);
      row[static_cast<size_t>(k)] =
          e2m1_to_float(static_cast<uint8_t>(k % 2 == 0 ? two : two >> 4));
    }
    return;
  }
  const std::optional<DType> plain = plain_dtype(weights.format);
  for (int64_t k = 0; k < cols; ++k) {
    const int64_t at = begin + k * matrix.col_stride;
    row[static_cast<size_t>(k)] =
        plain ? element(matrix.data, *plain, at) : e4m3_to_float(byte_at(matrix.data, at));
  }
}

void apply_scales(const ExpertsWeights& weights, const ExpertMatrix& matrix, int64_t n,
                  std::vector<double>& row) {
  const ScaleLayout& layout = weights.scale_layout;
  const int64_t begin =
      block_of(n + matrix.scale_row_offset, layout.block_rows) * matrix.scale_row_stride;
  for (size_t k = 0; k < row.size(); ++k) {
    const int64_t at =
        begin + block_of(static_cast<int64_t>(k), layout.block_cols) * matrix.scale_col_stride;
    row[k] *= layout.dtype == DType::kF32 ? element(matrix.scales, DType::kF32, at)
                                          : e8m0_to_float(byte_at(matrix.scales, at));
  }
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
  Reference(const ExpertsConfig& config, const ExpertsWeights& weights,
            ActivationScheme activations)
      : config_(config), weights_(weights), activations_(activations) {}

  // y += weight * expert(x)
  void add(int64_t expert, const std::vector<double>& x, double weight, double* y) const {
    const auto e = static_cast<size_t>(expert);
    const auto inner = static_cast<size_t>(config_.intermediate_size);
    std::vector<double> h = product(weights_.up[e], inner, x);
    for (size_t i = 0; i < inner; ++i) h[i] += bias(weights_.up_bias, e, i);
    if (config_.has_gate) {
      const std::vector<double> gate = product(weights_.gate[e], inner, x);
      for (size_t i = 0; i < inner; ++i) {
        h[i] = gated(config_, gate[i] + bias(weights_.gate_bias, e, i), h[i]);
      }
    } else {
      for (double& value : h) value = activate(config_.activation, value);
    }
    const std::vector<double> out = product(weights_.down[e], x.size(), h);
    for (size_t n = 0; n < out.size(); ++n) {
      y[n] += weight * (out[n] + bias(weights_.down_bias, e, n));
    }
  }

 private:
  std::vector<double> product(const ExpertMatrix& matrix, size_t rows,
                              const std::vector<double>& activations) const {
    const std::vector<double> x = rounded(matrix, activations);
    std::vector<double> y(rows);
    std::vector<double> row(x.size());
    for (size_t n = 0; n < rows; ++n) {
      read_values(weights_, matrix, static_cast<int64_t>(n), row);
      if (is_quantized(weights_.format)) {
        apply_scales(weights_, matrix, static_cast<int64_t>(n), row);
      }
      for (size_t k = 0; k < x.size(); ++k) y[n] += x[k] * row[k];
    }
    return y;
  }

  // Activations as they enter a product with this matrix.
  std::vector<double> rounded(const ExpertMatrix& matrix, const std::vector<double>& x) const {
    if (activations_ == ActivationScheme::kNone) return x;
    const bool is_fp4 = weights_.format == StorageFormat::kFp4;
    const int64_t group = is_fp4 ? kFp4ActivationGroup : kActivationGroup;
    const auto k = static_cast<int64_t>(x.size());
    const std::vector<float> floats(x.begin(), x.end());
    std::vector<uint8_t> codes(x.size());
    std::vector<float> scales(static_cast<size_t>((k + group - 1) / group), matrix.input_scale);
    if (activations_ == ActivationScheme::kDynamic) {
      quantize_activations(floats.data(), k, group, codes.data(), scales.data());
    } else {
      quantize_activations(floats.data(), k, matrix.input_scale, codes.data());
    }
    std::vector<double> result(x.size());
    for (size_t i = 0; i < x.size(); ++i) {
      const double scale = scales[i / static_cast<size_t>(group)];
      result[i] = e4m3_to_float(codes[i]) * scale;
    }
    return result;
  }

  double bias(const std::vector<ExpertVector>& biases, size_t expert, size_t i) const {
    if (biases.empty()) return 0;
    return element(biases[expert].data, weights_.bias_dtype,
                   static_cast<int64_t>(i) * biases[expert].stride);
  }

  const ExpertsConfig& config_;
  const ExpertsWeights& weights_;
  ActivationScheme activations_;
};

}  // namespace

void reference_forward(const ExpertsConfig& config, const ExpertsWeights& weights,
                       const RoutedTokens& tokens, double* output, ActivationScheme activations) {
  check_inputs("reference_forward", config, tokens);
  ExpertsQuery query;
  query.config = config;
  query.format = weights.format;
  query.scale_layout = weights.scale_layout;
  query.activation_scheme = activations;
  check_weights("reference_forward", query, weights);
  const Reference reference(config, weights, activations);
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

// The recipe of docs/numerics.md in float64, as plainly as it can be written.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <numeric>
#include <optional>
#include <vector>

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

using Rows = std::vector<std::vector<double>>;

class Reference {
 public:
  Reference(const ExpertsConfig& config, const ExpertsWeights& weights,
            ActivationScheme activations)
      : config_(config), weights_(weights), activations_(activations) {}

  // Of all rows of an expert at once, so that its weights are read once.
  Rows expert(int64_t expert, const Rows& x) const {
    const auto e = static_cast<size_t>(expert);
    const auto inner = static_cast<size_t>(config_.intermediate_size);
    Rows h = product(weights_.up[e], weights_.up_bias, e, inner, x);
    if (config_.has_gate) {
      const Rows gate = product(weights_.gate[e], weights_.gate_bias, e, inner, x);
      for (size_t r = 0; r < h.size(); ++r) {
        for (size_t i = 0; i < inner; ++i) h[r][i] = gated(config_, gate[r][i], h[r][i]);
      }
    } else {
      for (std::vector<double>& row : h) {
        for (double& value : row) value = activate(config_.activation, value);
      }
    }
    const auto hidden = static_cast<size_t>(config_.hidden_size);
    return product(weights_.down[e], weights_.down_bias, e, hidden, h);
  }

 private:
  // [rows of x, columns]: each row times each of the matrix's rows, with the expert's bias.
  Rows product(const ExpertMatrix& matrix, const std::vector<ExpertVector>& biases, size_t expert,
               size_t columns, const Rows& activations) const {
    Rows x;
    for (const std::vector<double>& row : activations) x.push_back(rounded(matrix, row));
    Rows y(x.size(), std::vector<double>(columns));
    std::vector<double> weight(x[0].size());
    for (size_t n = 0; n < columns; ++n) {
      read_values(weights_, matrix, static_cast<int64_t>(n), weight);
      if (is_quantized(weights_.format)) {
        apply_scales(weights_, matrix, static_cast<int64_t>(n), weight);
      }
      for (size_t r = 0; r < x.size(); ++r) {
        y[r][n] = std::transform_reduce(x[r].begin(), x[r].end(), weight.begin(), 0.0) +
                  bias(biases, expert, n);
      }
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

struct Pair {
  int64_t token;
  double weight;
};

// By expert, in the order of tokens and slots.
std::vector<std::vector<Pair>> pairs_of_experts(const ExpertsConfig& config,
                                                const RoutedTokens& tokens) {
  std::vector<std::vector<Pair>> pairs(static_cast<size_t>(config.num_experts));
  for (int64_t t = 0; t < tokens.hidden_states.dim(0); ++t) {
    for (int64_t s = 0; s < config.top_k; ++s) {
      const int64_t expert = expert_id(tokens.top_k_index, t, s);
      if (!is_expert(expert, config.num_experts)) continue;
      const double weight = element(tokens.top_k_weights.data(), tokens.top_k_weights.dtype(),
                                    t * tokens.top_k_weights.stride(0) + s);
      pairs[static_cast<size_t>(expert)].push_back({t, weight});
    }
  }
  return pairs;
}

std::vector<double> token(const TensorView& hidden_states, int64_t t) {
  std::vector<double> x(static_cast<size_t>(hidden_states.dim(1)));
  for (size_t k = 0; k < x.size(); ++k) {
    x[k] = element(hidden_states.data(), hidden_states.dtype(),
                   t * hidden_states.stride(0) + static_cast<int64_t>(k));
  }
  return x;
}

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
  const std::vector<std::vector<Pair>> pairs = pairs_of_experts(config, tokens);
  const auto hidden = static_cast<size_t>(config.hidden_size);
  std::fill_n(output, tokens.hidden_states.dim(0) * config.hidden_size, 0.0);
  for (size_t e = 0; e < pairs.size(); ++e) {
    if (pairs[e].empty()) continue;  // its weights may be anything
    Rows x;
    for (const Pair& pair : pairs[e]) x.push_back(token(tokens.hidden_states, pair.token));
    const Rows y = reference.expert(static_cast<int64_t>(e), x);
    for (size_t r = 0; r < y.size(); ++r) {
      double* const out = output + pairs[e][r].token * config.hidden_size;
      for (size_t n = 0; n < hidden; ++n) out[n] += pairs[e][r].weight * y[r][n];
    }
  }
}

}  // namespace cadre

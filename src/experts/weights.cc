#include "cadre/error.h"
#include "cadre/experts.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

constexpr std::string_view kWhere = "make_experts_weights: ";

[[noreturn]] void fail(std::string_view name, const TensorView& tensor,
                       const std::string& expected) {
  throw InvalidArgument(
      str_cat(kWhere, name, ": expected ", expected, ", got ", describe(name, tensor)));
}

void check_present(std::string_view name, const TensorView& tensor, const Dims& shape) {
  if (!tensor) {
    throw InvalidArgument(
        str_cat(kWhere, name, ": expected ", to_string(shape), ", got no tensor"));
  }
  if (!(tensor.shape() == shape)) fail(name, tensor, to_string(shape));
  if (tensor.data() == nullptr) fail(name, tensor, "memory behind it, not a null pointer");
  const int last = shape.rank() - 1;
  if (shape[last] > 1 && tensor.stride(last) != 1) {
    fail(name, tensor, str_cat("stride 1 in the last dimension, not ", tensor.stride(last)));
  }
}

StorageFormat plain_format_of(std::string_view name, const TensorView& tensor) {
  const auto format = plain_format(tensor.dtype());
  if (!format) fail(name, tensor, "float32, float16 or bfloat16");
  return *format;
}

void check_like(std::string_view name, const TensorView& tensor, std::string_view first_name,
                const TensorView& first) {
  if (tensor.dtype() != first.dtype()) {
    fail(name, tensor, str_cat(name_of(first.dtype()), " as ", first_name));
  }
  if (!(tensor.device() == first.device())) {
    fail(name, tensor, str_cat("memory on ", to_string(first.device()), " as ", first_name));
  }
}

const void* at(const TensorView& tensor, int64_t element) {
  return static_cast<const char*>(tensor.data()) +
         element * static_cast<int64_t>(size_of(tensor.dtype()));
}

// The [N, K] matrices of all experts, N starting at row `first_row` and taking every `step`-th one.
std::vector<ExpertMatrix> matrices(const TensorView& fused, bool is_transposed, int64_t first_row,
                                   int64_t step) {
  const int64_t row = fused.stride(is_transposed ? 2 : 1);
  const int64_t col = fused.stride(is_transposed ? 1 : 2);
  std::vector<ExpertMatrix> result(static_cast<size_t>(fused.dim(0)));
  for (int64_t e = 0; e < fused.dim(0); ++e) {
    ExpertMatrix& m = result[static_cast<size_t>(e)];
    m.data = at(fused, e * fused.stride(0) + first_row * row);
    m.row_stride = row * step;
    m.col_stride = col;
  }
  return result;
}

std::vector<ExpertVector> vectors(const TensorView& fused, int64_t first, int64_t step) {
  std::vector<ExpertVector> result(static_cast<size_t>(fused.dim(0)));
  for (int64_t e = 0; e < fused.dim(0); ++e) {
    result[static_cast<size_t>(e)] = {at(fused, e * fused.stride(0) + first * fused.stride(1)),
                                      step * fused.stride(1)};
  }
  return result;
}

void check_biases(const ExpertsConfig& config, const FusedExperts& tensors,
                  std::string_view up_name, int64_t up_rows) {
  const std::string up_bias = str_cat(up_name, "_bias");
  if (!config.has_bias) {
    if (tensors.gate_up_proj_bias) {
      fail(up_bias, tensors.gate_up_proj_bias, "no bias (has_bias = false)");
    }
    if (tensors.down_proj_bias) {
      fail("down_proj_bias", tensors.down_proj_bias, "no bias (has_bias = false)");
    }
    return;
  }
  check_present(up_bias, tensors.gate_up_proj_bias, {config.num_experts, up_rows});
  check_present("down_proj_bias", tensors.down_proj_bias, {config.num_experts, config.hidden_size});
  plain_format_of(up_bias, tensors.gate_up_proj_bias);
  check_like("down_proj_bias", tensors.down_proj_bias, up_bias, tensors.gate_up_proj_bias);
  if (!(tensors.gate_up_proj_bias.device() == tensors.gate_up_proj.device())) {
    fail(up_bias, tensors.gate_up_proj_bias,
         str_cat("memory on ", to_string(tensors.gate_up_proj.device()), " as ", up_name));
  }
}

Dims fused_shape(bool is_transposed, int64_t experts, int64_t n, int64_t k) {
  return is_transposed ? Dims{experts, k, n} : Dims{experts, n, k};
}

std::vector<ExpertMatrix> per_expert(const ExpertsConfig& config, std::string_view name,
                                     std::span<const TensorView> tensors, const Dims& shape,
                                     const TensorView& first) {
  if (static_cast<int64_t>(tensors.size()) != config.num_experts) {
    throw InvalidArgument(str_cat(kWhere, name, ": expected ", config.num_experts,
                                  " tensors (num_experts), got ", tensors.size()));
  }
  std::vector<ExpertMatrix> result;
  result.reserve(tensors.size());
  for (size_t e = 0; e < tensors.size(); ++e) {
    const std::string full_name = str_cat(name, "[", e, "]");
    check_present(full_name, tensors[e], shape);
    check_like(full_name, tensors[e], "up[0]", first);
    ExpertMatrix m;
    m.data = tensors[e].data();
    m.row_stride = tensors[e].stride(0);
    m.col_stride = 1;
    result.push_back(m);
  }
  return result;
}

}  // namespace

ExpertsWeights make_experts_weights(const ExpertsConfig& config, const FusedExperts& tensors,
                                    std::shared_ptr<const void> owner) {
  validate(config);
  const int64_t inner = config.intermediate_size;
  const int64_t up_rows = config.has_gate ? 2 * inner : inner;
  const std::string_view up_name = config.has_gate ? "gate_up_proj" : "up_proj";
  check_present(up_name, tensors.gate_up_proj,
                fused_shape(config.is_transposed, config.num_experts, up_rows, config.hidden_size));
  check_present("down_proj", tensors.down_proj,
                fused_shape(config.is_transposed, config.num_experts, config.hidden_size, inner));

  ExpertsWeights weights;
  weights.device = tensors.gate_up_proj.device();
  weights.format = plain_format_of(up_name, tensors.gate_up_proj);
  check_like("down_proj", tensors.down_proj, up_name, tensors.gate_up_proj);
  check_biases(config, tensors, up_name, up_rows);

  const int64_t step = config.has_gate && !config.is_concatenated ? 2 : 1;
  const int64_t first_up = !config.has_gate ? 0 : config.is_concatenated ? inner : 1;
  if (config.has_gate) {
    weights.gate = matrices(tensors.gate_up_proj, config.is_transposed, 0, step);
  }
  weights.up = matrices(tensors.gate_up_proj, config.is_transposed, first_up, step);
  weights.down = matrices(tensors.down_proj, config.is_transposed, 0, 1);
  if (config.has_bias) {
    weights.bias_dtype = tensors.gate_up_proj_bias.dtype();
    if (config.has_gate) weights.gate_bias = vectors(tensors.gate_up_proj_bias, 0, step);
    weights.up_bias = vectors(tensors.gate_up_proj_bias, first_up, step);
    weights.down_bias = vectors(tensors.down_proj_bias, 0, 1);
  }
  weights.owner = std::move(owner);
  return weights;
}

ExpertsWeights make_experts_weights(const ExpertsConfig& config, std::span<const TensorView> gate,
                                    std::span<const TensorView> up,
                                    std::span<const TensorView> down,
                                    std::shared_ptr<const void> owner) {
  validate(config);
  if (config.has_bias) {
    throw InvalidArgument(str_cat(kWhere, "has_bias: expected false for one tensor per expert and ",
                                  "projection, got true; biases come with fused tensors only"));
  }
  if (!config.has_gate && !gate.empty()) {
    throw InvalidArgument(
        str_cat(kWhere, "gate: expected no tensors (has_gate = false), got ", gate.size()));
  }
  const Dims up_shape{config.intermediate_size, config.hidden_size};
  const Dims down_shape{config.hidden_size, config.intermediate_size};
  const TensorView first = up.empty() ? TensorView() : up[0];

  ExpertsWeights weights;
  weights.up = per_expert(config, "up", up, up_shape, first);
  if (config.has_gate) weights.gate = per_expert(config, "gate", gate, up_shape, first);
  weights.down = per_expert(config, "down", down, down_shape, first);
  weights.device = first.device();
  weights.format = plain_format_of("up[0]", first);
  weights.owner = std::move(owner);
  return weights;
}

}  // namespace cadre

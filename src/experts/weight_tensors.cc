#include "experts/weight_tensors.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

constexpr std::string_view kWhere = "make_experts_weights: ";

std::vector<ExpertVector> vectors(const TensorView& fused, int64_t first, int64_t step) {
  std::vector<ExpertVector> result(static_cast<size_t>(fused.dim(0)));
  for (int64_t e = 0; e < fused.dim(0); ++e) {
    result[static_cast<size_t>(e)] = {
        address_of(fused, e * fused.stride(0) + first * fused.stride(1)), step * fused.stride(1)};
  }
  return result;
}

void check_absent(std::string_view name, const TensorView& bias) {
  if (bias) fail_tensor(name, bias, "no bias (has_bias = false)");
}

}  // namespace

void fail_tensor(std::string_view name, const TensorView& tensor, const std::string& expected) {
  throw InvalidArgument(
      str_cat(kWhere, name, ": expected ", expected, ", got ", describe(name, tensor)));
}

void check_present(std::string_view name, const TensorView& tensor, const Dims& shape) {
  if (!tensor) {
    throw InvalidArgument(
        str_cat(kWhere, name, ": expected ", to_string(shape), ", got no tensor"));
  }
  if (!(tensor.shape() == shape)) fail_tensor(name, tensor, to_string(shape));
  if (tensor.data() == nullptr) fail_tensor(name, tensor, "memory behind it, not a null pointer");
  const int last = shape.rank() - 1;
  if (shape[last] > 1 && tensor.stride(last) != 1) {
    fail_tensor(name, tensor, str_cat("stride 1 in the last dimension, not ", tensor.stride(last)));
  }
}

void check_like(std::string_view name, const TensorView& tensor, std::string_view first_name,
                const TensorView& first) {
  if (tensor.dtype() != first.dtype()) {
    fail_tensor(name, tensor, str_cat(name_of(first.dtype()), " as ", first_name));
  }
  if (!(tensor.device() == first.device())) {
    fail_tensor(name, tensor, str_cat("memory on ", to_string(first.device()), " as ", first_name));
  }
}

const void* address_of(const TensorView& tensor, int64_t element) {
  return static_cast<const char*>(tensor.data()) +
         element * static_cast<int64_t>(size_of(tensor.dtype()));
}

Dims fused_shape(bool is_transposed, int64_t experts, int64_t n, int64_t k) {
  return is_transposed ? Dims{experts, k, n} : Dims{experts, n, k};
}

FusedRows fused_rows(const ExpertsConfig& config) {
  const int64_t inner = config.intermediate_size;
  if (!config.has_gate) return {inner, 1, 0};
  return config.is_concatenated ? FusedRows{2 * inner, 1, inner} : FusedRows{2 * inner, 2, 1};
}

std::string_view up_name_of(const ExpertsConfig& config) {
  return config.has_gate ? "gate_up_proj" : "up_proj";
}

void set_biases(const ExpertsConfig& config, const TensorView& up_bias, const TensorView& down_bias,
                ExpertsWeights& weights) {
  const std::string up_name = str_cat(up_name_of(config), "_bias");
  if (!config.has_bias) {
    check_absent(up_name, up_bias);
    check_absent("down_proj_bias", down_bias);
    return;
  }
  const FusedRows rows = fused_rows(config);
  check_present(up_name, up_bias, {config.num_experts, rows.count});
  check_present("down_proj_bias", down_bias, {config.num_experts, config.hidden_size});
  if (!plain_format(up_bias.dtype())) {
    fail_tensor(up_name, up_bias, "float32, float16 or bfloat16");
  }
  check_like("down_proj_bias", down_bias, up_name, up_bias);
  if (!(up_bias.device() == weights.device)) {
    fail_tensor(up_name, up_bias,
                str_cat("memory on ", to_string(weights.device), " as ", up_name_of(config)));
  }
  weights.bias_dtype = up_bias.dtype();
  if (config.has_gate) weights.gate_bias = vectors(up_bias, 0, rows.step);
  weights.up_bias = vectors(up_bias, rows.first_up, rows.step);
  weights.down_bias = vectors(down_bias, 0, 1);
}

std::vector<ExpertMatrix> fused_matrices(const TensorView& fused, bool is_transposed, int64_t first,
                                         int64_t step) {
  const int64_t row = fused.stride(is_transposed ? 2 : 1);
  const int64_t col = fused.stride(is_transposed ? 1 : 2);
  std::vector<ExpertMatrix> result(static_cast<size_t>(fused.dim(0)));
  for (int64_t e = 0; e < fused.dim(0); ++e) {
    ExpertMatrix& m = result[static_cast<size_t>(e)];
    m.data = address_of(fused, e * fused.stride(0) + first * row);
    m.row_stride = row * step;
    m.col_stride = col;
  }
  return result;
}

}  // namespace cadre

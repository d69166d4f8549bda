#include "cadre/error.h"
#include "cadre/experts.h"
#include "core/str_cat.h"
#include "experts/weight_tensors.h"

namespace cadre {
namespace {

constexpr std::string_view kWhere = "make_experts_weights: ";

StorageFormat plain_format_of(std::string_view name, const TensorView& tensor) {
  const auto format = plain_format(tensor.dtype());
  if (!format) fail_tensor(name, tensor, "float32, float16 or bfloat16");
  return *format;
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
  const FusedRows rows = fused_rows(config);
  const std::string_view up_name = up_name_of(config);
  check_present(
      up_name, tensors.gate_up_proj,
      fused_shape(config.is_transposed, config.num_experts, rows.count, config.hidden_size));
  check_present("down_proj", tensors.down_proj,
                fused_shape(config.is_transposed, config.num_experts, config.hidden_size,
                            config.intermediate_size));

  ExpertsWeights weights;
  weights.device = tensors.gate_up_proj.device();
  weights.format = plain_format_of(up_name, tensors.gate_up_proj);
  check_like("down_proj", tensors.down_proj, up_name, tensors.gate_up_proj);
  set_biases(config, tensors.gate_up_proj_bias, tensors.down_proj_bias, weights);
  if (config.has_gate) {
    weights.gate = fused_matrices(tensors.gate_up_proj, config.is_transposed, 0, rows.step);
  }
  weights.up = fused_matrices(tensors.gate_up_proj, config.is_transposed, rows.first_up, rows.step);
  weights.down = fused_matrices(tensors.down_proj, config.is_transposed, 0, 1);
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

// Quantised tensors as ExpertsWeights: addresses of values and of their scales.
#include <cmath>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "cadre/quantization.h"
#include "core/str_cat.h"
#include "experts/weight_tensors.h"
#include "quant/stored_values.h"

namespace cadre {
namespace {

constexpr std::string_view kWhere = "make_experts_weights: ";

[[noreturn]] void fail_scales(std::string_view name, const QuantizedTensor& tensor,
                              const std::string& expected) {
  throw InvalidArgument(str_cat(kWhere, "scales of ", describe(name, tensor.values), ": expected ",
                                name_of(tensor.layout.dtype), " ", expected, ", got ",
                                describe("scales", tensor.scales)));
}

// The values with whole rows, of this shape of stored elements.
TensorView checked_values(std::string_view name, const QuantizedTensor& tensor, const Dims& shape) {
  const bool is_fp4 = tensor.format == StorageFormat::kFp4;
  const TensorView values = is_fp4 ? with_whole_rows(tensor.values, shape.rank()) : tensor.values;
  const DType dtype = values.dtype();
  if (values && !(is_fp4 ? dtype == DType::kI8 || dtype == DType::kU8 : dtype == DType::kF8E4M3)) {
    fail_tensor(name, tensor.values,
                str_cat(is_fp4 ? "int8 or uint8 " : "float8_e4m3 ", shape, " for ",
                        name_of(tensor.format)));
  }
  check_present(name, values, shape);
  return values;
}

void check_scale_memory(std::string_view name, const QuantizedTensor& tensor) {
  const TensorView& scales = tensor.scales;
  if (!scales || scales.data() == nullptr) {
    throw InvalidArgument(str_cat(kWhere, "scales of ", describe(name, tensor.values),
                                  ": expected ", name_of(tensor.layout.dtype), ", got no tensor"));
  }
  const bool has_e8m0_bits = tensor.layout.dtype == DType::kF8E8M0 && scales.dtype() == DType::kU8;
  if (scales.dtype() != tensor.layout.dtype && !has_e8m0_bits) {
    fail_scales(name, tensor, "as in the scale layout");
  }
  if (!(scales.device() == tensor.values.device())) {
    fail_scales(name, tensor, "beside the values");
  }
}

// The formats of all tensors of a layer are one.
void check_format(std::string_view name, const QuantizedTensor& tensor, std::string_view first_name,
                  const QuantizedTensor& first) {
  if (tensor.format != first.format || !(tensor.layout == first.layout)) {
    throw InvalidArgument(str_cat(
        kWhere, name, ": expected ", name_of(first.format), " with ", name_of(first.layout.dtype),
        " scales of blocks of ", first.layout.block_rows, " x ", first.layout.block_cols, " as ",
        first_name, ", got ", name_of(tensor.format), " with ", name_of(tensor.layout.dtype),
        " scales of blocks of ", tensor.layout.block_rows, " x ", tensor.layout.block_cols));
  }
  if (!(tensor.values.device() == first.values.device())) {
    fail_tensor(name, tensor.values,
                str_cat("memory on ", to_string(first.values.device()), " as ", first_name));
  }
}

void set_input_scales(std::string_view name, std::span<const float> scales,
                      std::vector<ExpertMatrix>& matrices) {
  if (scales.empty()) return;
  if (scales.size() != matrices.size()) {
    throw InvalidArgument(str_cat(kWhere, "input scales of ", name, ": expected ", matrices.size(),
                                  " (num_experts), got ", scales.size()));
  }
  for (size_t e = 0; e < scales.size(); ++e) {
    if (!(scales[e] > 0) || !std::isfinite(scales[e])) {
      throw InvalidArgument(str_cat(kWhere, "input scales of ", name, ": expected positive finite ",
                                    "numbers, got ", scales[e], " for expert ", e));
    }
    matrices[e].input_scale = scales[e];
  }
}

// ---- one tensor per expert ---------------------------------------------------------------------

std::vector<ExpertMatrix> per_expert(const ExpertsConfig& config, std::string_view name,
                                     std::span<const QuantizedTensor> tensors, int64_t n, int64_t k,
                                     const QuantizedTensor& first) {
  if (static_cast<int64_t>(tensors.size()) != config.num_experts) {
    throw InvalidArgument(str_cat(kWhere, name, ": expected ", config.num_experts,
                                  " tensors (num_experts), got ", tensors.size()));
  }
  const Dims blocks = scale_shape(first.layout, n, k);
  std::vector<ExpertMatrix> result;
  result.reserve(tensors.size());
  for (size_t e = 0; e < tensors.size(); ++e) {
    const std::string full_name = str_cat(name, "[", e, "]");
    const QuantizedTensor& t = tensors[e];
    check_format(full_name, t, "up[0]", first);
    const TensorView values = checked_values(full_name, t, {n, row_bytes(t.format, k)});
    check_scale_memory(full_name, t);
    const bool is_one = t.format == StorageFormat::kFp8Tensor && t.scales.numel() == 1;
    if (!is_one && !(t.scales.shape() == blocks)) {
      fail_scales(full_name, t, to_string(blocks));
    }
    ExpertMatrix m;
    m.data = values.data();
    m.row_stride = values.stride(0);
    m.scales = t.scales.data();
    m.scale_row_stride = is_one ? 0 : t.scales.stride(0);
    m.scale_col_stride = is_one ? 0 : t.scales.stride(1);
    result.push_back(m);
  }
  return result;
}

// ---- fused tensors -----------------------------------------------------------------------------

// Scales of blocks as [E, block rows, block columns], whichever way their tensor lies.
TensorView scale_grid(const TensorView& scales, bool is_transposed) {
  if (!is_transposed) return scales;
  return {scales.data(),
          scales.dtype(),
          {scales.dim(0), scales.dim(2), scales.dim(1)},
          {scales.stride(0), scales.stride(2), scales.stride(1)},
          scales.device()};
}

struct FusedPart {
  int64_t first = 0;  // row of the fused tensor
  int64_t step = 1;
  int64_t first_scale_row = 0;
  int64_t scale_step = 1;
  int64_t row_offset = 0;
};

std::vector<ExpertMatrix> part_of(const TensorView& values, bool is_transposed,
                                  const TensorView& grid, const FusedPart& part) {
  std::vector<ExpertMatrix> result = fused_matrices(values, is_transposed, part.first, part.step);
  for (size_t e = 0; e < result.size(); ++e) {
    ExpertMatrix& m = result[e];
    m.scales = address_of(
        grid, static_cast<int64_t>(e) * grid.stride(0) + part.first_scale_row * grid.stride(1));
    m.scale_row_stride = part.scale_step * grid.stride(1);
    m.scale_col_stride = grid.stride(2);
    m.scale_row_offset = part.row_offset;
  }
  return result;
}

class FusedReader {
 public:
  FusedReader(const ExpertsConfig& config, StorageFormat format)
      : config_(config),
        // Groups along K lie along the last dimension: so does K.
        is_transposed_(config.is_transposed && (format == StorageFormat::kFp8Block ||
                                                format == StorageFormat::kFp8Tensor)) {}

  void read_gate_up(const QuantizedTensor& tensor, ExpertsWeights& weights) const {
    const std::string_view name = up_name_of(config_);
    const FusedRows rows = fused_rows(config_);
    const TensorView values = values_of(name, tensor, rows.count, config_.hidden_size);
    const int64_t block = tensor.layout.block_rows;
    const int64_t whole = scale_shape(tensor.layout, rows.count, 1)[0];
    const int64_t half = scale_shape(tensor.layout, config_.intermediate_size, 1)[0];
    const Dims blocks{config_.num_experts, whole,
                      scale_shape(tensor.layout, 1, config_.hidden_size)[1]};
    if (!config_.has_gate) {
      weights.up = part_of(values, is_transposed_, grid_of(name, tensor, blocks, whole), {});
      return;
    }
    const TensorView grid = grid_of(name, tensor, blocks, 2 * half);
    if (!config_.is_concatenated && block > 1) {
      fail_scales(name, tensor, "of blocks of one row, gate and up rows being interleaved");
    }
    FusedPart up{rows.first_up, rows.step, 0, 1, 0};
    if (grid.dim(1) != whole) {
      up.first_scale_row = half;  // a grid for each half
    } else if (block > 0) {
      up.first_scale_row = rows.first_up / block;
      up.scale_step = rows.step;
      up.row_offset = rows.first_up % block;
    }
    FusedPart gate = up;
    gate.first = gate.first_scale_row = gate.row_offset = 0;
    weights.gate = part_of(values, is_transposed_, grid, gate);
    weights.up = part_of(values, is_transposed_, grid, up);
  }

  void read_down(const QuantizedTensor& tensor, ExpertsWeights& weights) const {
    const int64_t n = config_.hidden_size, k = config_.intermediate_size;
    const TensorView values = values_of("down_proj", tensor, n, k);
    const Dims shape = scale_shape(tensor.layout, n, k);
    const Dims blocks{config_.num_experts, shape[0], shape[1]};
    weights.down =
        part_of(values, is_transposed_, grid_of("down_proj", tensor, blocks, shape[0]), {});
  }

 private:
  TensorView values_of(std::string_view name, const QuantizedTensor& tensor, int64_t n,
                       int64_t k) const {
    return checked_values(
        name, tensor,
        fused_shape(is_transposed_, config_.num_experts, n, row_bytes(tensor.format, k)));
  }

  // Scales of this shape, or with `other_rows` instead of its rows.
  TensorView grid_of(std::string_view name, const QuantizedTensor& tensor, const Dims& blocks,
                     int64_t other_rows) const {
    check_scale_memory(name, tensor);
    if (tensor.scales.rank() != 3) fail_scales(name, tensor, to_string(blocks));
    const TensorView grid =
        scale_grid(tensor.scales, is_transposed_ && tensor.format != StorageFormat::kFp8Tensor);
    Dims other = blocks;
    other[1] = other_rows;
    if (grid.shape() == blocks || grid.shape() == other) return grid;
    const auto as_stored = [&](const Dims& d) {
      return fused_shape(is_transposed_, d[0], d[1], d[2]);
    };
    fail_scales(name, tensor,
                other == blocks ? to_string(as_stored(blocks))
                                : str_cat(as_stored(blocks), ", or ", as_stored(other),
                                          " with blocks of their own for gate and up"));
  }

  const ExpertsConfig& config_;
  bool is_transposed_;
};

}  // namespace

ExpertsWeights make_experts_weights(const ExpertsConfig& config,
                                    const QuantizedFusedExperts& tensors,
                                    std::shared_ptr<const void> owner) {
  validate(config);
  const QuantizedTensor& first = tensors.gate_up_proj;
  validate(first.format, first.layout);
  check_format("down_proj", tensors.down_proj, up_name_of(config), first);
  ExpertsWeights weights;
  weights.device = first.values.device();
  weights.format = first.format;
  weights.scale_layout = first.layout;
  const FusedReader reader(config, first.format);
  reader.read_gate_up(first, weights);
  reader.read_down(tensors.down_proj, weights);
  set_biases(config, tensors.gate_up_proj_bias, tensors.down_proj_bias, weights);
  if (config.has_gate) set_input_scales("gate", tensors.gate_up_input_scales, weights.gate);
  set_input_scales("up", tensors.gate_up_input_scales, weights.up);
  set_input_scales("down", tensors.down_input_scales, weights.down);
  weights.owner = std::move(owner);
  return weights;
}

ExpertsWeights make_experts_weights(const ExpertsConfig& config, const QuantizedExperts& tensors,
                                    std::shared_ptr<const void> owner) {
  validate(config);
  if (config.has_bias) {
    throw InvalidArgument(str_cat(kWhere, "has_bias: expected false for one tensor per expert and ",
                                  "projection, got true; biases come with fused tensors only"));
  }
  if (!config.has_gate && !tensors.gate.empty()) {
    throw InvalidArgument(
        str_cat(kWhere, "gate: expected no tensors (has_gate = false), got ", tensors.gate.size()));
  }
  const QuantizedTensor first = tensors.up.empty() ? QuantizedTensor() : tensors.up[0];
  if (!tensors.up.empty()) validate(first.format, first.layout);
  const int64_t inner = config.intermediate_size, hidden = config.hidden_size;
  ExpertsWeights weights;
  weights.up = per_expert(config, "up", tensors.up, inner, hidden, first);
  if (config.has_gate) {
    weights.gate = per_expert(config, "gate", tensors.gate, inner, hidden, first);
  }
  weights.down = per_expert(config, "down", tensors.down, hidden, inner, first);
  weights.device = first.values.device();
  weights.format = first.format;
  weights.scale_layout = first.layout;
  set_input_scales("gate", tensors.gate_input_scales, weights.gate);
  set_input_scales("up", tensors.up_input_scales, weights.up);
  set_input_scales("down", tensors.down_input_scales, weights.down);
  weights.owner = std::move(owner);
  return weights;
}

}  // namespace cadre

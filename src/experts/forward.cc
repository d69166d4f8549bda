#include <algorithm>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"
#include "experts/check_tokens.h"

namespace cadre {
namespace {

[[noreturn]] void fail(std::string_view where, std::string_view name, const TensorView& tensor,
                       const std::string& expected) {
  throw InvalidArgument(
      str_cat(where, ": ", name, ": expected ", expected, ", got ", describe(name, tensor)));
}

void check_matrix(std::string_view where, std::string_view name, const TensorView& tensor,
                  const Dims& shape) {
  if (!(tensor.shape() == shape)) fail(where, name, tensor, to_string(shape));
  if (tensor.numel() != 0 && tensor.data() == nullptr) {
    fail(where, name, tensor, "memory behind it, not a null pointer");
  }
  if (shape[1] > 1 && tensor.stride(1) != 1) {
    fail(where, name, tensor, str_cat("stride 1 in the last dimension, not ", tensor.stride(1)));
  }
}

void check_device(std::string_view where, std::string_view name, const TensorView& tensor,
                  Device device) {
  if (tensor.device() == device) return;
  fail(where, name, tensor, str_cat("memory on ", to_string(device)));
}

struct ByteRange {
  const char* begin;
  const char* end;
};

// From the first to the last byte that a [rows, columns] view reaches.
ByteRange range_of(const TensorView& view) {
  const auto size = static_cast<int64_t>(size_of(view.dtype()));
  const int64_t span = (view.dim(0) - 1) * view.stride(0);
  const char* first = static_cast<const char*>(view.data());
  return {first + std::min<int64_t>(0, span) * size,
          first + (std::max<int64_t>(0, span) + view.dim(1)) * size};
}

void check_no_overlap(const TensorView& output, std::string_view name, const TensorView& input) {
  if (output.numel() == 0) return;
  const ByteRange out = range_of(output);
  const ByteRange in = range_of(input);
  if (out.end <= in.begin || in.end <= out.begin) return;
  throw InvalidArgument(str_cat("experts forward: output: expected memory of its own, got memory ",
                                "that overlaps ", name, "; give another tensor"));
}

void check_output(const ExpertsQuery& query, const RoutedTokens& tokens) {
  constexpr std::string_view kWhere = "experts forward";
  const MutableTensorView& output = tokens.output;
  check_matrix(kWhere, "output", output, tokens.hidden_states.shape());
  if (output.dtype() != DType::kF32 && output.dtype() != query.compute_dtype) {
    fail(kWhere, "output", output,
         str_cat("float32 or the compute dtype ", name_of(query.compute_dtype)));
  }
  if (output.dim(0) > 1 && output.stride(0) < output.dim(1) && output.stride(0) > -output.dim(1)) {
    fail(kWhere, "output", output,
         str_cat("rows that do not overlap, not stride ", output.stride(0)));
  }
  check_no_overlap(output, "hidden_states", tokens.hidden_states);
  check_no_overlap(output, "top_k_index", tokens.top_k_index);
  check_no_overlap(output, "top_k_weights", tokens.top_k_weights);
}

std::string describe(const ScaleLayout& layout) {
  return str_cat(name_of(layout.dtype), " scales of blocks of ", layout.block_rows, " x ",
                 layout.block_cols);
}

template <typename T>
void check_count(std::string_view where, std::string_view name, const std::vector<T>& items,
                 int64_t expected) {
  if (static_cast<int64_t>(items.size()) == expected) return;
  throw InvalidArgument(
      str_cat(where, ": weights.", name, ": expected ", expected, " entries, got ", items.size()));
}

void check_scales(std::string_view where, std::string_view name, const ExpertsQuery& query,
                  const std::vector<ExpertMatrix>& matrices) {
  const bool needs_input_scale = query.activation_scheme == ActivationScheme::kStatic;
  for (size_t e = 0; e < matrices.size(); ++e) {
    const ExpertMatrix& m = matrices[e];
    if (m.data != nullptr && m.scales == nullptr) {
      throw InvalidArgument(str_cat(where, ": weights.", name, "[", e, "]: expected scales beside ",
                                    name_of(query.format), " values, got none"));
    }
    if (m.data != nullptr && needs_input_scale && !(m.input_scale > 0)) {
      throw InvalidArgument(str_cat(where, ": weights.", name, "[", e, "].input_scale: expected a ",
                                    "positive scale of static activations, got ", m.input_scale));
    }
  }
}

void check_scales(std::string_view where, const ExpertsQuery& query,
                  const ExpertsWeights& weights) {
  if (!(weights.scale_layout == query.scale_layout)) {
    throw InvalidArgument(str_cat(where, ": weights.scale_layout: expected ",
                                  describe(query.scale_layout), " as in the query, got ",
                                  describe(weights.scale_layout)));
  }
  check_scales(where, "gate", query, weights.gate);
  check_scales(where, "up", query, weights.up);
  check_scales(where, "down", query, weights.down);
}

}  // namespace

void check_inputs(std::string_view where, const ExpertsConfig& config, const RoutedTokens& tokens) {
  if (tokens.hidden_states.rank() != 2) {
    fail(where, "hidden_states", tokens.hidden_states,
         str_cat("[num_tokens, ", config.hidden_size, "]"));
  }
  const int64_t num_tokens = tokens.hidden_states.dim(0);
  check_matrix(where, "hidden_states", tokens.hidden_states, {num_tokens, config.hidden_size});
  check_matrix(where, "top_k_index", tokens.top_k_index, {num_tokens, config.top_k});
  check_matrix(where, "top_k_weights", tokens.top_k_weights, {num_tokens, config.top_k});
  const DType ids = tokens.top_k_index.dtype();
  if (ids != DType::kI32 && ids != DType::kI64) {
    fail(where, "top_k_index", tokens.top_k_index, "int32 or int64");
  }
  const DType compute = tokens.hidden_states.dtype();
  if (!is_compute_dtype(compute)) {
    fail(where, "hidden_states", tokens.hidden_states, "float32, bfloat16 or float16");
  }
  const DType weights = tokens.top_k_weights.dtype();
  if (weights != DType::kF32 && weights != compute) {
    fail(where, "top_k_weights", tokens.top_k_weights,
         str_cat("float32 or the compute dtype ", name_of(compute)));
  }
}

void check_weights(std::string_view where, const ExpertsQuery& query,
                   const ExpertsWeights& weights) {
  const ExpertsConfig& config = query.config;
  validate(config);
  const int64_t experts = config.num_experts;
  check_count(where, "gate", weights.gate, config.has_gate ? experts : 0);
  check_count(where, "up", weights.up, experts);
  check_count(where, "down", weights.down, experts);
  const int64_t biases = config.has_bias ? experts : 0;
  check_count(where, "gate_bias", weights.gate_bias, config.has_gate ? biases : 0);
  check_count(where, "up_bias", weights.up_bias, biases);
  check_count(where, "down_bias", weights.down_bias, biases);
  if (weights.format != query.format) {
    throw InvalidArgument(str_cat(where, ": weights: expected ", name_of(query.format),
                                  " as in the query, got ", name_of(weights.format)));
  }
  if (is_quantized(query.format)) check_scales(where, query, weights);
  if (!(weights.device == query.device)) {
    throw InvalidArgument(str_cat(where, ": weights: expected memory on ", to_string(query.device),
                                  ", got ", to_string(weights.device)));
  }
}

void ExpertsBackend::forward(const PreparedExperts& experts, const RoutedTokens& tokens,
                             Workspace& workspace, const Stream& stream) {
  constexpr std::string_view kWhere = "experts forward";
  const ExpertsQuery& query = experts.query;
  check_inputs(kWhere, query.config, tokens);
  if (tokens.hidden_states.dtype() != query.compute_dtype) {
    fail(kWhere, "hidden_states", tokens.hidden_states,
         str_cat(name_of(query.compute_dtype), ", the dtype these experts were prepared for"));
  }
  check_device(kWhere, "hidden_states", tokens.hidden_states, query.device);
  check_device(kWhere, "top_k_index", tokens.top_k_index, query.device);
  check_device(kWhere, "top_k_weights", tokens.top_k_weights, query.device);
  check_device(kWhere, "output", tokens.output, query.device);
  check_output(query, tokens);
  if (!(stream.device == query.device) || !(workspace.device() == query.device)) {
    throw InvalidArgument(str_cat(kWhere, ": expected stream and workspace on ",
                                  to_string(query.device), ", got a stream on ",
                                  to_string(stream.device), " and a workspace on ",
                                  to_string(workspace.device())));
  }
  if (query.device.type == DeviceType::kCpu && stream.threads == nullptr) {
    throw InvalidArgument(
        str_cat(kWhere, ": stream: expected a thread pool (Stream::cpu), ", "got none"));
  }
  const CurrentDevice current(stream.device);
  run(experts, tokens, workspace, stream);
}

}  // namespace cadre

#include "backends/cpu/kernels/experts_call.h"
#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/packed_experts.h"
#include "backends/cpu/kernels/weight_matrix.h"
#include "cadre/error.h"
#include "core/str_cat.h"
#include "experts/check_tokens.h"

namespace cadre::cpu {

namespace {

// Why activations cannot be treated so; empty when they can.
std::string activation_fault(const ExpertsQuery& query, const Abilities& abilities) {
  if (query.activation_scheme == ActivationScheme::kNone) return "";
  if (!is_quantized(query.format)) {
    return str_cat("activations are quantised with quantised weights only, and these are ",
                   name_of(query.format));
  }
  const bool is_static = query.activation_scheme == ActivationScheme::kStatic;
  if (query.format == StorageFormat::kFp4 && !is_static) {
    if (abilities.quantizes_for_fp4) return "";
    return "fp4 weights are multiplied with activations in the compute dtype; deepgemm alone "
           "quantises them";
  }
  if (query.format == StorageFormat::kFp4 || query.format == StorageFormat::kMxFp8) {
    return str_cat(name_of(query.format),
                   " weights are multiplied with activations in the compute dtype, not with ",
                   is_static ? "static" : "dynamic", " scales");
  }
  if (is_static && !abilities.static_scales) {
    return "static activation scales are served by eager alone";
  }
  return "";
}

}  // namespace

Support supports_in_place(const ExpertsQuery& query, const Abilities& abilities) {
  Support support;
  const auto refuse = [&](const auto&... parts) { support.reasons.push_back(str_cat(parts...)); };
  if (query.device.type != DeviceType::kCpu) {
    refuse("it runs on the CPU, not on ", to_string(query.device));
  }
  if (!is_compute_dtype(query.compute_dtype)) {
    refuse("it computes in float32, bfloat16 or float16, not in ", name_of(query.compute_dtype));
  }
  if (is_quantized(query.format)) {
    const std::string fault = scale_layout_fault(query.format, query.scale_layout);
    if (!fault.empty()) refuse(fault);
  }
  const std::string fault = activation_fault(query, abilities);
  if (!fault.empty()) refuse(fault);
  if (query.ep_size != 1) {
    refuse("it runs on one rank, not in an expert-parallel group of ", query.ep_size);
  }
  try {
    validate(query.config);
  } catch (const InvalidArgument& e) {
    refuse(e.what());
  }
  return support;
}

std::unique_ptr<PreparedExperts> prepare_in_place(const ExpertsQuery& query,
                                                  std::shared_ptr<const ExpertsWeights> weights,
                                                  const Abilities& abilities) {
  const Support support = supports_in_place(query, abilities);
  if (!support) {
    throw Unsupported(
        str_cat("prepare experts: this backend cannot serve the request: ", to_string(support)));
  }
  if (weights == nullptr) {
    throw InvalidArgument("prepare experts: weights: expected a layer's weights, got null");
  }
  check_weights("prepare experts", query, *weights);
  for (const auto* matrices : {&weights->gate, &weights->up, &weights->down}) {
    for (const ExpertMatrix& matrix : *matrices) {
      if (query.format != StorageFormat::kFp4 || matrix.col_stride == 1) continue;
      throw InvalidArgument(str_cat("prepare experts: weights: expected fp4 rows with two ",
                                    "consecutive k in a byte, got a column stride of ",
                                    matrix.col_stride));
    }
  }
  if (weights->packed &&
      !(weights->packed->layout() == packed_layout(query.config, query.format))) {
    throw InvalidArgument(
        "prepare experts: weights.packed: expected the packed form of this layer, got one of "
        "another config or format; make it anew with prepack()");
  }
  return std::make_unique<PreparedExperts>(query, std::move(weights));
}

size_t workspace_bytes_in_place(const ExpertsQuery& query, int64_t max_tokens, int num_threads) {
  return plan_memory(query, max_tokens, num_threads).total();
}

}  // namespace cadre::cpu

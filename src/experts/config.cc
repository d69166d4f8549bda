#include <limits>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "core/str_cat.h"
#include "experts/limits.h"

namespace cadre {
namespace {

void check_size(std::string_view field, int64_t value, int64_t max) {
  if (value >= 1 && value <= max) return;
  throw InvalidArgument(
      str_cat("experts config: ", field, ": expected 1 to ", max, ", got ", value));
}

void check_limit(std::string_view field, std::optional<float> value) {
  if (!value || (*value > 0 && *value <= std::numeric_limits<float>::max())) return;
  throw InvalidArgument(
      str_cat("experts config: ", field, ": expected a positive finite number, got ", *value));
}

}  // namespace

void validate(const ExpertsConfig& config) {
  check_size("num_experts", config.num_experts, kMaxExperts);
  check_size("hidden_size", config.hidden_size, kMaxExpertSize);
  check_size("intermediate_size", config.intermediate_size, kMaxExpertSize);
  check_size("top_k", config.top_k, kMaxExperts);
  if (config.top_k > config.num_experts) {
    throw InvalidArgument(str_cat("experts config: top_k: expected at most num_experts = ",
                                  config.num_experts, ", got ", config.top_k));
  }
  check_limit("swiglu_limit", config.swiglu_limit);
  check_limit("swiglu_alpha", config.swiglu_alpha);
  if (!config.has_gate && (config.swiglu_limit || config.swiglu_alpha)) {
    throw InvalidArgument(
        str_cat("experts config: ", config.swiglu_limit ? "swiglu_limit" : "swiglu_alpha",
                ": expected unset without a gate (has_gate = false), got ",
                config.swiglu_limit ? *config.swiglu_limit : *config.swiglu_alpha));
  }
}

std::string to_string(const Support& support) {
  return support.ok() ? "ok" : join(support.reasons, "; ");
}

double stated_bound(DType compute_dtype, StorageFormat format) {
  // Dynamic e4m3 activations alone cost 4e-2 to 5e-2; the other formats keep theirs in the compute
  // dtype.
  if (format == StorageFormat::kFp8Block || format == StorageFormat::kFp8Tensor) return 6e-2;
  switch (compute_dtype) {
    case DType::kF32:
      return 1e-5;
    case DType::kBF16:
      return 4e-3;
    case DType::kF16:
      return 1e-3;
    default:
      throw InvalidArgument(str_cat("stated_bound: expected float32, bfloat16 or float16, got ",
                                    name_of(compute_dtype)));
  }
}

double emulation_bound(const ExpertsQuery& query, DType output_dtype) {
  if (query.activation_scheme == ActivationScheme::kNone) {
    return stated_bound(query.compute_dtype, StorageFormat::kF32);
  }
  // A value of h that lies next to the middle between two codes may become the other one.
  return output_dtype == DType::kBF16 ? 3e-3 : 1e-3;
}

double ExpertsBackend::emulation_bound(const ExpertsQuery& query, DType output_dtype) const {
  return cadre::emulation_bound(query, output_dtype);
}

}  // namespace cadre

#include "experts/stage_policy.h"

#include <algorithm>

namespace cadre {

int64_t decode_threshold(const ExpertsQuery& query) {
  if (query.device.type == DeviceType::kCpu) return 0;
  if (!is_quantized(query.format)) return 32;
  const bool is_mx = query.format == StorageFormat::kFp4 || query.format == StorageFormat::kMxFp8;
  if (is_mx && query.activation_scheme == ActivationScheme::kNone) {
    if (size_of(query.compute_dtype) != 2) return 0;  // only plain kernels
    // Experts' weights are read once for each eight of their tokens.
    const ExpertsConfig& c = query.config;
    return std::min<int64_t>(64, 8 * c.num_experts / std::max<int64_t>(1, c.top_k));
  }
  // FP8 with dynamic activations has decode kernels of its own; the others have none that are fast.
  return query.activation_scheme == ActivationScheme::kDynamic ? 8 : 0;
}

}  // namespace cadre

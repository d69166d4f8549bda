#include "experts/stage_policy.h"

namespace cadre {

int64_t decode_threshold(const ExpertsQuery& query) {
  if (query.device.type == DeviceType::kCpu) return 0;
  if (!is_quantized(query.format)) return 32;
  // FP8 with dynamic activations has decode kernels of its own; the others have none that are fast.
  return query.activation_scheme == ActivationScheme::kDynamic ? 8 : 0;
}

}  // namespace cadre

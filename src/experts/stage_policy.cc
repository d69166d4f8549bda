#include "experts/stage_policy.h"

namespace cadre {

int64_t decode_threshold(const ExpertsQuery& query) {
  if (query.device.type == DeviceType::kCpu) return 0;
  return 32;
}

}  // namespace cadre

#include "backends/cuda/grouped_mm/choose_path.h"

#include "backends/cuda/kernels/weight_layout.h"

namespace cadre::cuda {
namespace {

bool fits(const DeviceMatrices& matrices, const MatrixLayout& layout) {
  return matrices.table == nullptr && matrices.first.col_stride == 1 && fits_tensor_map(layout);
}

}  // namespace

GroupedPath choose_path(const ExpertsConfig& c, DType dtype, const DeviceWeights& weights,
                        int compute_capability) {
  constexpr int64_t kStep = 8;  // elements in 16 bytes
  const bool two_bytes = dtype == DType::kBF16 || dtype == DType::kF16;
  if (compute_capability != 90 || !two_bytes) return GroupedPath::kPortable;
  if (c.hidden_size % kStep != 0 || c.intermediate_size % kStep != 0) return GroupedPath::kPortable;
  const bool fit = (!c.has_gate || fits(weights.gate, gate_layout(c, dtype, weights))) &&
                   fits(weights.up, up_layout(c, dtype, weights)) &&
                   fits(weights.down, down_layout(c, dtype, weights));
  return fit ? GroupedPath::kHopper : GroupedPath::kPortable;
}

}  // namespace cadre::cuda

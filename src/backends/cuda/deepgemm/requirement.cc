#include "backends/cuda/deepgemm/requirement.h"

#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

std::string version(int compute_capability) {
  return str_cat(compute_capability / 10, ".", compute_capability % 10);
}

}  // namespace

std::string unmet_by_gpu(int compute_capability, StorageFormat format,
                         const ScaleLayout& scale_layout) {
  if (compute_capability < 90) {
    return str_cat("needs compute capability 9.0 (Hopper) or later, this GPU has ",
                   version(compute_capability), "; grouped_mm and batched_mm run here");
  }
  const bool is_fp8 = format == StorageFormat::kFp8Block || format == StorageFormat::kFp8Tensor;
  if (compute_capability >= 100 && is_fp8 && scale_layout.dtype != DType::kF8E8M0) {
    return str_cat("needs UE8M0 scales of FP8 weights from compute capability 10.0 on, these are ",
                   name_of(scale_layout.dtype), " and this GPU has ", version(compute_capability),
                   "; Hopper takes them as they are, grouped_mm everywhere");
  }
  if (compute_capability != 90) {
    return str_cat("has kernels for compute capability 9.0 in this build, this GPU has ",
                   version(compute_capability), "; grouped_mm and batched_mm run here");
  }
  return {};
}

}  // namespace cadre::cuda

// FP8 experts on Hopper's e4m3 tensor cores, with kernels compiled ahead of time
// (kernels/hopper_fp8_experts.h). Its twins for all other formats, and for layouts that the copy
// engine cannot describe, are the grouped products of grouped_mm, asked through the registry.
#include <algorithm>
#include <memory>
#include <utility>

#include "backends/cuda/deepgemm/requirement.h"
#include "backends/cuda/device/device_runtime.h"
#include "backends/cuda/kernels/hopper_fp8_experts.h"
#include "backends/cuda/kernels/hopper_fp8_few.h"
#include "backends/cuda/kernels/routing.h"
#include "core/str_cat.h"

namespace cadre::cuda {
namespace {

ExpertsBackend& grouped_mm() { return find_backend("grouped_mm", DeviceType::kCuda); }

bool is_fp8_product(const ExpertsQuery& query) {
  return (query.format == StorageFormat::kFp8Block || query.format == StorageFormat::kFp8Tensor) &&
         query.activation_scheme == ActivationScheme::kDynamic;
}

struct Prepared : CudaPrepared {
  Prepared(const ExpertsQuery& query, std::shared_ptr<const ExpertsWeights> layer)
      : CudaPrepared(query, std::move(layer)) {
    if (fits_hopper_fp8(query, device, compute_capability(query.device.index))) {
      maps = make_hopper_fp8_maps(query, device);
    } else {
      twin = grouped_mm().prepare(query, weights);
    }
  }

  HopperFp8Maps maps;
  std::unique_ptr<PreparedExperts> twin;  // set: the layer runs on grouped_mm
};

class DeepGemm : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery& query) const override {
    Support support = supports_on_gpu(query);
    if (!support.ok()) return support;
    const std::string unmet =
        unmet_by_gpu(compute_capability(query.device.index), query.format, query.scale_layout);
    if (!unmet.empty()) support.reasons.push_back(unmet);
    if (query.config.num_experts > kMaxRoutedExperts) {
      support.reasons.push_back(str_cat("sorts pairs of up to ", kMaxRoutedExperts,
                                        " experts, these are ", query.config.num_experts));
    }
    return support;
  }

  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    return std::make_unique<Prepared>(query, std::move(weights));
  }

  // Hopper's e4m3 products are added with about 13 bits within each 128 of K: values of h that lie
  // near the middle between two codes take the other one. Measured: 2e-3 to 4e-3 with I = 768 and
  // more; with 32 values of h one of them shows (up to 2.7e-2).
  double emulation_bound(const ExpertsQuery& query, DType output_dtype) const override {
    constexpr double kHopperFp8Bound = 3e-2;
    return is_fp8_product(query) ? kHopperFp8Bound
                                 : grouped_mm().emulation_bound(query, output_dtype);
  }

  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int num_threads) const override {
    const size_t twin = grouped_mm().workspace_bytes(query, max_tokens, num_threads);
    if (!is_fp8_product(query)) return twin;
    return std::max(
        {hopper_fp8_bytes(query, max_tokens), hopper_fp8_few_bytes(query, max_tokens), twin});
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    const auto& prepared = static_cast<const Prepared&>(experts);
    if (prepared.twin != nullptr) {
      grouped_mm().forward(*prepared.twin, tokens, workspace, stream);
    } else if (is_hopper_fp8_few(experts.query, tokens.hidden_states.dim(0))) {
      hopper_fp8_few_forward(experts.query, prepared.device, prepared.maps, tokens, workspace,
                             stream);
    } else {
      hopper_fp8_forward(experts.query, prepared.device, prepared.maps, tokens, workspace, stream);
    }
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_deepgemm() { return std::make_unique<DeepGemm>(); }

}  // namespace cadre::cuda

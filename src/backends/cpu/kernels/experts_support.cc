#include "backends/cpu/kernels/experts_call.h"
#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/packed_experts.h"
#include "cadre/error.h"
#include "core/str_cat.h"
#include "experts/check_tokens.h"

namespace cadre::cpu {

Support supports_in_place(const ExpertsQuery& query) {
  Support support;
  const auto refuse = [&](const auto&... parts) { support.reasons.push_back(str_cat(parts...)); };
  if (query.device.type != DeviceType::kCpu) {
    refuse("it runs on the CPU, not on ", to_string(query.device));
  }
  if (!is_compute_dtype(query.compute_dtype)) {
    refuse("it computes in float32, bfloat16 or float16, not in ", name_of(query.compute_dtype));
  }
  if (is_quantized(query.format)) {
    refuse("it reads float32, float16 or bfloat16 weights; ", name_of(query.format),
           " weights are not served on the CPU yet");
  } else if (query.activation_scheme != ActivationScheme::kNone) {
    refuse("activations are quantised with quantised weights only, and these are ",
           name_of(query.format));
  }
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
                                                  std::shared_ptr<const ExpertsWeights> weights) {
  const Support support = supports_in_place(query);
  if (!support) {
    throw Unsupported(
        str_cat("prepare experts: this backend cannot serve the request: ", to_string(support)));
  }
  if (weights == nullptr) {
    throw InvalidArgument("prepare experts: weights: expected a layer's weights, got null");
  }
  check_weights("prepare experts", query, *weights);
  if (weights->packed &&
      !(weights->packed->layout() == packed_layout(query.config, query.format))) {
    throw InvalidArgument(
        "prepare experts: weights.packed: expected the packed form of this layer, got one of "
        "another config or format; make it anew with prepack()");
  }
  return std::make_unique<PreparedExperts>(query, std::move(weights));
}

size_t workspace_bytes_in_place(const ExpertsQuery& query, int64_t max_tokens, int num_threads) {
  return plan_memory(query.config, query.compute_dtype, max_tokens, num_threads).total();
}

}  // namespace cadre::cpu

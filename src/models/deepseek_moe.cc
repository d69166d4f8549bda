#include "models/deepseek_moe.h"

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

constexpr int64_t kMaxSharedExperts = 1 << 10;

RouterOptions read_router(const ConfigReader& config, const ExpertsConfig& experts,
                          double scaling_factor) {
  RouterOptions router;
  router.score = RouterScore::kSigmoid;
  router.group_score = GroupScore::kSumOfTopTwo;
  router.normalize = config.boolean_or("norm_topk_prob", true);
  router.scaling_factor =
      static_cast<float>(config.number_or("routed_scaling_factor", scaling_factor));
  router.num_groups = config.integer_or("n_group", 1, 1);
  router.topk_groups = config.integer_or("topk_group", router.num_groups, 1);
  try {
    validate(router, experts.num_experts, experts.top_k);
  } catch (const InvalidArgument& error) {
    config_error(config, str_cat("n_group and topk_group: ", error.what()));
  }
  return router;
}

}  // namespace

DeepseekFeedForward read_deepseek_feed_forward(const ConfigReader& config,
                                               const DeepseekDefaults& defaults) {
  DeepseekFeedForward result;
  ExpertsConfig& experts = result.moe.experts;
  experts.num_experts = read_num_experts(config);
  experts.top_k = read_top_k(config, experts.num_experts);
  experts.intermediate_size = read_size(config, "moe_intermediate_size");
  result.moe.router = read_router(config, experts, defaults.routed_scaling_factor);
  result.moe.names.correction_bias = "gate.e_score_correction_bias";
  result.first_moe_layer =
      config.integer_or("first_k_dense_replace", defaults.first_k_dense_replace, 0);
  result.dense_width = read_size(config, "intermediate_size");
  result.shared_width =
      experts.intermediate_size *
      config.integer_or("n_shared_experts", defaults.n_shared_experts, 0, kMaxSharedExperts);
  return result;
}

std::variant<Mlp, MoeBlock> build_feed_forward(ModelBuilder& builder, int64_t layer,
                                               const std::string& prefix,
                                               const DeepseekFeedForward& options) {
  if (layer < options.first_moe_layer) return builder.mlp(prefix, options.dense_width);
  std::optional<SharedExpert> shared;
  if (options.shared_width > 0) {
    const std::string name = prefix + "shared_experts.";
    shared = SharedExpert{builder.mlp(name, options.shared_width, "shared expert"), {}};
  }
  return builder.moe(prefix, options.moe, std::move(shared));
}

}  // namespace cadre

#include "dense/dense_ops.h"

#include <string>
#include <vector>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "dense/compiled_dense_ops.h"

namespace cadre {

DenseOps& dense_ops(DeviceType device) {
  std::vector<std::string_view> built;
  for (const CompiledDenseOps& entry : compiled_dense_ops()) {
    if (entry.device == device) return entry.get();
    built.push_back(name_of(entry.device));
  }
  throw Unsupported(
      str_cat("device ", name_of(device),
              ": this build has no dense operations for it; available: ", join(built)));
}

void validate(const RouterOptions& options, int64_t num_experts, int64_t top_k) {
  if (top_k < 1 || top_k > num_experts) {
    throw InvalidArgument(str_cat("router: top_k must lie in [1, number of experts = ", num_experts,
                                  "], got ", top_k));
  }
  const int64_t groups = options.num_groups;
  if (groups < 1 || num_experts % groups != 0) {
    throw InvalidArgument(
        str_cat("router: ", groups, " groups must divide the ", num_experts, " experts evenly"));
  }
  if (options.topk_groups < 1 || options.topk_groups > groups) {
    throw InvalidArgument(str_cat("router: topk_groups must lie in [1, num_groups = ", groups,
                                  "], got ", options.topk_groups));
  }
  if (options.topk_groups * (num_experts / groups) < top_k) {
    throw InvalidArgument(str_cat("router: ", options.topk_groups, " groups of ",
                                  num_experts / groups, " experts cannot give top_k = ", top_k,
                                  " experts"));
  }
}

}  // namespace cadre

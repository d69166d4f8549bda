// Top-k routing. Experts are picked one after the other, each the best after the one before in the
// order (value descending, id ascending), so ids are distinct whatever the values are.
#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "cadre/thread_pool.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
// Value of an expert that may not be picked: compares false with everything.
constexpr float kExcluded = std::numeric_limits<float>::quiet_NaN();

// exp(x - max), for max = -inf (nothing finite) a uniform distribution, for +inf all mass on the
// infinite ones.
float softmax_term(float x, float max) {
  if (std::isinf(max)) return x == max ? 1.0f : 0.0f;
  return std::exp(x - max);
}

// In place: logits to the scores that weigh. NaN becomes minus infinity first.
void score_row(float* scores, int64_t num_experts, RouterScore kind) {
  float max = -kInfinity;
  for (int64_t e = 0; e < num_experts; ++e) {
    if (std::isnan(scores[e])) scores[e] = -kInfinity;
    max = std::max(max, scores[e]);
  }
  if (kind == RouterScore::kSoftmaxThenTopK) {
    float sum = 0;
    for (int64_t e = 0; e < num_experts; ++e) sum += scores[e] = softmax_term(scores[e], max);
    for (int64_t e = 0; e < num_experts; ++e) scores[e] /= sum;
  } else if (kind == RouterScore::kSigmoid) {
    for (int64_t e = 0; e < num_experts; ++e) scores[e] = 1.0f / (1.0f + std::exp(-scores[e]));
  } else if (kind == RouterScore::kSqrtSoftplus) {
    for (int64_t e = 0; e < num_experts; ++e) {
      const float x = scores[e];
      scores[e] = std::sqrt(x > 20.0f ? x : std::log1p(std::exp(x)));
    }
  }
}

// The values that pick: the logits where scores are monotonous in them (no ties by rounding), else
// score plus correction bias.
void choice_row(const float* logits, const float* scores, const float* bias, int64_t num_experts,
                RouterScore kind, float* choice) {
  const bool by_logit =
      kind == RouterScore::kSoftmaxThenTopK || kind == RouterScore::kTopKThenSoftmax;
  for (int64_t e = 0; e < num_experts; ++e) {
    const float value = (by_logit ? logits[e] : scores[e]) + (bias != nullptr ? bias[e] : 0.0f);
    choice[e] = std::isnan(value) ? -kInfinity : value;
  }
}

// The id after (`last_value`, `last_id`) in the order; -1 when none is left.
int64_t next_best(const float* values, int64_t count, float last_value, int64_t last_id) {
  int64_t best = -1;
  for (int64_t e = 0; e < count; ++e) {
    const bool after = values[e] < last_value || (values[e] == last_value && e > last_id);
    if (after && (best < 0 || values[e] > values[best])) best = e;
  }
  return best;
}

float group_value(const float* choice, int64_t size, GroupScore kind) {
  float first = -kInfinity;
  float second = -kInfinity;
  for (int64_t e = 0; e < size; ++e) {
    second = std::max(second, std::min(first, choice[e]));
    first = std::max(first, choice[e]);
  }
  return kind == GroupScore::kMax || size == 1 ? first : first + second;
}

// Excludes all but the best groups. `values` is scratch for one value a group.
void limit_groups(float* choice, int64_t num_experts, const RouterOptions& options, float* values) {
  const int64_t size = num_experts / options.num_groups;
  for (int64_t g = 0; g < options.num_groups; ++g) {
    values[g] = group_value(choice + g * size, size, options.group_score);
  }
  float last_value = kInfinity;
  int64_t last_id = -1;
  for (int64_t i = 0; i < options.topk_groups; ++i) {
    last_id = next_best(values, options.num_groups, last_value, last_id);
    last_value = values[last_id];
  }
  for (int64_t g = 0; g < options.num_groups; ++g) {
    const bool kept = values[g] > last_value || (values[g] == last_value && g <= last_id);
    if (!kept) std::fill_n(choice + g * size, size, kExcluded);
  }
}

struct RouteArgs {
  int64_t num_experts;
  int64_t top_k;
  const float* bias;
  const RouterOptions& options;
};

void weigh(const RouteArgs& args, const float* scores, const int32_t* ids, float* weights) {
  const int64_t top_k = args.top_k;
  const bool softmax_over_picked = args.options.score == RouterScore::kTopKThenSoftmax;
  float sum = 0;
  for (int64_t j = 0; j < top_k; ++j) {
    const float score = scores[ids[j]];
    weights[j] = softmax_over_picked ? softmax_term(score, scores[ids[0]]) : score;
    sum += weights[j];
  }
  const bool divide = (args.options.normalize || softmax_over_picked) && sum > 0;
  for (int64_t j = 0; j < top_k; ++j) {
    weights[j] = (divide ? weights[j] / sum : weights[j]) * args.options.scaling_factor;
  }
}

// `scratch` holds 3 * num_experts floats.
void route_row(const RouteArgs& args, const float* logits, float* scratch, int32_t* ids,
               float* weights) {
  const int64_t num_experts = args.num_experts;
  float* scores = scratch;
  float* choice = scratch + num_experts;
  std::copy_n(logits, num_experts, scores);
  score_row(scores, num_experts, args.options.score);
  choice_row(logits, scores, args.bias, num_experts, args.options.score, choice);
  if (args.options.topk_groups < args.options.num_groups) {
    limit_groups(choice, num_experts, args.options, scratch + 2 * num_experts);
  }
  float last_value = kInfinity;
  int64_t last_id = -1;
  for (int64_t j = 0; j < args.top_k; ++j) {
    last_id = next_best(choice, num_experts, last_value, last_id);
    CADRE_DCHECK(last_id >= 0);
    last_value = choice[last_id];
    ids[j] = static_cast<int32_t>(last_id);
  }
  weigh(args, scores, ids, weights);
}

// Tables lie in the checkpoint's file, at any address.
int32_t table_entry(const TensorView& table, int64_t i) {
  const std::byte* from = at(table.data(), table.dtype(), i);
  if (table.dtype() == DType::kI32) {
    int32_t id;
    std::memcpy(&id, from, sizeof(id));
    return id;
  }
  int64_t id;
  std::memcpy(&id, from, sizeof(id));
  return static_cast<int32_t>(id);
}

size_t scratch_bytes(int64_t num_experts) {
  return Workspace::padded(3 * static_cast<size_t>(num_experts) * sizeof(float));
}

}  // namespace

void CpuDenseOps::route(const TensorView& logits, const TensorView& correction_bias,
                        const RouterOptions& options, MutableTensorView top_k_index,
                        MutableTensorView top_k_weights, Workspace& workspace,
                        const Stream& stream) {
  const int64_t num_experts = logits.dim(1);
  const int64_t top_k = top_k_index.dim(1);
  validate(options, num_experts, top_k);
  const RouteArgs args{num_experts, top_k, correction_bias ? correction_bias.as<float>() : nullptr,
                       options};
  const Workspace::Scope scope(workspace);
  const size_t stride = scratch_bytes(num_experts);
  auto* scratch = static_cast<std::byte*>(
      workspace.allocate(stride * static_cast<size_t>(stream.threads->num_threads())));
  const float* rows = logits.as<float>();
  auto* ids = top_k_index.as<int32_t>();
  auto* weights = top_k_weights.as<float>();
  const int64_t cost = num_experts * (20 + top_k);
  for_row_ranges(stream, logits.dim(0), cost, [&](int64_t begin, int64_t end, int thread) {
    auto* mine = reinterpret_cast<float*>(scratch + stride * static_cast<size_t>(thread));
    for (int64_t t = begin; t < end; ++t) {
      route_row(args, rows + t * num_experts, mine, ids + t * top_k, weights + t * top_k);
    }
  });
}

void CpuDenseOps::route_by_table(const TensorView& logits, const TensorView& token_ids,
                                 const TensorView& table, const RouterOptions& options,
                                 MutableTensorView top_k_index, MutableTensorView top_k_weights,
                                 Workspace& workspace, const Stream& stream) {
  const int64_t num_experts = logits.dim(1);
  const int64_t top_k = top_k_index.dim(1);
  CADRE_ASSERT(table.dim(1) == top_k && options.score != RouterScore::kTopKThenSoftmax);
  const RouteArgs args{num_experts, top_k, nullptr, options};
  const Workspace::Scope scope(workspace);
  const size_t stride = scratch_bytes(num_experts);
  auto* scratch = static_cast<std::byte*>(
      workspace.allocate(stride * static_cast<size_t>(stream.threads->num_threads())));
  const float* rows = logits.as<float>();
  const int32_t* tokens = token_ids.as<int32_t>();
  for_row_ranges(
      stream, logits.dim(0), 20 * num_experts, [&](int64_t begin, int64_t end, int thread) {
        auto* scores = reinterpret_cast<float*>(scratch + stride * static_cast<size_t>(thread));
        for (int64_t t = begin; t < end; ++t) {
          int32_t* ids = top_k_index.as<int32_t>() + t * top_k;
          for (int64_t j = 0; j < top_k; ++j) ids[j] = table_entry(table, tokens[t] * top_k + j);
          std::copy_n(rows + t * num_experts, num_experts, scores);
          score_row(scores, num_experts, options.score);
          weigh(args, scores, ids, top_k_weights.as<float>() + t * top_k);
        }
      });
}

size_t CpuDenseOps::route_workspace_bytes(int64_t num_experts, int num_threads) const {
  return scratch_bytes(num_experts) * static_cast<size_t>(num_threads);
}

}  // namespace cadre::cpu

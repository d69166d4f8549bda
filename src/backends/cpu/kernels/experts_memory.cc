#include "backends/cpu/kernels/experts_memory.h"

#include <algorithm>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/panel_product.h"
#include "backends/cpu/kernels/scalars.h"
#include "cadre/error.h"
#include "core/str_cat.h"
#include "experts/routing_plan.h"
#include "quant/activations.h"

namespace cadre::cpu {
namespace {

// Large enough that chunking costs nothing (thousands of tokens for today's models), small beside
// the weights.
constexpr int64_t kRowBudget = int64_t{384} << 20;  // of x, where it must be arranged, and h
constexpr int64_t kResultBudget = int64_t{32} << 20;

constexpr int64_t round_up(int64_t value, int64_t unit) { return (value + unit - 1) / unit * unit; }

// Columns of float32 results that `bytes` hold for so many pairs: whole panels, at least one.
int64_t columns_that_fit(int64_t hidden_size, int64_t pairs, int64_t bytes) {
  const int64_t all = round_up(hidden_size, kPanelColumns);
  const int64_t row_floats = bytes / (std::max<int64_t>(pairs, 1) * int64_t{sizeof(float)});
  return std::clamp(row_floats / kPanelColumns * kPanelColumns, int64_t{kPanelColumns}, all);
}

int64_t result_bytes_for(int64_t hidden_size, int64_t pairs) {
  const int64_t one_column = pairs * int64_t{sizeof(float)};
  return std::min(one_column * round_up(hidden_size, kPanelColumns),
                  std::max(kResultBudget, one_column * kPanelColumns));
}

// Rows that so many pairs can take when each block's are padded to a multiple of 16; blocks of up
// to 16 rows are not padded.
int64_t padded_rows(int64_t num_experts, int64_t pairs) {
  const int64_t blocks = std::min(pairs / 17, num_experts + pairs / (kMaxBlockRows / 2));
  return pairs + 15 * blocks;
}

// Rows of x that are quantised in a chunk: with a scale for each matrix every pair has its own, for
// gate and for up.
int64_t code_rows(const ExpertsQuery& query, int64_t tokens) {
  if (query.activation_scheme == ActivationScheme::kNone) return 0;
  if (query.activation_scheme == ActivationScheme::kDynamic) return tokens;
  return tokens * query.config.top_k * (query.config.has_gate ? 2 : 1);
}

}  // namespace

int64_t activation_group(StorageFormat format) {
  return format == StorageFormat::kFp4 ? kFp4ActivationGroup : kActivationGroup;
}

MemoryPlan plan_memory(const ExpertsQuery& query, int64_t max_tokens, int num_threads) {
  if (max_tokens < 0) {
    throw InvalidArgument(
        str_cat("experts workspace: max_tokens: expected 0 or more, got ", max_tokens));
  }
  const ExpertsConfig& config = query.config;
  const KernelTable& kernels = kernels_for(active_isa(), query.compute_dtype, query.format);
  const bool arranges = kernels.multiply_in_place != nullptr;
  const bool quantizes = query.activation_scheme != ActivationScheme::kNone;
  const int64_t element = bytes_of(element_of(query.compute_dtype));
  const int64_t unit = arranges ? kStepK : 1;
  const int64_t group = activation_group(query.format);
  const auto scale_bytes = [&](int64_t k) { return (k + group - 1) / group * 4; };
  MemoryPlan plan;
  plan.input_stride = arranges ? round_up(config.hidden_size, unit) * element : 0;
  // h that is quantised stays in float32 until then, in place.
  plan.h_stride =
      quantizes ? config.intermediate_size * 4 : round_up(config.intermediate_size, unit) * element;
  const int64_t code_bytes = config.hidden_size * 2;
  const int64_t row_bytes = std::max<int64_t>(plan.input_stride + plan.h_stride, kPanelColumns * 4);
  const int64_t token_bytes = config.top_k * row_bytes + code_rows(query, 1) * code_bytes;
  plan.chunk_tokens = std::min(max_tokens, std::max<int64_t>(1, kRowBudget / token_bytes));
  const int64_t pairs = plan.chunk_tokens * config.top_k;
  const int64_t rows = arranges ? padded_rows(config.num_experts, pairs) : pairs;
  const int64_t result_bytes = result_bytes_for(config.hidden_size, pairs);
  plan.range_columns = columns_that_fit(config.hidden_size, pairs, result_bytes);
  const auto padded = [](int64_t bytes) { return Workspace::padded(static_cast<size_t>(bytes)); };
  plan.routing_bytes = routing_plan_bytes(config.num_experts, plan.chunk_tokens, config.top_k);
  plan.block_bytes = padded(pairs * int64_t{sizeof(RowBlock)});
  plan.first_block_bytes = padded((config.num_experts + 1) * int64_t{sizeof(int64_t)});
  plan.used_bytes = padded(pairs);
  plan.input_bytes = padded(rows * plan.input_stride);
  plan.intermediate_bytes = padded(rows * plan.h_stride);
  plan.result_bytes = padded(result_bytes);
  plan.scratch_bytes = PerThreadScratch::bytes(num_threads);
  plan.code_bytes = padded(code_rows(query, plan.chunk_tokens) * code_bytes);
  if (query.activation_scheme == ActivationScheme::kDynamic) {
    plan.x_scale_bytes = padded(plan.chunk_tokens * scale_bytes(config.hidden_size));
    plan.h_scale_bytes = padded(pairs * scale_bytes(config.intermediate_size));
  }
  return plan;
}

}  // namespace cadre::cpu

#include "backends/cpu/kernels/experts_memory.h"

#include <algorithm>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/panel_product.h"
#include "backends/cpu/kernels/scalars.h"
#include "cadre/error.h"
#include "core/str_cat.h"
#include "experts/routing_plan.h"

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

}  // namespace

MemoryPlan plan_memory(const ExpertsConfig& config, DType compute_dtype, int64_t max_tokens,
                       int num_threads) {
  if (max_tokens < 0) {
    throw InvalidArgument(
        str_cat("experts workspace: max_tokens: expected 0 or more, got ", max_tokens));
  }
  const bool arranges = kernels_for(active_isa(), compute_dtype).multiply_in_place != nullptr;
  const int64_t element = bytes_of(element_of(compute_dtype));
  const int64_t unit = arranges ? kStepK : 1;
  MemoryPlan plan;
  plan.input_stride = arranges ? round_up(config.hidden_size, unit) * element : 0;
  plan.h_stride = round_up(config.intermediate_size, unit) * element;
  const int64_t row_bytes = std::max<int64_t>(plan.input_stride + plan.h_stride, kPanelColumns * 4);
  plan.chunk_tokens =
      std::min(max_tokens, std::max<int64_t>(1, kRowBudget / (config.top_k * row_bytes)));
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
  return plan;
}

}  // namespace cadre::cpu

// What the CPU backends of the experts share: everything but the order in which (rows, panel) tasks
// are handed to the threads.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "backends/cpu/kernels/experts_memory.h"
#include "backends/cpu/kernels/panel_product.h"
#include "cadre/experts.h"
#include "cadre/function_ref.h"
#include "cadre/thread_pool.h"
#include "experts/routing_plan.h"

namespace cadre::cpu {

/// What not every CPU backend does.
struct Abilities {
  bool static_scales = false;      // ActivationScheme::kStatic: a scale for each matrix
  bool quantizes_for_fp4 = false;  // ActivationScheme::kDynamic with fp4 weights
};

/// The answer of every CPU backend.
Support supports_in_place(const ExpertsQuery& query, const Abilities& abilities = {});

/// Checks the weights against the query; adds no bytes. Throws Unsupported when supports_in_place
/// is not ok.
std::unique_ptr<PreparedExperts> prepare_in_place(const ExpertsQuery& query,
                                                  std::shared_ptr<const ExpertsWeights> weights,
                                                  const Abilities& abilities = {});

size_t workspace_bytes_in_place(const ExpertsQuery& query, int64_t max_tokens, int num_threads);

/// Gate and up columns of the same h share a panel, half and half.
inline constexpr int kGateColumns = kPanelColumns / 2;

struct RowBlockList {
  const RowBlock* blocks = nullptr;
  int64_t count = 0;
};

/// Columns [begin, end) of the output.
struct ColumnRange {
  int64_t begin = 0;
  int64_t end = 0;
};

/// The work of one chunk of tokens. The order is: gate_up of all blocks, then for each range of
/// columns down of all blocks and combine.
class ExpertsCall {
 public:
  ExpertsCall(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
              ThreadPool& threads);

  const RoutingPlan& plan() const { return plan_; }

  /// The blocks of the i-th active expert, or of all of them, in the order of the sorted pairs.
  RowBlockList blocks_of(int64_t active_index) const;
  RowBlockList blocks_of_all() const;
  /// One block for every pair, instead of the other blocks from now on.
  RowBlockList single_rows();

  /// The ranges of columns that the result memory can hold one after the other.
  int64_t num_ranges() const;
  ColumnRange range(int64_t i) const;

  /// h = gate function of the rows' gate and up projections: one parallel pass over blocks x
  /// panels.
  void gate_up(RowBlockList list);
  /// The rows' down projections, with bias and routing weight: one parallel pass over blocks x
  /// panels.
  void down(RowBlockList list, ColumnRange range);
  /// The sum over each token's slots, in their order; writes every output row.
  void combine(ColumnRange range);

 private:
  int64_t num_gate_up_panels() const;
  using Arrangement = void (*)(const ArrangeArgs&);
  Arrangement find_arrangement() const;
  void make_blocks();
  void arrange_inputs(RowBlockList list);
  void quantize_tokens();
  void quantize_inputs(RowBlockList list);
  void quantize_h(RowBlockList list);
  const void* input_row(int64_t row) const;
  const void* token_row(int64_t token) const;
  char* codes_of(int64_t row) const { return codes_ + row * config_.hidden_size * 2; }
  int64_t groups_of(int64_t k) const { return (k + group_ - 1) / group_; }
  RowSet input_rows(const RowBlock& block, bool is_up, const void** rows,
                    const float** scales) const;
  RowSet h_rows(const RowBlock& block, const void** rows, const float** scales) const;
  char* h_of(const RowBlock& block) const;
  void for_each_panel(
      int64_t count, FunctionRef<int(int64_t task, PanelPart* parts, const void** packed)> describe,
      FunctionRef<void(int64_t task, const PanelParts& parts, int thread)> run);
  int gate_up_parts(const RowBlock& block, int64_t panel, PanelPart* parts) const;
  PanelPart down_part(const RowBlock& block, ColumnRange range, int64_t panel) const;
  void gate_up_panel(const RowBlock& block, const PanelParts& parts,
                     const PanelScratch& scratch) const;
  void multiply_up_again(const RowBlock& block, const PanelParts& parts,
                         const PanelScratch& scratch) const;
  void down_panel(const RowBlock& block, ColumnRange range, const PanelParts& parts,
                  const PanelScratch& scratch) const;
  bool gates_in_product(int rows) const;
  GateArgs gate_args(const RowBlock& block, int64_t first, int columns, float* gate_bias,
                     float* up_bias) const;
  char* h_step(const RowBlock& block, int64_t first) const;
  void write_gated(const RowBlock& block, int64_t first, GateArgs& args) const;
  void combine_token(int64_t token, ColumnRange range) const;

  const ExpertsConfig& config_;
  const ExpertsWeights& weights_;
  const RoutedTokens& tokens_;
  ThreadPool& threads_;
  const KernelTable& kernels_;
  Element compute_;
  ActivationScheme activations_;
  int64_t group_;  // k under one scale of activations
  MemoryPlan memory_;
  RoutingPlan plan_;
  Arrangement arrange_;  // of x and h, for weights that are read directly; null = rows as they are
  RowBlock* blocks_;     // [num_blocks_]
  int64_t num_blocks_ = 0;
  int64_t* first_block_;  // [num_active + 1] of each active expert
  uint8_t* used_;         // [num_tokens * top_k] the slot names an expert
  char* inputs_;          // the blocks' rows of x, arranged; blocks of one row have theirs in x
  // [num_pairs, intermediate_size] in the compute dtype, sorted order; or arranged; or float32,
  // each row of which becomes codes in place
  char* h_;
  // Quantised x, bfloat16 codes [rows, hidden_size]: of each token; static: of each pair in sorted
  // order for gate, then for up.
  char* codes_;
  float* x_scales_;  // [tokens, groups] dynamic only
  float* h_scales_;  // [num_pairs, groups] in sorted order, dynamic only
  float* results_;   // [num_tokens * top_k, range_columns], by pair
  PerThreadScratch scratch_;
};

/// Calls run(call) for each chunk of the tokens.
void for_each_chunk(const PreparedExperts& experts, const RoutedTokens& tokens,
                    Workspace& workspace, ThreadPool& threads,
                    FunctionRef<void(ExpertsCall& call)> run);

}  // namespace cadre::cpu

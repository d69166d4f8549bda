#include "backends/cpu/kernels/experts_call.h"

#include <algorithm>
#include <limits>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/scalars.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cpu {
namespace {

// Gate and up columns of the same h share a panel, half and half.
constexpr int kGateColumns = kPanelColumns / 2;

// Large enough that chunking costs nothing (thousands of tokens for today's models), small beside
// the weights.
constexpr int64_t kIntermediateBudget = int64_t{128} << 20;
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

GateKind gate_kind(const ExpertsConfig& config) {
  if (config.swiglu_alpha) return GateKind::kScaledSwiglu;
  switch (config.activation) {
    case Activation::kSilu:
      return GateKind::kSilu;
    case Activation::kGelu:
      return GateKind::kGelu;
    case Activation::kGeluTanh:
      return GateKind::kGeluTanh;
    case Activation::kRelu:
      return GateKind::kRelu;
    case Activation::kRelu2:
      return GateKind::kRelu2;
  }
  CADRE_ASSERT(false && "unknown activation");
  return GateKind::kSilu;
}

Element stored_element(StorageFormat format) {
  CADRE_ASSERT(!is_quantized(format));
  if (format == StorageFormat::kF32) return Element::kF32;
  return format == StorageFormat::kF16 ? Element::kF16 : Element::kBF16;
}

PlainMatrix plain(const ExpertMatrix& matrix, Element type) {
  return {matrix.data, matrix.row_stride, matrix.col_stride, type};
}

// Biases [first, first + count) of an expert; zeros when the layer has none.
void read_bias(const ExpertsWeights& weights, const std::vector<ExpertVector>& biases,
               int64_t expert, int64_t first, int count, float* out) {
  if (biases.empty()) return;
  const ExpertVector& bias = biases[static_cast<size_t>(expert)];
  read_floats(bias.data, bias.stride, element_of(weights.bias_dtype), first, count, out);
}

}  // namespace

MemoryPlan plan_memory(const ExpertsConfig& config, DType compute_dtype, int64_t max_tokens,
                       int num_threads) {
  if (max_tokens < 0) {
    throw InvalidArgument(
        str_cat("experts workspace: max_tokens: expected 0 or more, got ", max_tokens));
  }
  const int64_t h_bytes = config.intermediate_size * bytes_of(element_of(compute_dtype));
  const int64_t token_bytes = config.top_k * std::max<int64_t>(h_bytes, kPanelColumns * 4);
  MemoryPlan plan;
  plan.chunk_tokens = std::min(max_tokens, std::max<int64_t>(1, kIntermediateBudget / token_bytes));
  const int64_t pairs = plan.chunk_tokens * config.top_k;
  const auto padded = [](int64_t bytes) { return Workspace::padded(static_cast<size_t>(bytes)); };
  plan.routing_bytes = routing_plan_bytes(config.num_experts, plan.chunk_tokens, config.top_k);
  plan.block_bytes = padded(pairs * int64_t{sizeof(RowBlock)});
  plan.used_bytes = padded(pairs);
  plan.intermediate_bytes = padded(pairs * h_bytes);
  plan.result_bytes = padded(result_bytes_for(config.hidden_size, pairs));
  plan.scratch_bytes = PerThreadScratch::bytes(num_threads);
  return plan;
}

ExpertsCall::ExpertsCall(const PreparedExperts& experts, const RoutedTokens& tokens,
                         Workspace& workspace, ThreadPool& threads)
    : config_(experts.query.config),
      weights_(*experts.weights),
      tokens_(tokens),
      threads_(threads),
      kernels_(kernels_for(active_isa(), experts.query.compute_dtype)),
      compute_(element_of(experts.query.compute_dtype)),
      stored_(stored_element(experts.weights->format)),
      plan_(make_routing_plan(tokens.top_k_index, config_.num_experts, workspace)),
      scratch_(workspace, threads.num_threads()) {
  const int64_t pairs = tokens.top_k_index.numel();
  blocks_ = workspace.allocate<RowBlock>(pairs);
  used_ = workspace.allocate<uint8_t>(pairs);
  h_ = workspace.allocate<char>(pairs * config_.intermediate_size * bytes_of(compute_));
  const int64_t result_bytes = result_bytes_for(config_.hidden_size, pairs);
  results_ = static_cast<float*>(workspace.allocate(static_cast<size_t>(result_bytes)));
  range_columns_ = columns_that_fit(config_.hidden_size, pairs, result_bytes);
  std::fill_n(used_, pairs, uint8_t{0});
  for (int64_t i = 0; i < plan_.num_pairs; ++i) used_[plan_.pairs[i]] = 1;
}

void ExpertsCall::append_blocks(int64_t active_index, int64_t* count) {
  const int64_t begin = plan_.offsets[active_index];
  const int64_t end = plan_.offsets[active_index + 1];
  const RowBlocks split = split_rows(end - begin);
  for (int64_t i = 0; i < split.count; ++i) {
    const int64_t first = begin + i * split.rows_per_block;
    blocks_[(*count)++] = {plan_.active[active_index], first,
                           std::min(end, first + split.rows_per_block)};
  }
}

RowBlockList ExpertsCall::blocks_of(int64_t active_index) {
  int64_t count = 0;
  append_blocks(active_index, &count);
  return {blocks_, count};
}

RowBlockList ExpertsCall::blocks_of_all() {
  int64_t count = 0;
  for (int64_t i = 0; i < plan_.num_active; ++i) append_blocks(i, &count);
  return {blocks_, count};
}

RowBlockList ExpertsCall::single_rows() {
  for (int64_t i = 0; i < plan_.num_active; ++i) {
    for (int64_t row = plan_.offsets[i]; row < plan_.offsets[i + 1]; ++row) {
      blocks_[row] = {plan_.active[i], row, row + 1};
    }
  }
  return {blocks_, plan_.num_pairs};
}

int64_t ExpertsCall::num_ranges() const {
  return (config_.hidden_size + range_columns_ - 1) / range_columns_;
}

ColumnRange ExpertsCall::range(int64_t i) const {
  return {i * range_columns_, std::min(config_.hidden_size, (i + 1) * range_columns_)};
}

int64_t ExpertsCall::num_gate_up_panels() const {
  const int columns = config_.has_gate ? kGateColumns : kPanelColumns;
  return (config_.intermediate_size + columns - 1) / columns;
}

void ExpertsCall::gate_up(RowBlockList list) {
  const int64_t panels = num_gate_up_panels();
  threads_.parallel_for(list.count * panels, [&](int64_t task, int thread) {
    gate_up_panel(list.blocks[task / panels], task % panels, scratch_[thread]);
  });
}

void ExpertsCall::down(RowBlockList list, ColumnRange range) {
  const int64_t panels = (range.end - range.begin + kPanelColumns - 1) / kPanelColumns;
  threads_.parallel_for(list.count * panels, [&](int64_t task, int thread) {
    down_panel(list.blocks[task / panels], range, task % panels, scratch_[thread]);
  });
}

void ExpertsCall::gate_up_panel(const RowBlock& block, int64_t panel,
                                const PanelScratch& scratch) const {
  const TensorView& x = tokens_.hidden_states;
  const void* rows[kMaxBlockRows];
  const int count = static_cast<int>(block.end - block.begin);
  for (int r = 0; r < count; ++r) {
    const int64_t token = plan_.pairs[block.begin + r] / config_.top_k;
    rows[r] = static_cast<const char*>(x.data()) + token * x.stride(0) * bytes_of(compute_);
  }
  const int width = config_.has_gate ? kGateColumns : kPanelColumns;
  const int64_t first = panel * width;
  const int columns = static_cast<int>(std::min<int64_t>(width, config_.intermediate_size - first));
  const auto expert = static_cast<size_t>(block.expert);
  PanelPart parts[2];
  int num_parts = 0;
  if (config_.has_gate) {
    parts[num_parts++] = {plain(weights_.gate[expert], stored_), first, columns, 0, width};
  }
  parts[num_parts] = {plain(weights_.up[expert], stored_), first, columns, num_parts * kGateColumns,
                      width};
  ++num_parts;
  panel_product(kernels_, {rows, count, compute_}, config_.hidden_size, parts, num_parts, scratch);
  apply_gate(block, first, columns, scratch.acc);
}

void ExpertsCall::apply_gate(const RowBlock& block, int64_t first, int columns,
                             const float* acc) const {
  float gate_bias[kPanelColumns] = {};
  float up_bias[kPanelColumns] = {};
  read_bias(weights_, weights_.gate_bias, block.expert, first, columns, gate_bias);
  read_bias(weights_, weights_.up_bias, block.expert, first, columns, up_bias);
  GateArgs args{};
  args.acc = acc;
  args.num_rows = static_cast<int>(block.end - block.begin);
  args.columns = columns;
  args.has_gate = config_.has_gate;
  args.kind = gate_kind(config_);
  args.limit = config_.swiglu_limit.value_or(std::numeric_limits<float>::infinity());
  args.alpha = config_.swiglu_alpha.value_or(1.0f);
  args.gate_bias = gate_bias;
  args.up_bias = up_bias;
  args.out_type = compute_;
  args.out = h_ + (block.begin * config_.intermediate_size + first) * bytes_of(compute_);
  args.out_stride = config_.intermediate_size;
  kernels_.gate(args);
}

void ExpertsCall::down_panel(const RowBlock& block, ColumnRange range, int64_t panel,
                             const PanelScratch& scratch) const {
  const int64_t first = range.begin + panel * kPanelColumns;
  const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, range.end - first));
  const int count = static_cast<int>(block.end - block.begin);
  const TensorView& weights = tokens_.top_k_weights;
  const Element weight_type = element_of(weights.dtype());
  const void* rows[kMaxBlockRows];
  void* out[kMaxBlockRows];
  float scales[kMaxBlockRows];
  for (int r = 0; r < count; ++r) {
    rows[r] = h_ + (block.begin + r) * config_.intermediate_size * bytes_of(compute_);
    const int64_t pair = plan_.pairs[block.begin + r];
    out[r] = results_ + pair * range_columns_ + (first - range.begin);
    const int64_t at = pair / config_.top_k * weights.stride(0) + pair % config_.top_k;
    scales[r] = read_float(static_cast<const char*>(weights.data()) + at * bytes_of(weight_type),
                           weight_type);
  }
  const PanelPart part{plain(weights_.down[static_cast<size_t>(block.expert)], stored_), first,
                       columns, 0, kPanelColumns};
  panel_product(kernels_, {rows, count, compute_}, config_.intermediate_size, &part, 1, scratch);
  float bias[kPanelColumns] = {};
  read_bias(weights_, weights_.down_bias, block.expert, first, columns, bias);
  kernels_.finish({scratch.acc, count, columns, bias, scales, Element::kF32, out});
}

void ExpertsCall::combine(ColumnRange range) {
  threads_.parallel_ranges(tokens_.output.dim(0), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) combine_token(token, range);
  });
}

void ExpertsCall::combine_token(int64_t token, ColumnRange range) const {
  const MutableTensorView& output = tokens_.output;
  const Element type = element_of(output.dtype());
  const int64_t first_pair = token * config_.top_k;
  kernels_.combine({results_ + first_pair * range_columns_, range_columns_, used_ + first_pair,
                    config_.top_k, range.end - range.begin, type,
                    static_cast<char*>(output.mutable_data()) +
                        (token * output.stride(0) + range.begin) * bytes_of(type)});
}

void for_each_chunk(const PreparedExperts& experts, const RoutedTokens& tokens,
                    Workspace& workspace, ThreadPool& threads,
                    FunctionRef<void(ExpertsCall& call)> run) {
  const int64_t num_tokens = tokens.hidden_states.dim(0);
  const MemoryPlan memory = plan_memory(experts.query.config, experts.query.compute_dtype,
                                        num_tokens, threads.num_threads());
  for (int64_t begin = 0; begin < num_tokens; begin += memory.chunk_tokens) {
    const int64_t end = std::min(num_tokens, begin + memory.chunk_tokens);
    const RoutedTokens chunk{
        tokens.hidden_states.slice(begin, end), tokens.top_k_index.slice(begin, end),
        tokens.top_k_weights.slice(begin, end), tokens.output.slice(begin, end)};
    const Workspace::Scope scope(workspace);
    ExpertsCall call(experts, chunk, workspace, threads);
    run(call);
  }
}

}  // namespace cadre::cpu

#include "backends/cpu/kernels/experts_call.h"

#include <algorithm>
#include <limits>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/packed_experts.h"
#include "backends/cpu/kernels/scalars.h"
#include "backends/cpu/kernels/weight_matrix.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cpu {
namespace {

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

// Biases [first, first + count) of an expert; zeros when the layer has none.
void read_bias(const ExpertsWeights& weights, const std::vector<ExpertVector>& biases,
               int64_t expert, int64_t first, int count, float* out) {
  if (biases.empty()) return;
  const ExpertVector& bias = biases[static_cast<size_t>(expert)];
  read_floats(bias.data, bias.stride, element_of(weights.bias_dtype), first, count, out);
}

}  // namespace

ExpertsCall::ExpertsCall(const PreparedExperts& experts, const RoutedTokens& tokens,
                         Workspace& workspace, ThreadPool& threads)
    : config_(experts.query.config),
      weights_(*experts.weights),
      tokens_(tokens),
      threads_(threads),
      kernels_(kernels_for(active_isa(), experts.query.compute_dtype, weights_.format)),
      compute_(element_of(experts.query.compute_dtype)),
      activations_(experts.query.activation_scheme),
      group_(activation_group(weights_.format)),
      memory_(plan_memory(experts.query, tokens.hidden_states.dim(0), threads.num_threads())),
      plan_(make_routing_plan(tokens.top_k_index, config_.num_experts, workspace)),
      arrange_(find_arrangement()),
      scratch_(workspace, threads.num_threads()) {
  const int64_t pairs = tokens.top_k_index.numel();
  blocks_ = workspace.allocate<RowBlock>(pairs);
  first_block_ = workspace.allocate<int64_t>(config_.num_experts + 1);
  used_ = workspace.allocate<uint8_t>(pairs);
  inputs_ = static_cast<char*>(workspace.allocate(memory_.input_bytes));
  h_ = static_cast<char*>(workspace.allocate(memory_.intermediate_bytes));
  results_ = static_cast<float*>(workspace.allocate(memory_.result_bytes));
  codes_ = static_cast<char*>(workspace.allocate(memory_.code_bytes));
  x_scales_ = static_cast<float*>(workspace.allocate(memory_.x_scale_bytes));
  h_scales_ = static_cast<float*>(workspace.allocate(memory_.h_scale_bytes));
  if (activations_ == ActivationScheme::kDynamic) quantize_tokens();
  make_blocks();
  std::fill_n(used_, pairs, uint8_t{0});
  for (int64_t i = 0; i < plan_.num_pairs; ++i) used_[plan_.pairs[i]] = 1;
}

// How rows must lie for the products that read weights directly; null where weights are packed or
// unpacked into scratch memory first.
ExpertsCall::Arrangement ExpertsCall::find_arrangement() const {
  if (weights_.packed) {
    return compute_ == kernels_.row_type && element_of(weights_.format) == compute_ ? kernels_.tile
                                                                                    : nullptr;
  }
  for (int64_t i = 0; i < plan_.num_active; ++i) {
    const auto expert = static_cast<size_t>(plan_.active[i]);
    const auto fits = [&](const ExpertMatrix& matrix, int64_t columns) {
      return reads_in_place(kernels_, compute_, weight_matrix(weights_, matrix), columns);
    };
    if (!fits(weights_.up[expert], config_.intermediate_size) ||
        !fits(weights_.down[expert], config_.hidden_size) ||
        (config_.has_gate && !fits(weights_.gate[expert], config_.intermediate_size))) {
      return nullptr;
    }
  }
  return kernels_.pair;
}

void ExpertsCall::make_blocks() {
  int64_t arranged = 0;
  for (int64_t i = 0; i < plan_.num_active; ++i) {
    first_block_[i] = num_blocks_;
    const int64_t end = plan_.offsets[i + 1];
    const RowBlocks split = split_rows(end - plan_.offsets[i]);
    for (int64_t first = plan_.offsets[i]; first < end; first += split.rows_per_block) {
      const int64_t last = std::min(end, first + split.rows_per_block);
      blocks_[num_blocks_++] = {plan_.active[i], first, last, arranged};
      arranged += arranged_rows(static_cast<int>(last - first));
    }
  }
  first_block_[plan_.num_active] = num_blocks_;
}

RowBlockList ExpertsCall::blocks_of(int64_t active_index) const {
  const int64_t first = first_block_[active_index];
  return {blocks_ + first, first_block_[active_index + 1] - first};
}

RowBlockList ExpertsCall::blocks_of_all() const { return {blocks_, num_blocks_}; }

RowBlockList ExpertsCall::single_rows() {
  scratch_.forget_rows();
  for (int64_t i = 0; i < plan_.num_active; ++i) {
    for (int64_t row = plan_.offsets[i]; row < plan_.offsets[i + 1]; ++row) {
      blocks_[row] = {plan_.active[i], row, row + 1, row};
    }
  }
  num_blocks_ = plan_.num_pairs;
  return {blocks_, num_blocks_};
}

int64_t ExpertsCall::num_ranges() const {
  return (config_.hidden_size + memory_.range_columns - 1) / memory_.range_columns;
}

ColumnRange ExpertsCall::range(int64_t i) const {
  return {i * memory_.range_columns,
          std::min(config_.hidden_size, (i + 1) * memory_.range_columns)};
}

int64_t ExpertsCall::num_gate_up_panels() const {
  const int columns = config_.has_gate ? kGateColumns : kPanelColumns;
  return (config_.intermediate_size + columns - 1) / columns;
}

const void* ExpertsCall::token_row(int64_t token) const {
  const TensorView& x = tokens_.hidden_states;
  return static_cast<const char*>(x.data()) + token * x.stride(0) * bytes_of(compute_);
}

const void* ExpertsCall::input_row(int64_t row) const {
  return token_row(plan_.pairs[row] / config_.top_k);
}

char* ExpertsCall::h_of(const RowBlock& block) const {
  return h_ + (arrange_ ? block.arranged : block.begin) * memory_.h_stride;
}

// Rows of x as the products want them, for every block of more than one.
void ExpertsCall::arrange_inputs(RowBlockList list) {
  const auto single = [](const RowBlock& block) { return block.end - block.begin == 1; };
  if (!arrange_ || std::all_of(list.blocks, list.blocks + list.count, single)) return;
  constexpr int64_t kSlice = 512;  // k in a task
  const int64_t slices = (config_.hidden_size + kSlice - 1) / kSlice;
  threads_.parallel_for(list.count * slices, [&](int64_t task, int) {
    const RowBlock& block = list.blocks[task / slices];
    if (single(block)) return;
    const int64_t k = task % slices * kSlice;
    const int count = static_cast<int>(block.end - block.begin);
    const void* rows[kMaxBlockRows];
    for (int r = 0; r < count; ++r) rows[r] = input_row(block.begin + r);
    char* out = inputs_ + block.arranged * memory_.input_stride + k * arranged_rows(count) * 2;
    arrange_({rows, k, count, std::min(kSlice, config_.hidden_size - k), out});
  });
}

// Runs of consecutive panels: what a thread reads next is known but at the end of its run.
void ExpertsCall::for_each_panel(
    int64_t count, FunctionRef<int(int64_t task, PanelPart* parts, const void** packed)> describe,
    FunctionRef<void(int64_t task, const PanelParts& parts, int thread)> run) {
  threads_.parallel_runs(count, [&](int64_t begin, int64_t end, int thread) {
    PanelPart parts[2][2];
    PanelParts here;
    here.count = describe(begin, parts[0], &here.packed);
    for (int64_t task = begin; task < end; ++task) {
      here.parts = parts[(task - begin) % 2];
      PanelPart* next = task + 1 < end ? parts[(task - begin + 1) % 2] : nullptr;
      here.next = next;
      here.next_packed = nullptr;
      if (next) describe(task + 1, next, &here.next_packed);
      run(task, here, thread);
      here.packed = here.next_packed;
    }
  });
}

void ExpertsCall::gate_up(RowBlockList list) {
  arrange_inputs(list);
  if (activations_ == ActivationScheme::kStatic) quantize_inputs(list);
  const int64_t panels = num_gate_up_panels();
  const auto describe = [&](int64_t task, PanelPart* parts, const void** packed) {
    const RowBlock& block = list.blocks[task / panels];
    if (weights_.packed) *packed = weights_.packed->gate_up(block.expert, task % panels);
    return gate_up_parts(block, task % panels, parts);
  };
  for_each_panel(list.count * panels, describe,
                 [&](int64_t task, const PanelParts& parts, int thread) {
                   gate_up_panel(list.blocks[task / panels], parts, scratch_[thread]);
                 });
  quantize_h(list);
}

void ExpertsCall::down(RowBlockList list, ColumnRange range) {
  const int64_t panels = (range.end - range.begin + kPanelColumns - 1) / kPanelColumns;
  const auto describe = [&](int64_t task, PanelPart* parts, const void** packed) {
    const RowBlock& block = list.blocks[task / panels];
    const int64_t panel = task % panels;
    if (weights_.packed) {
      *packed = weights_.packed->down(block.expert, range.begin / kPanelColumns + panel);
    }
    parts[0] = down_part(block, range, panel);
    return 1;
  };
  for_each_panel(list.count * panels, describe,
                 [&](int64_t task, const PanelParts& parts, int thread) {
                   down_panel(list.blocks[task / panels], range, parts, scratch_[thread]);
                 });
}

int ExpertsCall::gate_up_parts(const RowBlock& block, int64_t panel, PanelPart* parts) const {
  const int width = config_.has_gate ? kGateColumns : kPanelColumns;
  const int64_t first = panel * width;
  const int columns = static_cast<int>(std::min<int64_t>(width, config_.intermediate_size - first));
  const auto expert = static_cast<size_t>(block.expert);
  if (!config_.has_gate) {
    parts[0] = {weight_matrix(weights_, weights_.up[expert]), first, columns, 0, width};
    return 1;
  }
  parts[0] = {weight_matrix(weights_, weights_.gate[expert]), first, columns, 0, width};
  parts[1] = {weight_matrix(weights_, weights_.up[expert]), first, columns, kGateColumns, width};
  return 2;
}

PanelPart ExpertsCall::down_part(const RowBlock& block, ColumnRange range, int64_t panel) const {
  const int64_t first = range.begin + panel * kPanelColumns;
  const int columns = static_cast<int>(std::min<int64_t>(kPanelColumns, range.end - first));
  return {weight_matrix(weights_, weights_.down[static_cast<size_t>(block.expert)]), first, columns,
          0, kPanelColumns};
}

// Whether products of so many rows end with the gate function themselves: in place it then works on
// whole tiles, padding and all.
bool ExpertsCall::gates_in_product(int rows) const {
  if (!arrange_ || !config_.has_gate) return false;
  return weights_.packed || (rows >= 16 && row_tiles(rows) * 16 * 2 <= rows * 3);
}

void ExpertsCall::gate_up_panel(const RowBlock& block, const PanelParts& parts,
                                const PanelScratch& scratch) const {
  const void* rows[kMaxBlockRows];
  const float* scales[kMaxBlockRows];
  const int count = static_cast<int>(block.end - block.begin);
  RowSet x = input_rows(block, false, rows, scales);
  if (arrange_) x.arranged = count == 1 ? rows[0] : inputs_ + block.arranged * memory_.input_stride;
  const int64_t first = parts.parts->begin;
  float biases[2][kPanelColumns] = {};
  GateArgs gate = gate_args(block, first, parts.parts->count, biases[0], biases[1]);
  gate.acc = scratch.acc;
  PanelEnd end;
  if (gates_in_product(count)) {
    gate.out = h_step(block, first);
    end.gate = &gate;
  }
  panel_product(kernels_, x, config_.hidden_size, parts, scratch, end);
  if (activations_ == ActivationScheme::kStatic && config_.has_gate) {
    multiply_up_again(block, parts, scratch);
  }
  if (end.gate == nullptr) write_gated(block, first, gate);
}

GateArgs ExpertsCall::gate_args(const RowBlock& block, int64_t first, int columns, float* gate_bias,
                                float* up_bias) const {
  read_bias(weights_, weights_.gate_bias, block.expert, first, columns, gate_bias);
  read_bias(weights_, weights_.up_bias, block.expert, first, columns, up_bias);
  GateArgs args{};
  args.num_rows = static_cast<int>(block.end - block.begin);
  args.columns = columns;
  args.has_gate = config_.has_gate;
  args.kind = gate_kind(config_);
  args.limit = config_.swiglu_limit.value_or(std::numeric_limits<float>::infinity());
  args.alpha = config_.swiglu_alpha.value_or(1.0f);
  args.gate_bias = gate_bias;
  args.up_bias = up_bias;
  args.out_type = activations_ == ActivationScheme::kNone ? compute_ : Element::kF32;
  return args;
}

// Where the arranged columns of h from `first` on begin.
char* ExpertsCall::h_step(const RowBlock& block, int64_t first) const {
  return h_of(block) + first * arranged_rows(static_cast<int>(block.end - block.begin)) * 2;
}

void ExpertsCall::write_gated(const RowBlock& block, int64_t first, GateArgs& args) const {
  if (!arrange_ || args.num_rows == 1) {
    args.out = h_of(block) + first * bytes_of(args.out_type);
    args.out_stride = memory_.h_stride / bytes_of(args.out_type);
    return kernels_.gate(args);
  }
  uint16_t h[kMaxBlockRows * kPanelColumns];
  const void* rows[kMaxBlockRows];
  for (int r = 0; r < args.num_rows; ++r) rows[r] = h + r * kPanelColumns;
  args.out = h;
  args.out_stride = kPanelColumns;
  kernels_.gate(args);
  arrange_({rows, 0, args.num_rows, args.columns, h_step(block, first)});
}

void ExpertsCall::down_panel(const RowBlock& block, ColumnRange range, const PanelParts& parts,
                             const PanelScratch& scratch) const {
  const int64_t first = parts.parts->begin;
  const int columns = parts.parts->count;
  const int count = static_cast<int>(block.end - block.begin);
  const TensorView& weights = tokens_.top_k_weights;
  const Element weight_type = element_of(weights.dtype());
  const void* rows[kMaxBlockRows];
  const float* row_scales[kMaxBlockRows];
  void* out[kMaxBlockRows];
  float scales[kMaxBlockRows];
  for (int r = 0; r < count; ++r) {
    const int64_t pair = plan_.pairs[block.begin + r];
    out[r] = results_ + pair * memory_.range_columns + (first - range.begin);
    const int64_t at = pair / config_.top_k * weights.stride(0) + pair % config_.top_k;
    scales[r] = read_float(static_cast<const char*>(weights.data()) + at * bytes_of(weight_type),
                           weight_type);
  }
  float bias[kPanelColumns] = {};
  read_bias(weights_, weights_.down_bias, block.expert, first, columns, bias);
  const FinishArgs finish{scratch.acc, count, columns, bias, scales, Element::kF32, out};
  PanelEnd end;
  if (arrange_) end.finish = &finish;
  panel_product(kernels_, h_rows(block, rows, row_scales), config_.intermediate_size, parts,
                scratch, end);
  if (end.finish == nullptr) kernels_.finish(finish);
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
  kernels_.combine({results_ + first_pair * memory_.range_columns, memory_.range_columns,
                    used_ + first_pair, config_.top_k, range.end - range.begin, type,
                    static_cast<char*>(output.mutable_data()) +
                        (token * output.stride(0) + range.begin) * bytes_of(type)});
}

void for_each_chunk(const PreparedExperts& experts, const RoutedTokens& tokens,
                    Workspace& workspace, ThreadPool& threads,
                    FunctionRef<void(ExpertsCall& call)> run) {
  const int64_t num_tokens = tokens.hidden_states.dim(0);
  const MemoryPlan memory = plan_memory(experts.query, num_tokens, threads.num_threads());
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

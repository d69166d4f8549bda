// The rows of x and h as products of an ExpertsCall take them: as they are, or quantised.
#include <algorithm>

#include "backends/cpu/kernels/experts_call.h"
#include "backends/cpu/kernels/scalars.h"

namespace cadre::cpu {

// Every row of x, whatever the number of its experts.
void ExpertsCall::quantize_tokens() {
  const int64_t k = config_.hidden_size;
  threads_.parallel_ranges(tokens_.hidden_states.dim(0), 1, [&](int64_t begin, int64_t end, int) {
    for (int64_t token = begin; token < end; ++token) {
      kernels_.quantize({token_row(token), compute_, k, group_, 0, codes_of(token),
                         x_scales_ + token * groups_of(k)});
    }
  });
}

// Rows of x once for the gate and once for the up matrix of their expert.
void ExpertsCall::quantize_inputs(RowBlockList list) {
  threads_.parallel_for(list.count, [&](int64_t i, int) {
    const RowBlock& block = list.blocks[i];
    const auto expert = static_cast<size_t>(block.expert);
    for (int64_t row = block.begin; row < block.end; ++row) {
      QuantizeArgs args{input_row(row), compute_, config_.hidden_size, group_, 0, nullptr, nullptr};
      if (config_.has_gate) {
        args.static_scale = weights_.gate[expert].input_scale;
        args.codes = codes_of(row);
        kernels_.quantize(args);
      }
      args.static_scale = weights_.up[expert].input_scale;
      args.codes = codes_of(config_.has_gate ? plan_.num_pairs + row : row);
      kernels_.quantize(args);
    }
  });
}

// Rows of h from float32 to codes, where they lie.
void ExpertsCall::quantize_h(RowBlockList list) {
  if (activations_ == ActivationScheme::kNone || list.count == 0) return;
  const int64_t k = config_.intermediate_size;
  threads_.parallel_for(list.count, [&](int64_t i, int) {
    const RowBlock& block = list.blocks[i];
    const bool is_static = activations_ == ActivationScheme::kStatic;
    const float scale =
        is_static ? weights_.down[static_cast<size_t>(block.expert)].input_scale : 0;
    for (int64_t row = block.begin; row < block.end; ++row) {
      char* h = h_ + row * memory_.h_stride;
      kernels_.quantize({h, Element::kF32, k, group_, scale, h,
                         is_static ? nullptr : h_scales_ + row * groups_of(k)});
    }
  });
}

// The block's rows of x; `rows` and `scales` are memory for kMaxBlockRows each. Static scales
// differ between gate and up.
RowSet ExpertsCall::input_rows(const RowBlock& block, bool is_up, const void** rows,
                               const float** scales) const {
  const int count = static_cast<int>(block.end - block.begin);
  if (activations_ == ActivationScheme::kNone) {
    for (int r = 0; r < count; ++r) rows[r] = input_row(block.begin + r);
    return {rows, count, compute_, nullptr, &block, nullptr, 0};
  }
  const int64_t k = config_.hidden_size;
  if (activations_ == ActivationScheme::kDynamic) {
    for (int r = 0; r < count; ++r) {
      const int64_t token = plan_.pairs[block.begin + r] / config_.top_k;
      rows[r] = codes_of(token);
      scales[r] = x_scales_ + token * groups_of(k);
    }
    return {rows, count, Element::kBF16, nullptr, &block, scales, group_};
  }
  const auto expert = static_cast<size_t>(block.expert);
  const ExpertMatrix& matrix =
      is_up || !config_.has_gate ? weights_.up[expert] : weights_.gate[expert];
  const int64_t first = block.begin + (is_up ? plan_.num_pairs : 0);
  for (int r = 0; r < count; ++r) {
    rows[r] = codes_of(first + r);
    scales[r] = &matrix.input_scale;
  }
  const void* identity = is_up ? static_cast<const void*>(&block.begin) : &block;
  return {rows, count, Element::kBF16, nullptr, identity, scales, k};
}

RowSet ExpertsCall::h_rows(const RowBlock& block, const void** rows, const float** scales) const {
  const int count = static_cast<int>(block.end - block.begin);
  const int64_t k = config_.intermediate_size;
  const bool is_static = activations_ == ActivationScheme::kStatic;
  for (int r = 0; r < count; ++r) {
    rows[r] = h_of(block) + r * memory_.h_stride;
    scales[r] = is_static ? &weights_.down[static_cast<size_t>(block.expert)].input_scale
                          : h_scales_ + (block.begin + r) * groups_of(k);
  }
  if (activations_ != ActivationScheme::kNone) {
    return {rows, count, Element::kBF16, nullptr, &block.end, scales, is_static ? k : group_};
  }
  return {rows, count, compute_, arrange_ ? h_of(block) : nullptr, &block.end, nullptr, 0};
}

// The up columns with rows that were quantised for them, beside the gate columns that are there.
void ExpertsCall::multiply_up_again(const RowBlock& block, const PanelParts& parts,
                                    const PanelScratch& scratch) const {
  const void* rows[kMaxBlockRows];
  const float* scales[kMaxBlockRows];
  float gate[kMaxBlockRows][kGateColumns];
  const int count = static_cast<int>(block.end - block.begin);
  for (int r = 0; r < count; ++r) {
    std::copy_n(scratch.acc + r * kPanelColumns, kGateColumns, gate[r]);
  }
  panel_product(kernels_, input_rows(block, true, rows, scales), config_.hidden_size, parts,
                scratch);
  for (int r = 0; r < count; ++r) {
    std::copy_n(gate[r], kGateColumns, scratch.acc + r * kPanelColumns);
  }
}

}  // namespace cadre::cpu

// The new tokens of a step, as the dense operations see them.
#pragma once

#include <cstdint>
#include <span>

#include "cadre/tensor.h"

namespace cadre {

/// Where the new tokens of one sequence go: rows [first_row, first_row + num_tokens) of the
/// activations, at positions [past, past + num_tokens) of cache slot `slot`.
struct SequenceSpan {
  int64_t slot = 0;
  int64_t first_row = 0;
  int64_t num_tokens = 0;
  int64_t past = 0;
};

/// The new tokens of a step. The tensors say the same as the spans.
struct StepTokens {
  std::span<const SequenceSpan> sequences = {};  // cover all rows, in order
  TensorView slots = {};                         // [num_tokens] i32
  TensorView positions = {};                     // [num_tokens] i32
  TensorView spans = {};  // [num_sequences, 4] i32: slot, first_row, num_tokens, past

  int64_t num_tokens() const { return positions.dim(0); }
  int64_t num_sequences() const { return static_cast<int64_t>(sequences.size()); }
};

}  // namespace cadre

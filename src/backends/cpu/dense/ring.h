// Rings of rows, see dense/compressed_ops.h.
#pragma once

#include <cstddef>
#include <cstdint>

#include "dense/step_tokens.h"

namespace cadre::cpu {

/// The sequence that a row of the activations belongs to.
const SequenceSpan& sequence_of(const StepTokens& tokens, int64_t row);

/// Row `position` of a sequence: one of the new rows, or in the ring.
const std::byte* row_at(int64_t position, const TensorView& new_rows, const TensorView& ring,
                        const SequenceSpan& sequence);

}  // namespace cadre::cpu

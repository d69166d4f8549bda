// panel_product for quantised weights: codes are multiplied as the exact values they stand for, in
// pieces of k under which every scale is constant, and each piece's sum is scaled in float32:
//   acc += (row scale * column scale) * sum over the piece, from zero, in the order of multiply.
// Pieces end at multiples of kChunk, of the rows' scale group and of the weights' block_cols, so
// the order is the same for every number of rows, in place and packed.
#pragma once

#include "backends/cpu/kernels/panel_product.h"

namespace cadre::cpu {

/// Bytes of the words of scales that a packed panel begins with.
constexpr int64_t scale_word_bytes(int64_t k) {
  return (k + kChunk - 1) / kChunk * kPanelColumns * 4;
}

/// parts.packed as in packed_experts.h, else codes are gathered into scratch memory chunk by chunk.
void quantized_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                       const PanelParts& parts, const PanelScratch& scratch);

}  // namespace cadre::cpu

// panel_product for the tables that multiply chunk by chunk: straight from packed panels, and from
// weight rows with consecutive k half a panel at a time, 32 rows being as many streams of memory as
// the hardware's prefetcher follows.
#pragma once

#include "backends/cpu/kernels/panel_product.h"

namespace cadre::cpu {

/// Copied rows are zero behind k up to a multiple of this: words of codes are multiplied whole.
inline constexpr int kRowUnit = 8;

/// The rows of a chunk as the table multiplies them: for tables that multiply chunk by chunk copies
/// that lie kChunk elements apart, in float32 where the table wants that.
class ChunkRows {
 public:
  ChunkRows(const KernelTable& kernels, const RowSet& rows, int64_t k, const PanelScratch& scratch);

  /// Each chunk once, in any order, before any of them comes again.
  void load(int64_t k0, int k);
  const void* const* pointers() const { return copies_ ? &first_ : rows_.rows; }
  const void* first() const { return pointers()[0]; }
  int64_t offset() const { return offset_; }  // of the chunk in each row, in elements

 private:
  void copy(int64_t k0, int k, void* to) const;
  void copy_values(int64_t k0, int k, void* to) const;

  const KernelTable& kernels_;
  const RowSet& rows_;
  const PanelScratch& scratch_;
  int64_t k_;
  bool copies_;
  bool keeps_;          // every chunk has its place in scratch_.kept_rows
  bool has_;            // and is there
  int64_t loaded_ = 0;  // k
  const void* first_ = nullptr;
  int64_t offset_ = 0;
};

/// Whether direct_product takes the panel.
bool multiplies_directly(const KernelTable& kernels, const RowSet& rows, const PanelParts& parts);

/// As panel_product, bit for bit.
void direct_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                    const PanelParts& parts, const PanelScratch& scratch);

}  // namespace cadre::cpu

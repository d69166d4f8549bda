// The packed form of a layer's experts: a copy of the weights in the order in which products read
// them. One form serves all CPU backends and instruction sets.
//
// A panel is 64 columns of a projection over the whole of k: [ceil(k / 2)][64][2] elements with the
// bits they are stored in, or [ceil(k / c)][64] words of c codes of consecutive k (4 of e4m3, 8 of
// e2m1); columns that lack and what k lacks are zero. Panels of mxfp8 and fp4 begin with their
// scales: [ceil(k / 128)][64] words of four e8m0 bytes, one per 32 of k. Other formats' scales stay
// where they are. With a gate, panel p of
// gate_up holds columns [32 p, 32 p + 32) of gate and then the same of up; without one, columns
// [64 p, 64 p + 64) of up. Panel p of down holds columns [64 p, 64 p + 64). An expert is its
// gate_up panels, then its down panels; the experts follow each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels/huge_arena.h"
#include "backends/cpu/kernels/kernel_table.h"
#include "cadre/experts.h"

namespace cadre {
class ThreadPool;
}

namespace cadre::cpu {

/// Panels of one projection (gate and up count as one).
struct PackedPanels {
  int64_t count = 0;
  size_t panel_bytes = 0;  // a multiple of 64

  size_t bytes() const { return static_cast<size_t>(count) * panel_bytes; }
};

/// How the packed form of a config lies in memory.
struct PackedLayout {
  int64_t num_experts = 0;
  Element type = Element::kF32;
  bool has_gate = true;
  bool has_scale_words = false;
  PackedPanels gate_up;
  PackedPanels down;

  size_t expert_bytes() const { return gate_up.bytes() + down.bytes(); }
  size_t bytes() const { return static_cast<size_t>(num_experts) * expert_bytes(); }
  /// Where a panel of an expert (gate_up's, then down's) begins, in bytes from the expert's start.
  int64_t panel_offset(int64_t panel) const;
  /// The first panel that begins at `offset` or behind it.
  int64_t first_panel(int64_t offset) const;
  friend bool operator==(const PackedLayout& a, const PackedLayout& b);
};

/// Throws InvalidArgument for a config that is not valid or whose bytes do not fit in 63 bits.
PackedLayout packed_layout(const ExpertsConfig& config, StorageFormat format);

class PackedExperts {
 public:
  /// Memory for all experts, not yet written. Throws DeviceError when there is none.
  explicit PackedExperts(const PackedLayout& layout) : layout_(layout), arena_(layout.bytes()) {}

  const PackedLayout& layout() const { return layout_; }
  size_t bytes() const { return layout_.bytes(); }

  /// 64-byte aligned; the chunk at k0 (a multiple of kChunk) begins k0 * kPanelColumns elements
  /// behind the scales.
  const std::byte* gate_up(int64_t expert, int64_t panel) const {
    return expert_begin(expert) + static_cast<size_t>(panel) * layout_.gate_up.panel_bytes;
  }
  const std::byte* down(int64_t expert, int64_t panel) const {
    return expert_begin(expert) + layout_.gate_up.bytes() +
           static_cast<size_t>(panel) * layout_.down.panel_bytes;
  }

  /// Writes one expert from weights that fit the config of the layout: its panels in parallel, with
  /// this table's pack_stored.
  void pack(const KernelTable& kernels, const ExpertsConfig& config, const ExpertsWeights& weights,
            int64_t expert, ThreadPool& threads);

 private:
  std::byte* expert_begin(int64_t expert) const {
    return arena_.data() + static_cast<size_t>(expert) * layout_.expert_bytes();
  }

  PackedLayout layout_;
  HugeArena arena_;
};

}  // namespace cadre::cpu

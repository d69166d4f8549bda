// What a batch of sequences keeps between steps: for every layer the tensors that its attention
// asks for (keys and values, a compressed latent ...), of a fixed size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "cadre/tensor.h"

namespace cadre {

/// One tensor of a layer: [num_sequences, num_heads, rows, width].
struct CacheTensor {
  int64_t num_heads = 1;
  int64_t width = 0;
  int64_t tokens_per_row = 1;  // max_tokens / this rows, rounded up
  int64_t fixed_rows = 0;      // when not 0: so many rows, however long the sequences are
  DType dtype = DType::kF32;

  int64_t rows(int64_t max_tokens) const {
    if (fixed_rows != 0) return fixed_rows;
    return max_tokens / tokens_per_row + (max_tokens % tokens_per_row != 0 ? 1 : 0);
  }
};

/// Of one layer. Plain attention has two: keys and values.
using CacheLayout = std::vector<CacheTensor>;

struct KvShape {
  int64_t num_sequences = 0;
  int64_t max_tokens = 0;           // per sequence
  std::vector<CacheLayout> layers;  // [num_layers]
};

/// Bytes of a store of this shape; empty when they do not fit in 63 bits.
std::optional<size_t> kv_bytes(const KvShape& shape);

class KvStore {
 public:
  static constexpr size_t kAlignment = 256;  // of each tensor

  /// The memory is not touched before tokens are stored.
  KvStore(const KvShape& shape, Device device);

  const KvShape& shape() const { return shape_; }
  size_t bytes() const;
  const void* data() const { return memory_.view().data(); }
  /// The `i`-th tensor of the layer's layout.
  const MutableTensorView& tensor(int64_t layer, size_t i) const {
    return tensors_[static_cast<size_t>(layer)][i];
  }
  /// Of layers of plain attention: [num_sequences, num_kv_heads, max_tokens, head_dim]
  const MutableTensorView& keys(int64_t layer) const { return tensor(layer, 0); }
  const MutableTensorView& values(int64_t layer) const { return tensor(layer, 1); }

  int64_t length(int64_t sequence) const { return lengths_[static_cast<size_t>(sequence)]; }
  std::span<const int64_t> lengths() const { return lengths_; }  // [num_sequences]
  void set_length(int64_t sequence, int64_t length) {
    lengths_[static_cast<size_t>(sequence)] = length;
  }

 private:
  KvShape shape_;
  Tensor memory_;                                        // bytes
  std::vector<std::vector<MutableTensorView>> tensors_;  // [num_layers]
  std::vector<int64_t> lengths_;                         // [num_sequences] tokens stored
};

}  // namespace cadre

// What a batch of sequences keeps between steps: for every layer the tensors that its attention
// asks for (keys and values, a compressed latent ...), of a fixed size.
#pragma once

#include <algorithm>
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
  int64_t fixed_rows = 0;      // when not 0: a ring of so many rows, position p at p % fixed_rows
  // Of a ring: a token at position p needs rows from p / block * block - before on.
  int64_t block = 1;
  int64_t before = 0;
  DType dtype = DType::kF32;

  /// Whether a sequence that was written up to position `written` can go on from `length`.
  bool can_resume(int64_t length, int64_t written) const {
    if (fixed_rows == 0 || length == 0) return true;
    const int64_t first = std::max<int64_t>(0, length / block * block - before);
    return first >= length || first >= written - fixed_rows;
  }
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
    int64_t& written = written_[static_cast<size_t>(sequence)];
    written = length == 0 ? 0 : std::max(written, length);
  }

  /// One past the last position that was written since the sequence was empty. More than length()
  /// after the sequence was cut or a forward failed half-way: what rings keep goes by this.
  int64_t written(int64_t sequence) const { return written_[static_cast<size_t>(sequence)]; }
  /// Whether all that the next token after `length` tokens needs is there.
  bool can_resume(int64_t sequence, int64_t length) const;
  /// Positions [begin, end) are about to be written.
  void note_written(int64_t sequence, int64_t begin, int64_t end) {
    int64_t& written = written_[static_cast<size_t>(sequence)];
    written = begin == 0 ? end : std::max(written, end);
  }

 private:
  KvShape shape_;
  Tensor memory_;                                        // bytes
  std::vector<std::vector<MutableTensorView>> tensors_;  // [num_layers]
  std::vector<int64_t> lengths_;                         // [num_sequences] tokens stored
  std::vector<int64_t> written_;                         // [num_sequences]
};

}  // namespace cadre

// Keys and values of a batch of sequences: contiguous per sequence and head, of a fixed size.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "cadre/tensor.h"

namespace cadre {

struct KvShape {
  int64_t num_layers = 0;
  int64_t num_sequences = 0;
  int64_t num_kv_heads = 0;
  int64_t max_tokens = 0;  // per sequence
  int64_t head_dim = 0;
  DType dtype = DType::kF32;
};

/// Bytes of a store of this shape; empty when they do not fit in 63 bits.
std::optional<size_t> kv_bytes(const KvShape& shape);

class KvStore {
 public:
  /// The memory is not touched before tokens are stored.
  KvStore(const KvShape& shape, Device device);

  const KvShape& shape() const { return shape_; }
  size_t bytes() const;
  /// [num_sequences, num_kv_heads, max_tokens, head_dim]
  const MutableTensorView& keys(int64_t layer) const { return keys_[static_cast<size_t>(layer)]; }
  const MutableTensorView& values(int64_t layer) const {
    return values_[static_cast<size_t>(layer)];
  }

  int64_t length(int64_t sequence) const { return lengths_[static_cast<size_t>(sequence)]; }
  void set_length(int64_t sequence, int64_t length) {
    lengths_[static_cast<size_t>(sequence)] = length;
  }

 private:
  KvShape shape_;
  Tensor memory_;
  std::vector<MutableTensorView> keys_;    // [num_layers]
  std::vector<MutableTensorView> values_;  // [num_layers]
  std::vector<int64_t> lengths_;           // [num_sequences] tokens stored
};

}  // namespace cadre

#include "layers/kv_store.h"

#include "core/check.h"
#include "core/checked_math.h"

namespace cadre {

std::optional<size_t> kv_bytes(const KvShape& shape) {
  std::optional<int64_t> bytes = 2 * static_cast<int64_t>(size_of(shape.dtype));
  for (const int64_t factor : {shape.num_layers, shape.num_sequences, shape.num_kv_heads,
                               shape.max_tokens, shape.head_dim}) {
    if (bytes) bytes = checked_multiply(*bytes, factor);
  }
  if (!bytes) return std::nullopt;
  return static_cast<size_t>(*bytes);
}

KvStore::KvStore(const KvShape& shape, Device device)
    : shape_(shape),
      memory_(shape.dtype,
              {2 * shape.num_layers, shape.num_sequences, shape.num_kv_heads, shape.max_tokens,
               shape.head_dim},
              device),
      lengths_(static_cast<size_t>(shape.num_sequences), 0) {
  for (int64_t layer = 0; layer < shape.num_layers; ++layer) {
    keys_.push_back(memory_.view()[2 * layer]);
    values_.push_back(memory_.view()[2 * layer + 1]);
  }
}

size_t KvStore::bytes() const { return memory_.view().nbytes(); }

}  // namespace cadre

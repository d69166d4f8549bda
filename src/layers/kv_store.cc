#include "layers/kv_store.h"

#include "core/check.h"
#include "core/checked_math.h"

namespace cadre {
namespace {

// Padded, so that the next tensor is aligned.
std::optional<int64_t> tensor_bytes(const CacheTensor& tensor, const KvShape& shape) {
  std::optional<int64_t> bytes = static_cast<int64_t>(size_of(tensor.dtype));
  for (const int64_t factor :
       {shape.num_sequences, tensor.num_heads, tensor.rows(shape.max_tokens), tensor.width}) {
    if (bytes) bytes = checked_multiply(*bytes, factor);
  }
  constexpr auto kAlignment = static_cast<int64_t>(KvStore::kAlignment);
  if (bytes) bytes = checked_add(*bytes, kAlignment - 1);
  if (bytes) bytes = *bytes / kAlignment * kAlignment;
  return bytes;
}

}  // namespace

std::optional<size_t> kv_bytes(const KvShape& shape) {
  std::optional<int64_t> sum = 0;
  for (const CacheLayout& layer : shape.layers) {
    for (const CacheTensor& tensor : layer) {
      const std::optional<int64_t> bytes = tensor_bytes(tensor, shape);
      sum = bytes ? checked_add(*sum, *bytes) : std::nullopt;
      if (!sum) return std::nullopt;
    }
  }
  return static_cast<size_t>(*sum);
}

KvStore::KvStore(const KvShape& shape, Device device)
    : shape_(shape),
      lengths_(static_cast<size_t>(shape.num_sequences), 0),
      written_(lengths_.size(), 0) {
  const std::optional<size_t> bytes = kv_bytes(shape);
  CADRE_ASSERT(bytes.has_value());
  memory_ = Tensor(DType::kU8, {static_cast<int64_t>(*bytes)}, device);
  auto* next = static_cast<std::byte*>(memory_.view().mutable_data());
  for (const CacheLayout& layer : shape.layers) {
    std::vector<MutableTensorView>& views = tensors_.emplace_back();
    for (const CacheTensor& tensor : layer) {
      const Dims dims{shape.num_sequences, tensor.num_heads, tensor.rows(shape.max_tokens),
                      tensor.width};
      views.emplace_back(next, tensor.dtype, dims, device);
      next += *tensor_bytes(tensor, shape);
    }
  }
}

bool KvStore::can_resume(int64_t sequence, int64_t length) const {
  for (const CacheLayout& layer : shape_.layers) {
    for (const CacheTensor& tensor : layer) {
      if (!tensor.can_resume(length, written(sequence))) return false;
    }
  }
  return true;
}

size_t KvStore::bytes() const { return memory_.view().nbytes(); }

}  // namespace cadre

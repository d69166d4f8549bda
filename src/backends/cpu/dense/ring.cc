#include "backends/cpu/dense/ring.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu/dense/cpu_dense_ops.h"
#include "backends/cpu/dense/rows.h"
#include "core/check.h"

namespace cadre::cpu {

const SequenceSpan& sequence_of(const StepTokens& tokens, int64_t row) {
  const SequenceSpan* s = tokens.sequences.data();
  while (row >= s->first_row + s->num_tokens) ++s;
  return *s;
}

const std::byte* row_at(int64_t position, const TensorView& new_rows, const TensorView& ring,
                        const SequenceSpan& sequence) {
  const int64_t width = ring.dim(3);
  if (position >= sequence.past) {
    const int64_t row = sequence.first_row + position - sequence.past;
    return at(new_rows.data(), new_rows.dtype(), row * width);
  }
  const int64_t rows = ring.dim(2);
  return at(ring.data(), ring.dtype(), (sequence.slot * rows + position % rows) * width);
}

void CpuDenseOps::store_ring(const TensorView& x, const StepTokens& tokens, MutableTensorView ring,
                             const Stream& stream) {
  const int64_t rows = ring.dim(2);
  const int64_t width = ring.dim(3);
  CADRE_ASSERT(x.dtype() == ring.dtype() && x.numel() == x.dim(0) * width);
  const size_t row_bytes = static_cast<size_t>(width) * size_of(x.dtype());
  for (const SequenceSpan& s : tokens.sequences) {
    const int64_t kept = std::min(rows, s.num_tokens);
    const int64_t first = s.num_tokens - kept;
    for_row_ranges(stream, kept, width, [&](int64_t begin, int64_t end, int) {
      for (int64_t t = first + begin; t < first + end; ++t) {
        const int64_t to = (s.slot * rows + (s.past + t) % rows) * width;
        std::memcpy(at(ring.mutable_data(), ring.dtype(), to),
                    at(x.data(), x.dtype(), (s.first_row + t) * width), row_bytes);
      }
    });
  }
}

}  // namespace cadre::cpu

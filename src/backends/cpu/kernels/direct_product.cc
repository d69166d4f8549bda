#include "backends/cpu/kernels/direct_product.h"

#include <algorithm>
#include <cstring>

namespace cadre::cpu {
namespace {

constexpr int kHalf = kPanelColumns / 2;
constexpr int kMaxLines = kPanelBytes / 64;

int64_t size_of(Element type) { return type == Element::kF32 ? 4 : 2; }

// Weights of `type` pass through float32 or bfloat16 products unrounded.
bool is_exact(Element type, Element compute) {
  return type == Element::kBF16 || compute == Element::kF32 || type == compute;
}

// Lines of memory to fetch while rows are multiplied.
struct Lines {
  const void* at[kMaxLines];
  int count = 0;

  void add_run(const char* begin, int64_t bytes) {
    for (int64_t b = 0; b < bytes && count < kMaxLines; b += 64) at[count++] = begin + b;
  }
};

// Straight from the packed form while converting the weights for every tile of rows costs less
// than unpacking them once: always with tiles of 12 rows.
int max_direct_rows(const KernelTable& kernels) {
  return kernels.row_tile >= 12 ? kMaxBlockRows : 3 * kernels.row_tile;
}

class PackedProduct {
 public:
  PackedProduct(const KernelTable& kernels, const RowSet& rows, int64_t k, const PanelParts& parts,
                const PanelScratch& scratch)
      : kernels_(kernels),
        rows_(rows),
        k_(k),
        panel_(static_cast<const char*>(parts.packed)),
        next_(static_cast<const char*>(parts.next_packed)),
        type_(parts.parts->matrix.type),
        k_bytes_(kPanelColumns * size_of(type_)),
        scratch_(scratch),
        chunk_(kernels, rows, k, scratch) {}

  void run() {
    const int64_t chunks = (k_ + kChunk - 1) / kChunk;
    const bool direct = is_exact(type_, rows_.type) && rows_.count <= max_direct_rows(kernels_);
    for (int64_t c = 0; c < chunks; ++c) {
      if (direct) {
        multiply(c);
      } else {
        unpack_and_multiply(c);
      }
    }
  }

 private:
  // Panels of an expert follow each other, so that this reaches into the next one. Measured: 2 KiB
  // is 6 % slower, several streams at once 1 to 8 %.
  static constexpr int64_t kAheadOfFew = 8192;

  int count(int64_t c) const {
    return static_cast<int>(std::min<int64_t>(kChunk, k_ - c * kChunk));
  }
  const char* packed(int64_t c) const { return panel_ + c * kChunk * k_bytes_; }

  // From a place to the one that is fetched meanwhile: where tiles of rows pass over a chunk
  // several times, the same place in the chunk that is read afterwards.
  int64_t ahead(int64_t c) const {
    if (rows_.count <= kernels_.row_tile) return kAheadOfFew;
    if ((c + 1) * kChunk >= k_ && next_ != nullptr) return next_ - packed(c);
    return kChunk * k_bytes_;
  }

  void multiply(int64_t c) {
    chunk_.load(c * kChunk, count(c));
    kernels_.multiply_packed_chunk(
        {chunk_.first(), rows_.count, count(c), packed(c), type_, scratch_.acc, c == 0, ahead(c)});
  }

  void unpack_and_multiply(int64_t c) {
    chunk_.load(c * kChunk, count(c));
    Lines lines;
    lines.add_run(packed(c) + ahead(c), kChunk * k_bytes_);
    kernels_.unpack({packed(c), type_, rows_.type, count(c), scratch_.panel});
    kernels_.multiply({chunk_.pointers(), chunk_.offset(), rows_.count, count(c), scratch_.panel,
                       scratch_.acc, c == 0, lines.at, lines.count});
  }

  const KernelTable& kernels_;
  const RowSet& rows_;
  int64_t k_;
  const char* panel_;
  const char* next_;
  Element type_;
  int64_t k_bytes_;  // of one k in a panel
  const PanelScratch& scratch_;
  ChunkRows chunk_;
};

// Up to kHalf columns of a matrix and where in the panel they go.
struct HalfPanel {
  const char* weights = nullptr;
  int64_t row_stride = 0;  // elements
  Element type = Element::kF32;
  int columns = 0;
  int at = 0;
};

int halves_of(const PanelPart* parts, int num_parts, HalfPanel* halves) {
  int count = 0;
  for (int p = 0; p < num_parts; ++p) {
    const PanelPart& part = parts[p];
    for (int first = 0; first < part.count; first += kHalf) {
      const WeightMatrix& m = part.matrix;
      halves[count++] = {static_cast<const char*>(m.data) + byte_offset(m, part.begin + first, 0),
                         m.row_stride, m.type, std::min(kHalf, part.count - first),
                         part.at + first};
    }
  }
  return count;
}

// One half of a panel over the whole of k.
class HalfProduct {
 public:
  HalfProduct(const KernelTable& kernels, const RowSet& rows, int64_t k,
              const PanelScratch& scratch)
      : kernels_(kernels),
        rows_(rows),
        k_(k),
        scratch_(scratch),
        chunk_(kernels, rows, k, scratch) {}

  /// `next`: what is read afterwards; null = unknown.
  void run(const HalfPanel& half, const HalfPanel* next) {
    const bool stored = rows_.count <= kernels_.row_tile && half.columns % 16 == 0 &&
                        is_exact(half.type, rows_.type);
    for (int64_t k0 = 0; k0 < k_; k0 += kChunk) {
      const int count = static_cast<int>(std::min<int64_t>(kChunk, k_ - k0));
      chunk_.load(k0, count);
      if (stored) {
        multiply_stored(half, next, k0, count);
      } else {
        pack_and_multiply(half, next, k0, count);
      }
    }
  }

 private:
  static constexpr int64_t kAhead = 2 * kChunk;

  static const char* at(const HalfPanel& half, int64_t k) {
    return half.weights + k * size_of(half.type);
  }

  // The chunk two chunks ahead, beyond the rows' end in those that come next: where short rows end,
  // the hardware's prefetcher has to begin anew. Without columns: nothing.
  HalfPanel ahead(const HalfPanel& half, const HalfPanel* next, int64_t k0) const {
    HalfPanel fetch = half;
    const int64_t chunks_end = (k_ + kChunk - 1) / kChunk * kChunk;
    if (k0 + kAhead < chunks_end) {
      fetch.weights = at(half, k0 + kAhead);
    } else if (next != nullptr) {
      fetch = *next;
      fetch.weights = at(*next, k0 + kAhead - chunks_end);
    } else {
      fetch.columns = 0;
    }
    return fetch;
  }

  void multiply_stored(const HalfPanel& half, const HalfPanel* next, int64_t k0, int k) {
    const HalfPanel fetch = ahead(half, next, k0);
    kernels_.multiply_stored_chunk(
        {chunk_.first(), rows_.count, k, at(half, k0), half.row_stride, half.type, half.columns,
         fetch.columns >= half.columns ? fetch.weights : nullptr,
         fetch.row_stride * size_of(fetch.type), scratch_.acc + half.at, k0 == 0});
  }

  void pack_and_multiply(const HalfPanel& half, const HalfPanel* next, int64_t k0, int k) {
    const HalfPanel fetch = ahead(half, next, k0);
    Lines lines;
    for (int n = 0; n < fetch.columns; ++n) {
      lines.add_run(fetch.weights + n * fetch.row_stride * size_of(fetch.type),
                    kChunk * size_of(fetch.type));
    }
    PackArgs pack{};
    pack.weights = at(half, k0);
    pack.row_stride = half.row_stride;
    pack.col_stride = 1;
    pack.type = half.type;
    pack.compute = rows_.type;
    pack.columns = half.columns;
    pack.width = kHalf;
    pack.k = k;
    pack.panel = scratch_.panel;
    kernels_.pack(pack);
    kernels_.multiply({chunk_.pointers(), chunk_.offset(), rows_.count, k, scratch_.panel,
                       scratch_.acc + half.at, k0 == 0, lines.at, lines.count, kHalf});
  }

  const KernelTable& kernels_;
  const RowSet& rows_;
  int64_t k_;
  const PanelScratch& scratch_;
  ChunkRows chunk_;
};

}  // namespace

ChunkRows::ChunkRows(const KernelTable& kernels, const RowSet& rows, int64_t k,
                     const PanelScratch& scratch)
    : kernels_(kernels),
      rows_(rows),
      scratch_(scratch),
      k_(k),
      copies_(rows.type != kernels.row_type || kernels.multiply_packed_chunk != nullptr),
      keeps_(copies_ && rows.identity != nullptr &&
             (k + kChunk - 1) / kChunk * kChunk * rows.count <= kKeptRowFloats),
      has_(keeps_ && *scratch.kept == rows.identity) {}

void ChunkRows::load(int64_t k0, int k) {
  if (!copies_) {
    offset_ = k0;
    return;
  }
  float* to = scratch_.wide_rows;
  if (keeps_) to = scratch_.kept_rows + k0 * rows_.count;
  first_ = to;
  if (has_) return;
  copy(k0, k, to);
  if (!keeps_) return;
  loaded_ += k;
  has_ = loaded_ == k_;
  *scratch_.kept = has_ ? rows_.identity : nullptr;
}

void ChunkRows::copy(int64_t k0, int k, void* to) const {
  copy_values(k0, k, to);
  const int rest = k % kRowUnit;
  if (rest == 0) return;
  const auto size = static_cast<size_t>(size_of(kernels_.row_type));
  for (int r = 0; r < rows_.count; ++r) {
    std::memset(static_cast<char*>(to) + static_cast<size_t>(r * kChunk + k) * size, 0,
                static_cast<size_t>(kRowUnit - rest) * size);
  }
}

void ChunkRows::copy_values(int64_t k0, int k, void* to) const {
  if (kernels_.row_type == Element::kF32) {
    return kernels_.widen({rows_.rows, k0, rows_.count, k, rows_.type, static_cast<float*>(to)});
  }
  const int64_t size = size_of(rows_.type);
  for (int r = 0; r < rows_.count; ++r) {
    const char* from = static_cast<const char*>(rows_.rows[r]) + k0 * size;
    std::memcpy(static_cast<char*>(to) + r * kChunk * size, from, static_cast<size_t>(k * size));
  }
}

bool multiplies_directly(const KernelTable& kernels, const RowSet& rows, const PanelParts& parts) {
  if (kernels.multiply_packed_chunk == nullptr || rows.arranged != nullptr) return false;
  if (parts.packed != nullptr) return true;
  return std::all_of(parts.parts, parts.parts + parts.count,
                     [](const PanelPart& part) { return part.matrix.col_stride == 1; });
}

void direct_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                    const PanelParts& parts, const PanelScratch& scratch) {
  if (parts.packed != nullptr) return PackedProduct(kernels, rows, k, parts, scratch).run();
  HalfPanel halves[2];
  HalfPanel next[2];
  const int count = halves_of(parts.parts, parts.count, halves);
  const bool known = parts.next != nullptr && parts.next->matrix.col_stride == 1 &&
                     halves_of(parts.next, parts.count, next) > 0;
  HalfProduct product(kernels, rows, k, scratch);
  for (int i = 0; i < count; ++i) {
    product.run(halves[i], i + 1 < count ? &halves[i + 1] : known ? next : nullptr);
  }
}

}  // namespace cadre::cpu

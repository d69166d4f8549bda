#include "backends/cpu/kernels/panel_product.h"

#include <algorithm>

#include "backends/cpu/kernels/direct_product.h"
#include "backends/cpu/kernels/quantized_product.h"
#include "core/check.h"

namespace cadre::cpu {
namespace {

constexpr size_t kAccBytes = size_t{kMaxBlockRows} * kPanelColumns * sizeof(float);
constexpr size_t kWideBytes = size_t{kMaxBlockRows} * kChunk * sizeof(float);
static_assert(kWideBytes >= kSumFloats * sizeof(float));  // its other use
constexpr size_t kKeptBytes = size_t{kKeptRowFloats} * sizeof(float);

// The areas begin at different offsets in their pages: loads wait for earlier stores that have the
// same one (4 KiB aliasing), which costs products of 12 rows a tenth of their speed.
constexpr size_t kPanelArea = kPanelBytes + 2560;
constexpr size_t kAccArea = kAccBytes + 2560;
constexpr size_t kCodesArea = size_t{kPanelColumns} * kChunk + 1280;
constexpr size_t kScaleWordBytes = size_t{kScaleWordChunks} * kPanelColumns * 4;

// With few rows the products are too short to hide the fetching, so packing itself runs ahead.
bool prefetches_in_pack(int num_rows) { return num_rows <= 6; }

// The cache lines of the chunk at k0, where weights lie in runs along k or n.
class NextChunkLines {
 public:
  void collect(const PanelPart* parts, int num_parts, int64_t k0, int64_t k) {
    count_ = 0;
    if (k <= 0) return;
    for (int p = 0; p < num_parts; ++p) {
      const WeightMatrix& m = parts[p].matrix;
      if (m.col_stride == 1) {
        for (int n = 0; n < parts[p].count; ++n) add_run(m, parts[p].begin + n, k0, k);
      } else if (m.row_stride == 1) {
        for (int64_t i = 0; i < k; ++i) add_run(m, parts[p].begin, k0 + i, parts[p].count);
      }
    }
  }
  /// A chunk of a packed panel. Behind the panel lies the next one: fetched alike.
  void collect_run(const char* begin, int64_t bytes) {
    for (count_ = 0; count_ * 64 < bytes && count_ < kMax; ++count_) {
      lines_[count_] = begin + int64_t{count_} * 64;
    }
  }
  const void* const* lines() const { return lines_; }
  int count() const { return count_; }

 private:
  static constexpr int kMax = kPanelBytes / 64;

  void add_run(const WeightMatrix& m, int64_t n, int64_t k, int64_t elements) {
    const char* at = static_cast<const char*>(m.data) + byte_offset(m, n, k);
    const int64_t bytes = elements * (m.type == Element::kF32 ? 4 : 2);
    for (int64_t b = 0; b < bytes && count_ < kMax; b += 64) lines_[count_++] = at + b;
  }

  const void* lines_[kMax];
  int count_ = 0;
};

void pack_part(const KernelTable& kernels, const PanelPart& part, Element compute, int64_t k0,
               int k, bool prefetch, void* panel) {
  const WeightMatrix& m = part.matrix;
  PackArgs args{};
  args.weights = static_cast<const char*>(m.data) + byte_offset(m, part.begin, k0);
  args.row_stride = m.row_stride;
  args.col_stride = m.col_stride;
  args.type = m.type;
  args.compute = compute;
  args.columns = part.count;
  args.width = part.width;
  args.k = k;
  args.first_column = part.at;
  args.prefetch_ahead = prefetch ? int64_t{kChunk} * (m.type == Element::kF32 ? 4 : 2) : 0;
  args.panel = panel;
  kernels.pack(args);
}

// Groups of 16 columns, those of two parts taking turns.
int weight_groups(const PanelPart* parts, int num_parts, WeightRows* groups) {
  int count = 0;
  for (int column = 0; column < kPanelColumns; column += 16) {
    for (int p = 0; p < num_parts; ++p) {
      const PanelPart& part = parts[p];
      if (column >= part.count) continue;
      const void* first = static_cast<const char*>(part.matrix.data) +
                          byte_offset(part.matrix, part.begin + column, 0);
      groups[count++] = {first, part.matrix.row_stride, part.at + column};
    }
  }
  return count;
}

void multiply_where_they_lie(const KernelTable& kernels, const RowSet& rows, int64_t k,
                             const PanelParts& parts, const PanelScratch& scratch, PanelEnd end) {
  WeightRows groups[kPanelColumns / 16];
  WeightRows next[kPanelColumns / 16];
  const int count = weight_groups(parts.parts, parts.count, groups);
  const bool fetch = parts.next != nullptr && weight_groups(parts.next, parts.count, next) >= 2;
  kernels.multiply_in_place({groups, count, fetch ? next : nullptr, k, rows.arranged, rows.count,
                             scratch.wide_rows, scratch.acc, end.gate, end.finish});
}

}  // namespace

bool reads_in_place(const KernelTable& kernels, Element row_type, const WeightMatrix& matrix,
                    int64_t columns) {
  return kernels.multiply_in_place != nullptr && row_type == kernels.row_type &&
         matrix.type == row_type && matrix.col_stride == 1 && columns % 16 == 0;
}

RowBlocks split_rows(int64_t rows) {
  if (rows <= kMaxBlockRows) return {rows > 0 ? 1 : 0, rows};
  constexpr int64_t kTile = 12;  // a multiple of every row tile
  const int64_t blocks = (rows + kMaxBlockRows - 1) / kMaxBlockRows;
  const int64_t even = (rows + blocks - 1) / blocks;
  const int64_t size = (even + kTile - 1) / kTile * kTile;
  return {(rows + size - 1) / size, size};
}

size_t PanelScratch::bytes() {
  return Workspace::padded(kPanelArea) + Workspace::padded(kAccArea) +
         Workspace::padded(kWideBytes) + Workspace::padded(kKeptBytes) +
         Workspace::padded(sizeof(void*)) + Workspace::padded(kCodesArea) +
         Workspace::padded(kScaleWordBytes);
}

PanelScratch PanelScratch::take(Workspace& workspace) {
  PanelScratch scratch;
  scratch.panel = workspace.allocate(kPanelArea);
  scratch.acc = static_cast<float*>(workspace.allocate(kAccArea));
  scratch.wide_rows = static_cast<float*>(workspace.allocate(kWideBytes));
  scratch.kept_rows = static_cast<float*>(workspace.allocate(kKeptBytes));
  scratch.kept = static_cast<const void**>(workspace.allocate(sizeof(void*)));
  *scratch.kept = nullptr;
  scratch.codes = static_cast<std::byte*>(workspace.allocate(kCodesArea));
  scratch.scale_words = static_cast<std::byte*>(workspace.allocate(kScaleWordBytes));
  return scratch;
}

PerThreadScratch::PerThreadScratch(Workspace& workspace, int num_threads)
    : num_threads_(num_threads), all_(workspace.allocate<PanelScratch>(num_threads)) {
  for (int i = 0; i < num_threads; ++i) all_[i] = PanelScratch::take(workspace);
}

void PerThreadScratch::forget_rows() {
  for (int i = 0; i < num_threads_; ++i) *all_[i].kept = nullptr;
}

size_t PerThreadScratch::bytes(int num_threads) {
  const auto count = static_cast<size_t>(num_threads);
  return Workspace::padded(count * sizeof(PanelScratch)) + count * PanelScratch::bytes();
}

void panel_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                   const PanelParts& parts, const PanelScratch& scratch, PanelEnd end) {
  CADRE_DCHECK(rows.count <= kMaxBlockRows);
  if (rows.arranged != nullptr && parts.packed != nullptr) {
    return kernels.multiply_packed({parts.packed, parts.next_packed, k, rows.arranged, rows.count,
                                    scratch.wide_rows, scratch.acc, end.gate, end.finish});
  }
  if (rows.arranged != nullptr) {
    return multiply_where_they_lie(kernels, rows, k, parts, scratch, end);
  }
  if (is_code(parts.parts->matrix.type)) {
    return quantized_product(kernels, rows, k, parts, scratch);
  }
  if (multiplies_directly(kernels, rows, parts)) {
    return direct_product(kernels, rows, k, parts, scratch);
  }
  ChunkRows chunk_rows(kernels, rows, k, scratch);
  const bool in_pack = prefetches_in_pack(rows.count);
  NextChunkLines next;
  for (int64_t k0 = 0; k0 < k; k0 += kChunk) {
    const int count = static_cast<int>(std::min<int64_t>(kChunk, k - k0));
    if (parts.packed != nullptr) {
      const Element type = parts.parts->matrix.type;
      const int64_t row_bytes = kPanelColumns * (type == Element::kF32 ? 4 : 2);
      const char* chunk = static_cast<const char*>(parts.packed) + k0 * row_bytes;
      kernels.unpack({chunk, type, rows.type, count, scratch.panel});
      next.collect_run(chunk + kChunk * row_bytes, kChunk * row_bytes);
    } else {
      for (int p = 0; p < parts.count; ++p) {
        pack_part(kernels, parts.parts[p], rows.type, k0, count, in_pack, scratch.panel);
      }
    }
    if (parts.packed == nullptr && !in_pack) {
      const int64_t next_k = std::min<int64_t>(kChunk, k - k0 - kChunk);
      next.collect(parts.parts, parts.count, k0 + kChunk, next_k);
    }
    chunk_rows.load(k0, count);
    kernels.multiply({chunk_rows.pointers(), chunk_rows.offset(), rows.count, count, scratch.panel,
                      scratch.acc, k0 == 0, next.lines(), next.count()});
  }
}

}  // namespace cadre::cpu

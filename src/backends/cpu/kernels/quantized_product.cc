#include "backends/cpu/kernels/quantized_product.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu/kernels/direct_product.h"
#include "quant/float8.h"

namespace cadre::cpu {
namespace {

constexpr int kScaleBlock = 32;  // k under one scale where scales come in words
constexpr int kMaxPieces = 4;    // that go to a kernel together
constexpr int kMaskedRows = 16;  // that are copied for a piece within a word

// k of a chunk, counted from its beginning.
struct Piece {
  int begin;
  int end;
};

float read_scale(const MatrixScales& scales, int64_t row_block, int64_t col_block) {
  const int64_t at = row_block * scales.row_stride + col_block * scales.col_stride;
  const auto* data = static_cast<const std::byte*>(scales.data);
  if (scales.is_e8m0) return e8m0_to_float(static_cast<uint8_t>(data[at]));
  float value;
  std::memcpy(&value, data + at * 4, sizeof value);
  return value;
}

// Column scales at k, run by run of columns under one scale.
void read_scales(const PanelPart& part, int64_t k, float* out) {
  const MatrixScales& scales = part.matrix.scales;
  const int64_t col_block = scales.block_cols == 0 ? 0 : k / scales.block_cols;
  std::fill_n(out, part.width, 0.0f);
  for (int n = 0; n < part.count;) {
    const int64_t row = part.begin + n + scales.row_offset;
    int64_t run = part.count - n;
    int64_t row_block = 0;
    if (scales.block_rows != 0) {
      row_block = row / scales.block_rows;
      run = std::min(run, (row_block + 1) * scales.block_rows - row);
    }
    std::fill_n(out + n, run, read_scale(scales, row_block, col_block));
    n += static_cast<int>(run);
  }
}

class QuantizedProduct {
 public:
  QuantizedProduct(const KernelTable& kernels, const RowSet& rows, int64_t k,
                   const PanelParts& parts, const PanelScratch& scratch)
      : kernels_(kernels),
        rows_(rows),
        k_(k),
        parts_(parts),
        scratch_(scratch),
        type_(parts.parts->matrix.type),
        scales_(parts.parts->matrix.scales),
        chunk_rows_(kernels, rows, k, scratch) {}

  void run() {
    for (k0_ = 0; k0_ < k_; k0_ += kChunk) {
      count_ = static_cast<int>(std::min<int64_t>(kChunk, k_ - k0_));
      begin_chunk();
      chunk_rows_.load(k0_, count_);
      for (int begin = 0; begin < count_;) begin = multiply_from(begin);
    }
  }

 private:
  static constexpr int64_t kAheadOfFew = 8192;  // as for plain weights (direct_product.cc)

  int per_word() const { return codes_per_word(type_); }
  int64_t chunk_bytes() const { return kChunk / per_word() * int64_t{kPanelColumns} * 4; }
  int64_t row_bytes() const { return kernels_.row_type == Element::kF32 ? 4 : 2; }

  void begin_chunk() {
    if (parts_.packed != nullptr) {
      const auto* panel = static_cast<const std::byte*>(parts_.packed);
      const int64_t chunk = k0_ / kChunk;
      words_ = panel + chunk * kPanelColumns * 4;
      codes_ = panel + (scales_.in_words ? scale_word_bytes(k_) : 0) + chunk * chunk_bytes();
    } else {
      gather_codes();
      if (scales_.in_words) gather_scale_words();
      codes_ = scratch_.codes;
    }
    if (scales_.in_words) kernels_.expand_scales({words_, word_scales_});
  }

  void gather_codes() {
    StoredColumns columns[2];
    for (int p = 0; p < parts_.count; ++p) {
      const PanelPart& part = parts_.parts[p];
      const WeightMatrix& m = part.matrix;
      columns[p] = {static_cast<const std::byte*>(m.data) + byte_offset(m, part.begin, k0_),
                    m.row_stride, m.col_stride, part.count};
    }
    kernels_.pack_stored({columns, parts_.count, type_, count_, scratch_.codes});
  }

  // Those of kScaleWordChunks chunks at a time: a cache line of each row.
  void gather_scale_words() {
    const int64_t chunk = k0_ / kChunk % kScaleWordChunks;
    words_ = scratch_.scale_words + chunk * kPanelColumns * 4;
    if (chunk != 0) return;
    const int64_t first = k0_ / kScaleBlock;
    const int64_t left = (k_ + kScaleBlock - 1) / kScaleBlock - first;
    StoredColumns columns[2];
    for (int p = 0; p < parts_.count; ++p) {
      const PanelPart& part = parts_.parts[p];
      const MatrixScales& s = part.matrix.scales;
      columns[p] = {static_cast<const std::byte*>(s.data) +
                        (part.begin + s.row_offset) * s.row_stride + first * s.col_stride,
                    s.row_stride, s.col_stride, part.count};
    }
    kernels_.pack_stored({columns, parts_.count, Element::kE4m3,
                          std::min<int64_t>(left, kScaleWordChunks * 4), scratch_.scale_words});
  }

  // Where the piece that `begin` lies in ends.
  int piece_end(int begin) const {
    int64_t end = k0_ + count_;
    for (const int64_t unit : {scales_.block_cols, rows_.scales ? rows_.scale_group : 0}) {
      if (unit > 0) end = std::min(end, ((k0_ + begin) / unit + 1) * unit);
    }
    return static_cast<int>(end - k0_);
  }

  // Multiplies one piece, or several of one size at once; returns where they end.
  int multiply_from(int begin) {
    const Piece first{begin, piece_end(begin)};
    const int size = first.end - begin;
    const bool whole_words =
        begin % per_word() == 0 && (first.end % per_word() == 0 || first.end == count_);
    if (!whole_words) {
      multiply_within_words(first);
      return first.end;
    }
    int pieces = 1;
    int end = first.end;
    while (pieces < kMaxPieces && end < count_ && size % per_word() == 0) {
      const int next = piece_end(end);
      // Only the chunk's last may be shorter.
      if (next - end > size || (next - end < size && next < count_)) break;
      if (next % per_word() != 0 && next != count_) break;
      end = next;
      ++pieces;
    }
    find_scales(begin, size, pieces);
    const auto* x = static_cast<const std::byte*>(chunk_rows_.first()) + begin * row_bytes();
    multiply({begin, end}, size, x, rows_.count, 0);
    return end;
  }

  void find_scales(int begin, int size, int pieces) {
    is_first_ = k0_ == 0 && begin == 0;
    column_scales_ =
        scales_.in_words ? word_scales_ + begin / kScaleBlock * kPanelColumns : read_scales_;
    for (int i = 0; i < pieces; ++i) {
      const int64_t k = k0_ + begin + int64_t{i} * size;
      for (int p = 0; p < parts_.count && !scales_.in_words; ++p) {
        read_scales(parts_.parts[p], k, read_scales_ + i * kPanelColumns + parts_.parts[p].at);
      }
      float* rows = row_scales_ + i * rows_.count;
      for (int r = 0; r < rows_.count; ++r) {
        rows[r] = rows_.scales == nullptr ? 1.0f : rows_.scales[r][k / rows_.scale_group];
      }
    }
  }

  // Rows from first_row on, whose elements at piece.begin lie at x; their scales begin at row
  // first_row of each piece's (with more than one piece: all rows).
  void multiply(const Piece& pieces, int size, const std::byte* x, int num_rows, int first_row) {
    const int64_t row = pieces.begin / per_word() * int64_t{kPanelColumns} * 4;
    float* acc = scratch_.acc + int64_t{first_row} * kPanelColumns;
    if (num_rows <= kernels_.max_code_rows) {
      const int64_t ahead = parts_.packed != nullptr ? kAheadOfFew : 0;
      return kernels_.multiply_codes({x, num_rows, pieces.end - pieces.begin, size, codes_ + row,
                                      type_, row_scales_ + first_row, column_scales_, acc,
                                      is_first_, ahead});
    }
    for (int begin = pieces.begin, i = 0; begin < pieces.end; begin += size, ++i) {
      const int k = std::min(size, pieces.end - begin);
      const int whole = (k + per_word() - 1) / per_word() * per_word();
      const auto* codes = codes_ + begin / per_word() * int64_t{kPanelColumns} * 4;
      const void* rows = x + (begin - pieces.begin) * row_bytes();
      collect_lines(codes, k);
      kernels_.decode({codes, type_, k, scratch_.panel});
      kernels_.multiply({&rows, 0, num_rows, whole, scratch_.panel, acc, is_first_ && i == 0,
                         lines_, num_lines_, kPanelColumns,
                         row_scales_ + i * rows_.count + first_row,
                         column_scales_ + i * kPanelColumns});
    }
  }

  // What is read next, where it is known: the same place in the next chunk.
  void collect_lines(const std::byte* codes, int k) {
    num_lines_ = 0;
    if (parts_.packed == nullptr) return;  // gathering fetches
    const std::byte* next = codes + chunk_bytes();
    if (k0_ + kChunk >= k_) {
      if (parts_.next_packed == nullptr) return;
      next = static_cast<const std::byte*>(parts_.next_packed) + (codes - codes_);
    }
    const int bytes = k / per_word() * kPanelColumns * 4;
    for (int b = 0; b < bytes && num_lines_ < kMaxLines; b += 64) lines_[num_lines_++] = next + b;
  }

  // A piece that begins or ends within a word: with copies of the rows that are zero elsewhere.
  void multiply_within_words(const Piece& piece) {
    find_scales(piece.begin, piece.end - piece.begin, 1);
    const int begin = piece.begin / per_word() * per_word();
    const int end = (piece.end + per_word() - 1) / per_word() * per_word();
    alignas(64) std::byte copies[kMaskedRows * kChunk * sizeof(float)];
    const int64_t size = row_bytes();
    for (int first = 0; first < rows_.count; first += kMaskedRows) {
      const int count = std::min(kMaskedRows, rows_.count - first);
      for (int r = 0; r < count; ++r) {
        const auto* from = static_cast<const std::byte*>(chunk_rows_.first()) +
                           (int64_t{first + r} * kChunk + piece.begin) * size;
        std::byte* to = copies + int64_t{r} * kChunk * size;
        std::memset(to, 0, static_cast<size_t>((end - begin) * size));
        std::memcpy(to + (piece.begin - begin) * size, from,
                    static_cast<size_t>((piece.end - piece.begin) * size));
      }
      multiply({begin, end}, end - begin, copies, count, first);
    }
  }

  static constexpr int kMaxLines = kPanelColumns * kChunk / 64;

  const KernelTable& kernels_;
  const RowSet& rows_;
  int64_t k_;
  const PanelParts& parts_;
  const PanelScratch& scratch_;
  Element type_;
  const MatrixScales& scales_;
  ChunkRows chunk_rows_;

  // Of the chunk.
  int64_t k0_ = 0;
  int count_ = 0;
  const std::byte* codes_ = nullptr;
  const std::byte* words_ = nullptr;
  alignas(64) float word_scales_[4 * kPanelColumns];

  // Of the pieces that are multiplied.
  bool is_first_ = false;  // of all
  alignas(64) float read_scales_[kMaxPieces * kPanelColumns];
  const float* column_scales_ = nullptr;  // [pieces, kPanelColumns]
  float row_scales_[kMaxPieces * kMaxBlockRows];
  const void* lines_[kMaxLines];
  int num_lines_ = 0;
};

}  // namespace

void quantized_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                       const PanelParts& parts, const PanelScratch& scratch) {
  QuantizedProduct(kernels, rows, k, parts, scratch).run();
}

}  // namespace cadre::cpu

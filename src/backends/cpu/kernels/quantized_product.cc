#include "backends/cpu/kernels/quantized_product.h"

#include <algorithm>
#include <cstring>

#include "backends/cpu/kernels/direct_product.h"
#include "quant/float8.h"

namespace cadre::cpu {
namespace {

constexpr int kScaleBlock = 32;                   // k under one scale where scales come in words
constexpr int kMaxPieces = kChunk / kScaleBlock;  // that go to a kernel together
constexpr int kMaskedRows = 16;                   // that are copied for a piece within a word

// k of a chunk, counted from its beginning.
struct Piece {
  int begin;
  int end;
};

float read_scale(const MatrixScales& scales, int64_t at) {
  const auto* data = static_cast<const std::byte*>(scales.data);
  if (scales.is_e8m0) return e8m0_to_float(static_cast<uint8_t>(data[at]));
  float value;
  std::memcpy(&value, data + at * 4, sizeof value);
  return value;
}

// The scales of a panel's columns: runs of columns share one.
class ColumnScales {
 public:
  explicit ColumnScales(const PanelParts& parts) {
    for (int p = 0; p < parts.count; ++p) add(parts.parts[p]);
  }

  /// At k, for all columns; those that lack get none.
  void read(int64_t k, float* out) const {
    const MatrixScales* of = nullptr;
    int64_t column = 0;
    for (int i = 0; i < count_; ++i) {
      const Run& run = runs_[i];
      if (run.scales != of) {
        of = run.scales;
        column = of->block_cols == 0 ? 0 : k / of->block_cols * of->col_stride;
      }
      std::fill_n(out + run.first, run.count, read_scale(*of, run.offset + column));
    }
  }

  bool are_all() const { return columns_ == kPanelColumns; }

 private:
  struct Run {
    const MatrixScales* scales;
    int64_t offset;
    int first;
    int count;
  };

  void add(const PanelPart& part) {
    const MatrixScales& scales = part.matrix.scales;
    for (int n = 0; n < part.count;) {
      const int64_t row = part.begin + n + scales.row_offset;
      int64_t block = 0;
      int64_t left = part.count - n;
      if (scales.block_rows != 0) {
        block = row / scales.block_rows;
        left = std::min(left, (block + 1) * scales.block_rows - row);
      }
      runs_[count_++] = {&scales, block * scales.row_stride, part.at + n, static_cast<int>(left)};
      n += static_cast<int>(left);
    }
    columns_ += part.count;
  }

  Run runs_[kPanelColumns];
  int count_ = 0;
  int columns_ = 0;
};

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
        in_words_(scales_.in_words),
        columns_(parts),
        chunk_rows_(kernels, rows, k, scratch),
        piece_(even_piece()) {
    if (parts_.packed == nullptr && is_few()) list_rows();
    if (!in_words_ && !columns_.are_all())
      std::fill_n(read_scales_, kMaxPieces * kPanelColumns, 0.0f);
  }

  void run() {
    for (k0_ = 0; k0_ < k_; k0_ += kChunk) {
      count_ = static_cast<int>(std::min<int64_t>(kChunk, k_ - k0_));
      begin_chunk();
      chunk_rows_.load(k0_, count_);
      if (piece_ != 0) {
        multiply_pieces({0, count_}, piece_);
      } else {
        for (int begin = 0; begin < count_;) begin = multiply_piece(begin);
      }
    }
  }

 private:
  bool is_few() const { return rows_.count <= kernels_.max_code_rows; }
  int per_word() const { return codes_per_word(type_); }
  int64_t word_offset(int k) const { return k / per_word() * int64_t{kPanelColumns} * 4; }
  int64_t chunk_bytes() const { return word_offset(kChunk); }
  const std::byte* first_row() const { return static_cast<const std::byte*>(chunk_rows_.first()); }
  int64_t row_bytes() const { return kernels_.row_type == Element::kF32 ? 4 : 2; }

  // k of the pieces when all of them are equal and begin with a word; else 0.
  int even_piece() const {
    int64_t piece = kChunk;
    for (const int64_t unit : {scales_.block_cols, rows_.scales ? rows_.scale_group : 0}) {
      if (unit == 0 || unit % kChunk == 0 || unit >= k_) continue;
      if (kChunk % unit != 0 || unit < kScaleBlock) return 0;
      piece = std::min(piece, unit);
    }
    return static_cast<int>(piece);
  }

  // Rows of words that a packed panel begins with: what they stand for in the next block is wanted
  // soon, and most of them are read later than that.
  int words_to_fetch() const {
    if (!is_few() || parts_.packed == nullptr || k0_ != 0) return 0;
    return static_cast<int>((k_ + kChunk - 1) / kChunk);
  }

  void begin_chunk() {
    const int64_t chunk = k0_ / kChunk;
    if (parts_.packed != nullptr) {
      const auto* panel = static_cast<const std::byte*>(parts_.packed);
      words_ = panel + chunk * kPanelColumns * 4;
      codes_ = panel + (in_words_ ? scale_word_bytes(k_) : 0) + chunk * chunk_bytes();
    } else {
      gather_codes();
      if (in_words_) gather_scale_words();
      codes_ = scratch_.codes;
    }
    if (in_words_) kernels_.expand_scales({words_, word_scales_, words_to_fetch()});
  }

  // Few rows: what comes two chunks later is fetched during the product.
  void gather_codes() {
    StoredColumns columns[2];
    for (int p = 0; p < parts_.count; ++p) {
      const PanelPart& part = parts_.parts[p];
      const WeightMatrix& m = part.matrix;
      columns[p] = {static_cast<const std::byte*>(m.data) + byte_offset(m, part.begin, k0_),
                    m.row_stride, m.col_stride, part.count};
    }
    kernels_.pack_stored(
        {columns, parts_.count, type_, count_, scratch_.codes, fetch_here_[0] == nullptr});
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

  // The rows of whole panels with consecutive k, here and of the thread's next product.
  void list_rows() {
    if (!list_rows(parts_.parts, fetch_here_)) fetch_here_[0] = nullptr;
    const bool known = parts_.next != nullptr && fetch_here_[0] != nullptr;
    if (!known || !list_rows(parts_.next, fetch_next_)) fetch_next_[0] = nullptr;
  }
  bool list_rows(const PanelPart* parts, const char** rows) const {
    int count = 0;
    for (int p = 0; p < parts_.count; ++p) {
      const WeightMatrix& m = parts[p].matrix;
      if (m.col_stride != 1) return false;
      const char* row = static_cast<const char*>(m.data) + byte_offset(m, parts[p].begin, 0);
      for (int n = 0; n < parts[p].count; ++n, row += m.row_stride) rows[count++] = row;
    }
    return count == kPanelColumns;
  }

  // Which rows to fetch from during this chunk's product, and where in them; null = none.
  const char* const* rows_to_fetch(int64_t* offset) const {
    constexpr int64_t kAhead = 2 * kChunk;
    const int64_t chunks_end = (k_ + kChunk - 1) / kChunk * kChunk;
    const int64_t k = k0_ + kAhead;
    const bool here = k < chunks_end;
    *offset = (here ? k : k - chunks_end) / (type_ == Element::kE2m1 ? 2 : 1);
    const char* const* rows = here ? fetch_here_ : fetch_next_;
    return rows[0] == nullptr ? nullptr : rows;
  }

  // Multiplies the piece from `begin` on; returns where it ends.
  int multiply_piece(int begin) {
    int64_t end = k0_ + count_;
    for (const int64_t unit : {scales_.block_cols, rows_.scales ? rows_.scale_group : 0}) {
      if (unit > 0) end = std::min(end, ((k0_ + begin) / unit + 1) * unit);
    }
    const Piece piece{begin, static_cast<int>(end - k0_)};
    if (begin % per_word() == 0 && (piece.end % per_word() == 0 || piece.end == count_)) {
      multiply_pieces(piece, piece.end - begin);
    } else {
      multiply_within_words(piece);
    }
    return piece.end;
  }

  void multiply_pieces(const Piece& pieces, int size) {
    find_scales(pieces, size);
    multiply(pieces, size, first_row() + pieces.begin * row_bytes(), rows_.count, 0);
  }

  void find_scales(const Piece& pieces, int size) {
    is_first_ = k0_ == 0 && pieces.begin == 0;
    column_scales_ =
        in_words_ ? word_scales_ + pieces.begin / kScaleBlock * kPanelColumns : read_scales_;
    float* row_scales = row_scales_;
    float* column_scales = read_scales_;
    for (int begin = pieces.begin; begin < pieces.end; begin += size) {
      if (!in_words_) columns_.read(k0_ + begin, column_scales);
      column_scales += kPanelColumns;
      if (rows_.scales == nullptr) continue;
      const int64_t group = (k0_ + begin) / rows_.scale_group;
      for (int r = 0; r < rows_.count; ++r) *row_scales++ = rows_.scales[r][group];
    }
  }

  // Rows from first_row on, whose elements at pieces.begin lie at x.
  void multiply(const Piece& pieces, int size, const std::byte* x, int num_rows, int first_row) {
    const std::byte* codes = codes_ + word_offset(pieces.begin);
    const float* row_scales = rows_.scales == nullptr ? nullptr : row_scales_ + first_row;
    float* acc = scratch_.acc + int64_t{first_row} * kPanelColumns;
    const int k = pieces.end - pieces.begin;
    if (num_rows <= kernels_.max_code_rows) {
      CodesArgs args{x,          num_rows,       k,   size,     codes, type_,
                     row_scales, column_scales_, acc, is_first_};
      args.fetches_next_block = parts_.packed != nullptr;
      if (parts_.packed == nullptr) args.fetch_rows = rows_to_fetch(&args.fetch_ahead);
      return kernels_.multiply_codes(args);
    }
    const void* rows = x;
    const int whole = (k + per_word() - 1) / per_word() * per_word();
    kernels_.decode({codes, type_, k, scratch_.panel, next_chunk(codes)});
    kernels_.multiply({&rows, 0, num_rows, whole, scratch_.panel, acc, is_first_, nullptr, 0,
                       kPanelColumns, row_scales, column_scales_, size < k ? size : kChunk});
  }

  // From codes to those at the same place of the chunk that is read next, where it is known.
  int64_t next_chunk(const std::byte* codes) const {
    if (parts_.packed == nullptr) return 0;  // gathering fetches
    if (k0_ + kChunk < k_) return chunk_bytes();
    if (parts_.next_packed == nullptr) return 0;
    const auto* next = static_cast<const std::byte*>(parts_.next_packed);
    return next - codes + (codes - codes_) + (in_words_ ? scale_word_bytes(k_) : 0);
  }

  // A piece that begins or ends within a word: with copies of the rows that are zero elsewhere.
  void multiply_within_words(const Piece& piece) {
    find_scales(piece, piece.end - piece.begin);
    const int begin = piece.begin / per_word() * per_word();
    const int end = (piece.end + per_word() - 1) / per_word() * per_word();
    alignas(64) std::byte copies[kMaskedRows * kChunk * sizeof(float)];
    const int64_t size = row_bytes();
    for (int first = 0; first < rows_.count; first += kMaskedRows) {
      const int count = std::min(kMaskedRows, rows_.count - first);
      for (int r = 0; r < count; ++r) {
        const std::byte* from = first_row() + (int64_t{first + r} * kChunk + piece.begin) * size;
        std::byte* to = copies + int64_t{r} * kChunk * size;
        std::memset(to, 0, static_cast<size_t>((end - begin) * size));
        std::memcpy(to + (piece.begin - begin) * size, from,
                    static_cast<size_t>((piece.end - piece.begin) * size));
      }
      multiply({begin, end}, end - begin, copies, count, first);
    }
  }

  const KernelTable& kernels_;
  const RowSet& rows_;
  int64_t k_;
  const PanelParts& parts_;
  const PanelScratch& scratch_;
  Element type_;
  const MatrixScales& scales_;
  bool in_words_;
  ColumnScales columns_;
  ChunkRows chunk_rows_;
  int piece_;
  const char* fetch_here_[kPanelColumns] = {};
  const char* fetch_next_[kPanelColumns] = {};

  // Of the chunk.
  int64_t k0_ = 0;
  int count_ = 0;
  const std::byte* codes_ = nullptr;
  const std::byte* words_ = nullptr;
  alignas(64) float word_scales_[kMaxPieces * kPanelColumns];

  // Of the pieces that are multiplied.
  bool is_first_ = false;  // of all
  alignas(64) float read_scales_[kMaxPieces * kPanelColumns];
  const float* column_scales_ = nullptr;  // [pieces, kPanelColumns]
  float row_scales_[kMaxPieces * kMaxBlockRows];
};

}  // namespace

void quantized_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                       const PanelParts& parts, const PanelScratch& scratch) {
  QuantizedProduct(kernels, rows, k, parts, scratch).run();
}

}  // namespace cadre::cpu

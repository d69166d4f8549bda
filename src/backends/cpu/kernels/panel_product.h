// The product that all CPU work is made of: some rows times one panel of weight columns, over the
// whole of K, in the order of summation of docs/numerics.md.
#pragma once

#include <cstddef>
#include <cstdint>

#include "backends/cpu/kernels/kernel_table.h"
#include "cadre/workspace.h"

namespace cadre::cpu {

/// Rows that share one packing of the weights; more are split into blocks of equal size.
inline constexpr int64_t kMaxBlockRows = 192;

/// How `rows` rows are cut: blocks of `rows_per_block`, the last may be shorter.
struct RowBlocks {
  int64_t count = 0;
  int64_t rows_per_block = 0;
};

RowBlocks split_rows(int64_t rows);

/// Where the scales of a quantised matrix lie (ExpertMatrix); any alignment.
struct MatrixScales {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  int64_t row_offset = 0;
  int64_t block_rows = 0;  // 0 = all
  int64_t block_cols = 0;
  bool is_e8m0 = false;
  // The format has one e8m0 scale per 32 of k: kernels take four of a column as a word, and the
  // packed form brings them along.
  bool in_words = false;
};

/// A logical [N, K] matrix; element (n, k) at data + n * row_stride + k * col_stride elements, any
/// alignment. Of e2m1, col_stride is 1 and row_stride counts bytes.
struct WeightMatrix {
  const void* data = nullptr;
  int64_t row_stride = 0;
  int64_t col_stride = 1;
  Element type = Element::kF32;
  MatrixScales scales = {};  // of codes
};

/// Columns [begin, begin + count) of a matrix, to be put into a panel from column `at`, which gets
/// `width` columns.
struct PanelPart {
  WeightMatrix matrix;
  int64_t begin = 0;
  int count = 0;
  int at = 0;
  int width = kPanelColumns;
};

/// One or two parts that make up a panel.
struct PanelParts {
  const PanelPart* parts = nullptr;
  int count = 0;
  const PanelPart* next = nullptr;  // as many: of the thread's next product; null = unknown
  const void* packed = nullptr;  // the same panel in packed form (packed_experts.h), read instead
  const void* next_packed = nullptr;
};

/// Converted rows up to this size outlast a product: the rows of a thread's panels are mostly the
/// same, and this much stays in its L2 cache.
inline constexpr int64_t kKeptRowFloats = int64_t{384} << 10;

/// Chunks whose words of scales are gathered together: 64 bytes of each row.
inline constexpr int kScaleWordChunks = 16;

/// One thread's scratch memory: never shared, reused from task to task.
struct PanelScratch {
  void* panel = nullptr;       // kPanelBytes
  float* acc = nullptr;        // [kMaxBlockRows, kPanelColumns]
  float* wide_rows = nullptr;  // [kMaxBlockRows, kChunk], when rows must be converted; or sums

  // Rows that were converted for one product, kept for the next ones with the same rows.
  float* kept_rows = nullptr;   // kKeptRowFloats
  const void** kept = nullptr;  // which rows (RowSet::identity); null = none

  // A chunk of codes and words of scales, of weights in place.
  std::byte* codes = nullptr;        // kPanelColumns * kChunk
  std::byte* scale_words = nullptr;  // kScaleWordChunks * kPanelColumns words

  static size_t bytes();
  static PanelScratch take(Workspace& workspace);
};

/// Scratch of every thread of a pool.
class PerThreadScratch {
 public:
  PerThreadScratch(Workspace& workspace, int num_threads);
  static size_t bytes(int num_threads);
  const PanelScratch& operator[](int thread) const { return all_[thread]; }
  /// To be called when a RowSet::identity gets another meaning.
  void forget_rows();

 private:
  int num_threads_;
  PanelScratch* all_;
};

struct RowSet {
  const void* const* rows = nullptr;  // [count] first element of each
  int count = 0;                      // at most kMaxBlockRows
  Element type = Element::kF32;
  const void* arranged =
      nullptr;  // the same, as the product that reads weights directly wants them
  // Equal for two products of the same scratch only when all of the above and k are; null =
  // unknown.
  const void* identity = nullptr;
  /// Scales of quantised rows: k of row r is multiplied by scales[r][k / scale_group]; null = 1.
  const float* const* scales = nullptr;
  int64_t scale_group = 0;
};

/// What comes after a product, done on the way (InPlaceArgs, PackedArgs); one of the two.
struct PanelEnd {
  const GateArgs* gate = nullptr;
  const FinishArgs* finish = nullptr;
};

/// Whether products with a matrix of `columns` columns can read it where it lies.
bool reads_in_place(const KernelTable& kernels, Element row_type, const WeightMatrix& matrix,
                    int64_t columns);

/// Bytes of `count` rows of k elements when arranged.
constexpr int64_t arranged_bytes(int64_t count, int64_t k) {
  return int64_t{arranged_rows(static_cast<int>(count))} * ((k + kStepK - 1) / kStepK * kStepK) * 2;
}

/// scratch.acc[r][column] = row r . column, for all columns of the parts. With rows.arranged the
/// weights are read directly, packed (rows as KernelTable::tile puts them) or where they lie (as
/// pair does; reads_in_place must hold for every part). `end` is for rows.arranged only;
/// acc is not written then.
void panel_product(const KernelTable& kernels, const RowSet& rows, int64_t k,
                   const PanelParts& parts, const PanelScratch& scratch, PanelEnd end = {});

/// How far element (row, col) lies from the start, in bytes, in 64-bit arithmetic.
constexpr int64_t byte_offset(const WeightMatrix& matrix, int64_t row, int64_t col) {
  if (matrix.type == Element::kE2m1) return row * matrix.row_stride + col / 2;
  const int64_t size = matrix.type == Element::kF32 ? 4 : is_code(matrix.type) ? 1 : 2;
  return (row * matrix.row_stride + col * matrix.col_stride) * size;
}

}  // namespace cadre::cpu

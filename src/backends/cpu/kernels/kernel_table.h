// What one instruction set brings: a table of plain functions over plain structs.
//
// The translation units behind it are compiled with their own -m flags, so they include nothing but
// this header and intrinsics: an inline function shared with the rest of the program could be
// emitted there with instructions that the machine lacks, and the linker may keep that copy.
#pragma once

#include <stdint.h>

namespace cadre::cpu {

/// Columns of a panel and k of a chunk: the unit in which weights pass through scratch memory.
inline constexpr int kPanelColumns = 64;
inline constexpr int kChunk = 128;
/// Bytes of a packed chunk of a panel, for the widest of the panel types.
inline constexpr int kPanelBytes = kPanelColumns * kChunk * 4;

/// Values, or codes of quantised weights: four of e4m3 or eight of e2m1 (even k in the low half of
/// a byte) make a word.
enum class Element : uint8_t { kF32, kF16, kBF16, kE4m3, kE2m1 };

constexpr bool is_code(Element type) { return type >= Element::kE4m3; }
constexpr int codes_per_word(Element type) { return type == Element::kE2m1 ? 8 : 4; }

/// A block of weights: `columns` of n by `k` of k, element (n, k) at weights + (n * row_stride + k
/// * col_stride) elements, any alignment.
struct PackArgs {
  const void* weights;
  int64_t row_stride;
  int64_t col_stride;
  Element type;            // of the weights
  Element compute;         // weights with more precision than this are rounded to it
  int columns;             // 1 to width
  int width;               // columns of the panel to write, a multiple of 16; the rest becomes zero
  int k;                   // 1 to kChunk
  int first_column;        // where in the panel, a multiple of 16
  int64_t prefetch_ahead;  // bytes ahead of each row's loads to prefetch; 0 = none
  void* panel;             // kPanelBytes
};

/// acc[r][n] (+)= sum over k of rows[r][k] * panel[k][n]: one chunk, summed from zero in ascending
/// pairs by one accumulator per output, then added.
struct MultiplyArgs {
  // Element 0 of the chunk in each row, of the table's row type. Tables that multiply chunk by
  // chunk (multiply_packed_chunk) take only the first: rows lie kChunk elements apart.
  const void* const* rows;
  int64_t row_offset;  // elements to add to each pointer
  int num_rows;
  int k;              // 1 to kChunk
  const void* panel;  // as pack wrote it
  float* acc;         // [num_rows, kPanelColumns]
  bool first;         // overwrite acc instead of adding
  // Lines of memory to fetch meanwhile, spread over the products so that reading the next weights
  // and multiplying these overlap.
  const void* const* prefetch;
  int num_prefetch;
  int columns = kPanelColumns;  // of the panel, or half of them: the first kPanelColumns / 2
  // With column_scales: piece by piece, acc[r][n] (+)= (row_scale * column_scale) * sum. row_scales
  // null = 1.
  const float* row_scales = nullptr;     // [pieces, num_rows]
  const float* column_scales = nullptr;  // [pieces, kPanelColumns]
  int piece = kChunk;                    // k of a piece; the last may be shorter
};

enum class GateKind : uint8_t { kSilu, kGelu, kGeluTanh, kRelu, kRelu2, kScaledSwiglu };

/// h = act(gate + gate_bias) * (up + up_bias), or act(up + up_bias) without a gate, rounded once to
/// `out_type`. Rows of acc hold gate in columns [0, 32) and up in [32, 64), or 64 columns of up.
struct GateArgs {
  const float* acc;
  int num_rows;
  int columns;  // valid ones: up to 32 with a gate, 64 without
  bool has_gate;
  GateKind kind;
  float limit;             // +inf = no clamp
  float alpha;             // kScaledSwiglu only
  const float* gate_bias;  // [32]
  const float* up_bias;    // [32] or [64]
  Element out_type;
  void* out;           // row 0, first column
  int64_t out_stride;  // elements
};

/// out[r][n] = (acc[r][n] + bias[n]) * scale[r], rounded once to `out_type`.
struct FinishArgs {
  const float* acc;
  int num_rows;
  int columns;          // 1 to kPanelColumns
  const float* bias;    // [kPanelColumns]; null = none
  const float* scales;  // [num_rows]; null = none
  Element out_type;
  void* const* out;  // [num_rows] first column of each row
};

/// out[n] = sum of the parts in ascending order, in float32, rounded once. No parts: zeros.
struct CombineArgs {
  const float* parts;   // part p at parts + p * part_stride
  int64_t part_stride;  // elements
  const uint8_t* used;  // [num_parts]; parts with 0 are not read
  int64_t num_parts;
  int64_t columns;
  Element out_type;
  void* out;
};

/// Converts k elements of each row to float32, exactly.
struct WidenArgs {
  const void* const* rows;
  int64_t row_offset;  // elements
  int num_rows;
  int k;
  Element type;
  float* out;  // [num_rows, kChunk]
};

/// k that products of arranged rows take in one step: arranged rows are zero up to a multiple of
/// it.
inline constexpr int kStepK = 32;

/// How many tiles so many arranged rows make, and the rows of each: a lone tile has them as they
/// are.
constexpr int row_tiles(int num_rows) { return (num_rows + 15) / 16; }
constexpr int arranged_rows(int num_rows) {
  return num_rows <= 16 ? num_rows : row_tiles(num_rows) * 16;
}

/// Rows of each tile when many are arranged by tile: spread evenly.
constexpr int tile_height(int num_rows) {
  return (num_rows + row_tiles(num_rows) - 1) / row_tiles(num_rows);
}

/// Arranges rows of bfloat16 for the products below. What k lacks is zero.
/// pair: two k in a word and rows side by side, [round_up(k, kStepK) / kStepK][row_tiles][kStepK /
/// 2] [rows of a tile] words, the lower half of a word the even k. tile: [round_up(k, kStepK) /
/// kStepK][row_tiles][16][kStepK] elements, of whose 16 rows tile_height(num_rows) are used; a lone
/// tile is only so high. Rows that lack are left alone. A single row is the same in both as it was,
/// but for the zeros behind k: products of one row do not need them.
struct ArrangeArgs {
  const void* const* rows;  // element 0 of each
  int64_t row_offset;       // elements to add to each pointer
  int num_rows;
  int64_t k;
  void* out;
};

/// Scratch memory that these products want: four tiles of sums for each tile of 192 rows.
inline constexpr int kSumFloats = 192 / 16 * 4 * 256;

/// 16 weight rows (columns of the product) as they lie in memory, k after k.
struct WeightRows {
  const void* first;
  int64_t stride;  // elements
  int column;      // where their products go
};

/// acc[r][column + i] = row r . weight row i, over the whole of K, summed as multiply does. With
/// `gate` or `finish` acc is not written: what they make of it is (their own acc is not read).
struct InPlaceArgs {
  const WeightRows* groups;  // an even number of them reads best
  int num_groups;
  const WeightRows* next;  // [2] what the thread reads afterwards, to fetch ahead; null = unknown
  int64_t k;
  const void* rows;  // as pair wrote them; a single row as it is
  int num_rows;
  float* sums;  // scratch: [kSumFloats]
  float* acc;   // [num_rows, kPanelColumns]
  // Groups alternate between gate and up, from 16 rows on; out is then a step of kStepK columns as
  // pair arranges it, of bfloat16.
  const GateArgs* gate = nullptr;
  const FinishArgs* finish = nullptr;  // to float32
};

/// The same with a panel of the packed form (see PackStoredArgs).
struct PackedArgs {
  const void* panel;
  const void* next;  // the panel that the thread reads afterwards, to fetch ahead
  int64_t k;
  const void* rows;  // as tile wrote them; a single row as it is
  int num_rows;
  float* sums;  // scratch: [kSumFloats]
  float* acc;   // [num_rows, kPanelColumns]
  // As in InPlaceArgs; out is a step of kStepK columns as tile arranges it.
  const GateArgs* gate = nullptr;
  const FinishArgs* finish = nullptr;
};

/// Columns of a matrix: element (n, k) at data + n * row_stride + k * col_stride elements, any
/// alignment. Of e2m1, col_stride is 1 and row_stride counts bytes.
struct StoredColumns {
  const void* data;
  int64_t row_stride;
  int64_t col_stride;
  int columns;  // 0 to the part's width; the panel's other columns become zero
};

/// One panel of the packed form (packed_experts.h), bit for bit: element (n, k) of the panel's 64
/// columns is written to panel[k / 2][n][k % 2], a code to panel[k / c][n][k % c] with c codes in a
/// word. Of two parts each gets half of the columns.
struct PackStoredArgs {
  const StoredColumns* parts;
  int num_parts;  // 1 or 2
  Element type;
  int64_t k;            // of the whole matrix; what the last pair or word lacks is zero
  void* panel;          // 64-byte aligned, round_up(k, 2) * kPanelColumns elements, or whole words
  bool fetches = true;  // what follows in each row
};

/// A chunk of such a panel, into a panel as pack writes it from the same weights.
struct UnpackArgs {
  const void* packed;  // first pair of the chunk
  Element type;        // of the weights
  Element compute;     // weights with more precision than this are rounded to it
  int k;               // 1 to kChunk
  void* panel;         // kPanelBytes
};

/// multiply, straight from a chunk of a packed panel (see PackStoredArgs).
struct PackedChunkArgs {
  const void* rows;  // [num_rows, kChunk] of the table's row type
  int num_rows;
  int k;                // 1 to kChunk
  const void* packed;   // first pair of the chunk
  Element type;         // of the weights, as precise as the compute type at most
  float* acc;           // [num_rows, kPanelColumns]
  bool first;           // overwrite acc instead of adding
  int64_t fetch_ahead;  // what lies so many bytes behind the weights is fetched meanwhile
};

/// multiply for few rows, straight from a chunk of weight rows with consecutive k.
struct StoredChunkArgs {
  const void* rows;  // [num_rows, kChunk] of the table's row type
  int num_rows;      // 1 to kStoredRows
  int k;             // 1 to kChunk
  const void* weights;
  int64_t row_stride;    // elements
  Element type;          // of the weights, as precise as the compute type at most
  int columns;           // 16 or 32
  const void* fetch;     // a chunk of as many rows, to fetch meanwhile; null = none
  int64_t fetch_stride;  // bytes
  float* acc;            // first column of row 0; rows lie kPanelColumns apart
  bool first;            // overwrite acc instead of adding
};

/// A chunk of quantised weights as pack_stored writes it: [words][kPanelColumns] words of codes.
/// Into a panel as pack writes it from the codes' values, which are exact; k up to whole words.
struct DecodeArgs {
  const void* codes;
  Element type;
  int k;                // 1 to kChunk
  void* panel;          // kPanelBytes
  int64_t fetch_ahead;  // what lies so many bytes behind the codes is fetched meanwhile
};

/// multiply for few rows, straight from such a chunk, piece by piece: acc[r][n] (+)= (row_scales *
/// column_scales) * (sum over the piece, from zero, in the order of multiply).
struct CodesArgs {
  const void* rows;   // [num_rows, kChunk] of the table's row type, zero from k to the word's end
  int num_rows;       // 1 to max_code_rows
  int k;              // 1 to kChunk
  int piece;          // k of a piece, whole words; the last may be shorter
  const void* codes;  // three bytes behind them are read as well
  Element type;
  const float* row_scales;     // [pieces, num_rows]; null = 1
  const float* column_scales;  // [pieces, kPanelColumns]
  float* acc;                  // [num_rows, kPanelColumns]
  bool first;                  // overwrite acc instead of adding
  // What is fetched meanwhile, a line for each line of codes: of packed weights those of the next
  // 16 KiB, or one line of each of kPanelColumns rows, then the next of each.
  bool fetches_next_block = false;
  const char* const* fetch_rows = nullptr;  // [kPanelColumns]; fetch_ahead is added
  int64_t fetch_ahead = 0;
};

/// Scales of e8m0, four in a word of each column, to floats.
struct ExpandScalesArgs {
  const void* words;    // [kPanelColumns]
  float* scales;        // [4, kPanelColumns]
  int fetch_words = 0;  // rows of words from here on for which lines are fetched as in CodesArgs
};

/// A row to e4m3 as quant/activations.h says, bit for bit; codes become bfloat16, which holds them
/// exactly. `codes` may lie where x lies.
struct QuantizeArgs {
  const void* x;  // [k], any alignment
  Element type;
  int64_t k;
  int64_t group;       // k under one scale
  float static_scale;  // above 0: of the whole row, and `scales` is not written
  void* codes;         // [k] bfloat16
  float* scales;       // [ceil(k / group)]
};

struct KernelTable {
  const char* name;
  Element row_type;  // what multiply reads: kF32, or kBF16 for the dot-product path
  int row_tile;      // rows that multiply takes in one go
  void (*pack)(const PackArgs&);
  void (*multiply)(const MultiplyArgs&);
  void (*widen)(const WidenArgs&);
  void (*gate)(const GateArgs&);
  void (*finish)(const FinishArgs&);
  void (*combine)(const CombineArgs&);
  // Products of bfloat16 weights where they lie and in packed form; null where multiply is the only
  // way.
  void (*pair)(const ArrangeArgs&) = nullptr;
  void (*multiply_in_place)(const InPlaceArgs&) = nullptr;
  void (*pack_stored)(const PackStoredArgs&);
  void (*unpack)(const UnpackArgs&);
  void (*tile)(const ArrangeArgs&) = nullptr;
  void (*multiply_packed)(const PackedArgs&) = nullptr;
  // Chunk by chunk, for the tables without the products above; else null.
  void (*multiply_packed_chunk)(const PackedChunkArgs&) = nullptr;
  void (*multiply_stored_chunk)(const StoredChunkArgs&) = nullptr;
  // Quantised weights, for the same tables: decode and multiply, or for up to max_code_rows rows
  // multiply_codes.
  int max_code_rows = 0;
  void (*decode)(const DecodeArgs&) = nullptr;
  void (*multiply_codes)(const CodesArgs&) = nullptr;
  void (*expand_scales)(const ExpandScalesArgs&) = nullptr;
  void (*quantize)(const QuantizeArgs&) = nullptr;
};

/// Kernels that replace those of a table on processors that can do more.
struct CodeKernels {
  void (*decode)(const DecodeArgs&);
  void (*multiply_codes)(const CodesArgs&);
};

extern const KernelTable kPortableKernels;
#if defined(__x86_64__)
extern const KernelTable kAvx2Kernels;
extern const KernelTable kAvx512Kernels;
extern const CodeKernels kAvx512VbmiCodes;    // for kAvx512Kernels
extern const KernelTable kAvx512Bf16Kernels;  // bfloat16 compute only
extern const KernelTable kAmxKernels;         // bfloat16 compute only
#endif

}  // namespace cadre::cpu

// bfloat16 compute with the dot product of AVX512_BF16: pairs of k in one instruction. The
// instruction treats denormals as zero. Everything but pack and multiply is the AVX-512 table's.
#define CADRE_LANES 16
#include "backends/cpu/kernels/lanes.inl.h"
// The order matters: each of these builds on lanes.inl.h.
#include "backends/cpu/kernels/epilogue.inl.h"
#include "backends/cpu/kernels/multiply.inl.h"
#include "backends/cpu/kernels/pack.inl.h"
#include "backends/cpu/kernels/pack_as_stored.inl.h"
#include "backends/cpu/kernels/pack_pairs.inl.h"
#include "backends/cpu/kernels/products_direct.inl.h"
#include "backends/cpu/kernels/products_of_codes.inl.h"
#include "backends/cpu/kernels/products_of_codes_pairs.inl.h"
#include "backends/cpu/kernels/quantize.inl.h"

namespace cadre::cpu {
namespace {

inline Floats dot(Floats sum, Words x, Words w) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

// Rows of bfloat16, two k in a word.
struct PairRows {
  using Value = uint16_t;
  static constexpr bool kOnlyBF16 = true;

  // k and k + 1 of a row; kLast: the row ends behind k, and what lies there must not take part.
  template <bool kLast>
  static inline Words pair(const uint16_t* x) {
    if constexpr (kLast) return broadcast_word(uint32_t{*x});
    uint32_t both;
    __builtin_memcpy(&both, x, 4);
    return broadcast_word(both);
  }

  template <Element, bool kLast, int kRows, int kVectors>
  static inline void packed_pair(const uint16_t* x, const unsigned char* w,
                                 Floats (&sums)[kRows][kVectors]) {
    Words weights[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) weights[v] = load<Words>(w + v * kLanes * 4);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Words xs = pair<kLast>(x + r * kChunk);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = dot(sums[r][v], xs, weights[v]);
    }
  }

  template <Element, bool kLast, int kRows>
  static inline void word(const uint16_t* x, Words word, Floats (&sums)[kRows][1]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) sums[r][0] = dot(sums[r][0], pair<kLast>(x + r * kChunk), word);
  }
};

struct PairCodes {
  using Value = uint16_t;

  template <Element kType, int kRows, int kVectors>
  static inline void add(const uint16_t* x, const unsigned char* w,
                         Floats (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      for_each_pair<kType>(load<Words>(w + v * kLanes * 4), [&](int i, Words pair) {
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          sums[r][v] = dot(sums[r][v], PairRows::pair<false>(x + r * kChunk + i), pair);
        }
      });
    }
  }
};

template <int kRows, int kColumns>
void multiply_pairs_tile(const MultiplyArgs& args, int first_row, Prefetches& prefetches) {
  constexpr int kVectors = kColumns / kLanes;
  const uint16_t* x =
      static_cast<const uint16_t*>(args.rows[0]) + args.row_offset + int64_t{first_row} * kChunk;
  const auto* w = static_cast<const unsigned char*>(args.panel);
  Floats sums[kRows][kVectors] = {};
  int k = 0;
  prefetches.begin_tile();
  for (; k + 2 <= args.k; k += 2, x += 2, w += kPanelColumns * 4) {
    prefetches.step();
    PairRows::packed_pair<Element::kBF16, false>(x, w, sums);
  }
  if (k < args.k) PairRows::packed_pair<Element::kBF16, true>(x, w, sums);
  add_to_acc(args, first_row, 0, sums);
}

template <int kRows, int kColumns>
void multiply_pairs_rows(const MultiplyArgs& args, int rows, int first_row,
                         Prefetches& prefetches) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_pairs_tile<kRows, kColumns>(args, first_row, prefetches);
    multiply_pairs_rows<kRows - 1, kColumns>(args, rows, first_row, prefetches);
  }
}

template <int kRows, int kColumns>
void multiply_pairs_columns(const MultiplyArgs& args) {
  const int tiles = num_tiles(args.num_rows, kRows);
  Prefetches prefetches(args, tiles);
  int row = 0;
  for (int i = 0; i < tiles; ++i) {
    const int rows = tile_rows_of(args.num_rows, tiles, i);
    multiply_pairs_rows<kRows, kColumns>(args, rows, row, prefetches);
    row += rows;
  }
}

void multiply_pairs(const MultiplyArgs& args);

void multiply_pairs_pieces(const MultiplyArgs& args) {
  MultiplyArgs one = args;
  for (int begin = 0; begin < args.k; begin += args.piece) {
    one.k = args.piece < args.k - begin ? args.piece : args.k - begin;
    multiply_pairs(one);
    one.row_offset += args.piece;
    one.panel = static_cast<const char*>(one.panel) + args.piece / 2 * kPanelColumns * 4;
    one.column_scales += kPanelColumns;
    if (one.row_scales != nullptr) one.row_scales += args.num_rows;
    one.first = false;
    one.num_prefetch = 0;
  }
}

void multiply_pairs(const MultiplyArgs& args) {
  if (args.piece < args.k) return multiply_pairs_pieces(args);
  if (args.columns == kPanelColumns) return multiply_pairs_columns<6, kPanelColumns>(args);
  multiply_pairs_columns<12, kPanelColumns / 2>(args);
}

}  // namespace

const KernelTable kAvx512Bf16Kernels = {
    .name = "avx512_bf16",
    .row_type = Element::kBF16,
    .row_tile = 6,
    .pack = pack_pairs,
    .multiply = multiply_pairs,
    .widen = widen_rows,
    .gate = gate_function,
    .finish = finish_rows,
    .combine = combine_parts,
    .pack_stored = pack_stored,
    .unpack = unpack_pairs,
    .multiply_packed_chunk = multiply_packed_chunk<PairRows>,
    .multiply_stored_chunk = multiply_stored_chunk<PairRows>,
    .max_code_rows = kMaxCodeRows,
    .decode = decode_pairs,
    .multiply_codes = multiply_codes<PairCodes>,
    .expand_scales = expand_scales,
    .quantize = quantize_row,
};

}  // namespace cadre::cpu

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

namespace cadre::cpu {
namespace {

inline Floats dot(Floats sum, Words x, Words w) {
  return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)w);
}

template <int kRows>
void multiply_pairs_tile(const MultiplyArgs& args, int first_row, Prefetches& prefetches) {
  constexpr int kVectors = kPanelColumns / kLanes;
  const uint16_t* x[kRows];
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    x[r] = static_cast<const uint16_t*>(args.rows[first_row + r]) + args.row_offset;
  }
  const uint32_t* w = static_cast<const uint32_t*>(args.panel);
  Floats sums[kRows][kVectors] = {};
  const auto step = [&](auto pair_of) {
    Words weights[kVectors];
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v) weights[v] = load<Words>(w + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < kRows; ++r) {
      const Words xs = broadcast_word(pair_of(r));
#pragma GCC unroll 4
      for (int v = 0; v < kVectors; ++v) sums[r][v] = dot(sums[r][v], xs, weights[v]);
    }
  };
  int k = 0;
  prefetches.begin_tile();
  for (; k + 2 <= args.k; k += 2, w += kPanelColumns) {
    prefetches.step();
    step([&](int r) {
      uint32_t pair;
      __builtin_memcpy(&pair, x[r] + k, 4);
      return pair;
    });
  }
  if (k < args.k) {  // the row ends here: what lies behind it must not take part
    step([&](int r) {
      uint16_t last;
      __builtin_memcpy(&last, x[r] + k, 2);
      return uint32_t{last};
    });
  }
  const bool first = args.first;
#pragma GCC unroll 8
  for (int r = 0; r < kRows; ++r) {
    float* acc = args.acc + (first_row + r) * kPanelColumns;
#pragma GCC unroll 4
    for (int v = 0; v < kVectors; ++v, acc += kLanes) {
      store(acc, first ? sums[r][v] : load<Floats>(acc) + sums[r][v]);
    }
  }
}

template <int kRows>
void multiply_pairs_rest(const MultiplyArgs& args, int rows, int first_row,
                         Prefetches& prefetches) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_pairs_tile<kRows>(args, first_row, prefetches);
    multiply_pairs_rest<kRows - 1>(args, rows, first_row, prefetches);
  }
}

void multiply_pairs(const MultiplyArgs& args) {
  Prefetches prefetches(args, num_tiles(args.num_rows, 6));
  int row = 0;
  for (; row + 6 <= args.num_rows; row += 6) multiply_pairs_tile<6>(args, row, prefetches);
  multiply_pairs_rest<5>(args, args.num_rows - row, row, prefetches);
}

}  // namespace

const KernelTable kAvx512Bf16Kernels = {
    "avx512_bf16", Element::kBF16, 6,       pack_pairs, multiply_pairs, widen_rows,   gate_function,
    finish_rows,   combine_parts,  nullptr, nullptr,    pack_stored,    unpack_pairs, nullptr,
    nullptr};

}  // namespace cadre::cpu

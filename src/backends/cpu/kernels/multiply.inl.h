// The float32 products: a register tile of kRows x kSubPanel outputs over one chunk. Included by
// the isa_*.cc files after lanes.inl.h; everything has internal linkage.

namespace cadre::cpu {
namespace {

// Hands out args.prefetch in equal shares, one share a tile.
class Prefetches {
 public:
  Prefetches(const MultiplyArgs& args, int num_tiles)
      : next_(args.prefetch),
        end_(args.prefetch + args.num_prefetch),
        share_(num_tiles > 0 ? (args.num_prefetch + num_tiles - 1) / num_tiles : 0) {}

  void begin_tile() { stop_ = end_ - next_ < share_ ? end_ : next_ + share_; }
  void step() {
    if (next_ < stop_) prefetch(*next_++);
  }

 private:
  const void* const* next_;
  const void* const* end_;
  const void* const* stop_ = nullptr;
  int share_;
};

// acc (+)= scale * sum
inline Floats add_scaled(Floats acc, bool first, Floats scale, Floats sum) {
  return first ? scale * sum : multiply_add(scale, sum, acc);
}

inline Floats scale_of(const float* row_scales, int row, Floats column_scales) {
  return row_scales == nullptr ? column_scales : broadcast(row_scales[row]) * column_scales;
}

constexpr int num_tiles(int rows, int tile) { return (rows + tile - 1) / tile; }

// Rows of tile i when `rows` are cut into tiles of like size.
constexpr int tile_rows_of(int rows, int tiles, int i) { return rows / tiles + (i < rows % tiles); }

// What becomes of a sum: added to acc at (row, column), scaled first where there are scales.
template <int kRows, int kVectors>
inline void add_to_acc(const MultiplyArgs& args, int first_row, int first_column,
                       const Floats (&sums)[kRows][kVectors]) {
  float* to = args.acc + int64_t{first_row} * kPanelColumns + first_column;
  const bool first = args.first;
  if (args.column_scales == nullptr) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r, to += kPanelColumns) {
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        float* acc = to + v * kLanes;
        store(acc, first ? sums[r][v] : load<Floats>(acc) + sums[r][v]);
      }
    }
    return;
  }
#pragma GCC unroll 16
  for (int v = 0; v < kVectors; ++v) {
    const Floats scales = load<Floats>(args.column_scales + first_column + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      float* acc = to + r * kPanelColumns + v * kLanes;
      store(acc, add_scaled(load<Floats>(acc), first,
                            scale_of(args.row_scales, first_row + r, scales), sums[r][v]));
    }
  }
}

template <int kRows, int kSubPanel>
void multiply_tile(const MultiplyArgs& args, int first_row, int first_column,
                   Prefetches& prefetches) {
  constexpr int kVectors = kSubPanel / kLanes;
  const float* x =
      static_cast<const float*>(args.rows[0]) + args.row_offset + int64_t{first_row} * kChunk;
  const float* w = static_cast<const float*>(args.panel) + int64_t{first_column} * kChunk;
  Floats sums[kRows][kVectors] = {};
  prefetches.begin_tile();
  for (int k = 0; k < args.k; ++k, ++x, w += kSubPanel) {
    prefetches.step();
    Floats weights[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) weights[v] = load<Floats>(w + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Floats xs = broadcast(x[r * kChunk]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(xs, weights[v], sums[r][v]);
    }
  }
  add_to_acc(args, first_row, first_column, sums);
}

template <int kRows, int kSubPanel>
void multiply_rest(const MultiplyArgs& args, int rows, int first_row, int column,
                   Prefetches& prefetches) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return multiply_tile<kRows, kSubPanel>(args, first_row, column, prefetches);
    multiply_rest<kRows - 1, kSubPanel>(args, rows, first_row, column, prefetches);
  }
}

// Piece by piece: half as many rows, for the sums so far stay in registers as well.
template <int kRows, int kSubPanel>
void multiply_pieces_tile(const MultiplyArgs& args, int first_row, int first_column,
                          Prefetches& prefetches) {
  constexpr int kVectors = kSubPanel / kLanes;
  const float* x =
      static_cast<const float*>(args.rows[0]) + args.row_offset + int64_t{first_row} * kChunk;
  const float* w = static_cast<const float*>(args.panel) + int64_t{first_column} * kChunk;
  float* to = args.acc + int64_t{first_row} * kPanelColumns + first_column;
  const float* row_scales = args.row_scales;
  const float* column_scales = args.column_scales + first_column;
  Floats acc[kRows][kVectors];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      acc[r][v] = load<Floats>(to + r * kPanelColumns + v * kLanes);
    }
  }
  bool first = args.first;
  prefetches.begin_tile();
  for (int k = 0; k < args.k;) {
    const int end = k + args.piece < args.k ? k + args.piece : args.k;
    Floats sums[kRows][kVectors] = {};
    for (; k < end; ++k, ++x, w += kSubPanel) {
      prefetches.step();
      Floats weights[kVectors];
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) weights[v] = load<Floats>(w + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        const Floats xs = broadcast(x[r * kChunk]);
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(xs, weights[v], sums[r][v]);
      }
    }
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      const Floats scales = load<Floats>(column_scales + v * kLanes);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
        acc[r][v] =
            add_scaled(acc[r][v], first, scale_of(row_scales, first_row + r, scales), sums[r][v]);
      }
    }
    first = false;
    if (row_scales != nullptr) row_scales += args.num_rows;
    column_scales += kPanelColumns;
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) store(to + r * kPanelColumns + v * kLanes, acc[r][v]);
  }
}

template <int kRows, int kSubPanel>
void multiply_pieces_rest(const MultiplyArgs& args, int rows, int first_row, int column,
                          Prefetches& prefetches) {
  if constexpr (kRows > 0) {
    if (rows == kRows) {
      return multiply_pieces_tile<kRows, kSubPanel>(args, first_row, column, prefetches);
    }
    multiply_pieces_rest<kRows - 1, kSubPanel>(args, rows, first_row, column, prefetches);
  }
}

template <int kRows, int kSubPanel>
void multiply_pieces(const MultiplyArgs& args) {
  const int tiles = num_tiles(args.num_rows, kRows);
  Prefetches prefetches(args, tiles * (args.columns / kSubPanel));
  for (int column = 0; column < args.columns; column += kSubPanel) {
    int row = 0;
    for (int i = 0; i < tiles; ++i) {
      const int rows = tile_rows_of(args.num_rows, tiles, i);
      multiply_pieces_rest<kRows, kSubPanel>(args, rows, row, column, prefetches);
      row += rows;
    }
  }
}

// Tiles of like size, at most kRows: a small rest would wait for its own sums.
template <int kRows, int kSubPanel>
void multiply_floats(const MultiplyArgs& args) {
  if (args.piece < args.k) return multiply_pieces<kRows / 2, kSubPanel>(args);
  const int tiles = num_tiles(args.num_rows, kRows);
  Prefetches prefetches(args, tiles * (args.columns / kSubPanel));
  for (int column = 0; column < args.columns; column += kSubPanel) {
    int row = 0;
    for (int i = 0; i < tiles; ++i) {
      const int rows = tile_rows_of(args.num_rows, tiles, i);
      multiply_rest<kRows, kSubPanel>(args, rows, row, column, prefetches);
      row += rows;
    }
  }
}

[[maybe_unused]] void widen_rows(const WidenArgs& args) {
  with_type(args.type, [&]<Element kType>() {
    for (int r = 0; r < args.num_rows; ++r) {
      const unsigned char* from =
          static_cast<const unsigned char*>(args.rows[r]) + args.row_offset * size_of(kType);
      float* to = args.out + r * kChunk;
      int k = 0;
      for (; k + kLanes <= args.k; k += kLanes) {
        store(to + k, load_as_float<kType>(from + k * size_of(kType)));
      }
      if (k == args.k) continue;
      unsigned char tail[kLanes * 4] = {};
      __builtin_memcpy(tail, from + k * size_of(kType),
                       static_cast<unsigned>((args.k - k) * size_of(kType)));
      store(to + k, load_as_float<kType>(tail));
    }
  });
}

}  // namespace
}  // namespace cadre::cpu

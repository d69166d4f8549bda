// Products straight from the weights, without packing or unpacking them first: a chunk of a packed
// panel, and a chunk of a few weight rows where they lie. Included by the isa_*.cc files after
// pack_as_stored.inl.h; everything has internal linkage.
//
// Sums are those of multiply, bit for bit: one accumulator per output, k ascending.

namespace cadre::cpu {
namespace {

constexpr int kDirectTileRows = kLanes == 16 ? 12 : 6;
constexpr int kMaxSums = kLanes == 16 ? 24 : 12;  // what the registers hold beside the operands

// Columns that a tile of so many rows takes in one go.
constexpr int direct_columns(int rows) {
  int columns = kPanelColumns;
  while (rows * columns / kLanes > kMaxSums) columns /= 2;
  return columns;
}

template <Element kType>
inline Floats even_of(Words word) {
  if constexpr (kType == Element::kBF16) return bf16_low(word);
  return f16_to_float(word & 0xffffu);
}
template <Element kType>
inline Floats odd_of(Words word) {
  if constexpr (kType == Element::kBF16) return bf16_high(word);
  return f16_to_float(word >> 16);
}

// Rows of float32, one k after the other.
struct FloatRows {
  using Value = float;
  static constexpr bool kOnlyBF16 = false;

  template <int kRows, int kVectors>
  static inline void add(const float* x, const Floats* weights, Floats (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      const Floats xs = broadcast(x[r * kChunk]);
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) sums[r][v] = multiply_add(xs, weights[v], sums[r][v]);
    }
  }

  // Weights of k (and k + 1 unless kLast) as a packed panel has them.
  template <Element kType, bool kLast, int kRows, int kVectors>
  static inline void packed_pair(const float* x, const unsigned char* w,
                                 Floats (&sums)[kRows][kVectors]) {
    constexpr int kBytes = kLanes * 2 * size_of(kType);
    Floats weights[kVectors];
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) weights[v] = half<kType, 0>(w + v * kBytes);
    add(x, weights, sums);
    if constexpr (kLast) return;
    // Read once more: registers for the words are what larger tiles lack.
    asm("" : "+r"(w));
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) weights[v] = half<kType, 1>(w + v * kBytes);
    add(x + 1, weights, sums);
  }

  // Word i of a cache line of kLanes weight rows.
  template <Element kType, bool kLast, int kRows>
  static inline void word(const float* x, Words word, Floats (&sums)[kRows][1]) {
    if constexpr (kType == Element::kF32) {
      const Floats weights = (Floats)word;
      add(x, &weights, sums);
    } else {
      const Floats even = even_of<kType>(word);
      add(x, &even, sums);
      if constexpr (kLast) return;
      const Floats odd = odd_of<kType>(word);
      add(x + 1, &odd, sums);
    }
  }

 private:
  template <Element kType, int kOdd>
  static inline Floats half(const unsigned char* from) {
    const Words words = load<Words>(from);
    if constexpr (kType == Element::kF32) {
      Words even, odd;
      deinterleave(words, load<Words>(from + kLanes * 4), &even, &odd);
      return (Floats)(kOdd ? odd : even);
    } else {
      return kOdd ? odd_of<kType>(words) : even_of<kType>(words);
    }
  }
};

// k between two changes of columns: little enough that memory is read in one stream.
constexpr int kPassK = 32;

// Columns [column, column + direct_columns) of k in [begin, end), on top of what is in `sums`. The
// tile takes each fetch_every-th step's share of the lines to fetch, from fetch_from on.
template <typename Rows, Element kType, int kRows, int kVectors>
inline void packed_pass(const PackedChunkArgs& args, int first_row, int column, int begin, int end,
                        int fetch_from, int fetch_every, Floats (&sums)[kRows][kVectors]) {
  constexpr int kColumnBytes = 2 * size_of(kType);
  constexpr int kBytes = kVectors * kLanes * kColumnBytes;
  const auto* x = static_cast<const typename Rows::Value*>(args.rows) + first_row * kChunk + begin;
  const auto* w = static_cast<const unsigned char*>(args.packed) + column * kColumnBytes +
                  begin / 2 * kPanelColumns * kColumnBytes;
  const int64_t ahead = args.fetch_ahead;
  int until_fetch = fetch_from;
  int k = begin;
  for (; k + 2 <= end; k += 2, x += 2, w += kPanelColumns * kColumnBytes) {
    if (until_fetch-- == 0) {
      until_fetch = fetch_every - 1;
#pragma GCC unroll 16
      for (int b = 0; b < kBytes; b += 64) prefetch(w + ahead + b);
    }
    Rows::template packed_pair<kType, false>(x, w, sums);
  }
  if (k < end) Rows::template packed_pair<kType, true>(x, w, sums);
}

template <int kRows, int kVectors>
inline void add_sums(const Floats (&sums)[kRows][kVectors], bool overwrite, float* to) {
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r, to += kPanelColumns) {
#pragma GCC unroll 16
    for (int v = 0; v < kVectors; ++v) {
      float* at = to + v * kLanes;
      store(at, overwrite ? sums[r][v] : load<Floats>(at) + sums[r][v]);
    }
  }
}

template <typename Rows, Element kType, int kRows>
void packed_tile(const PackedChunkArgs& args, int first_row, int fetch_from, int fetch_every) {
  constexpr int kColumns = direct_columns(kRows);
  constexpr int kVectors = kColumns / kLanes;
  constexpr int kPasses = kPanelColumns / kColumns;
  float* to = args.acc + int64_t{first_row} * kPanelColumns;
  if constexpr (kPasses == 1) {
    Floats sums[kRows][kVectors] = {};
    packed_pass<Rows, kType>(args, first_row, 0, 0, args.k, fetch_from, fetch_every, sums);
    return add_sums(sums, args.first, to);
  }
  Floats resting[kPasses][kRows][kVectors] = {};
  for (int begin = 0; begin < args.k; begin += kPassK) {
    const int end = begin + kPassK < args.k ? begin + kPassK : args.k;
    for (int pass = 0; pass < kPasses; ++pass) {
      Floats sums[kRows][kVectors];
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) sums[r][v] = resting[pass][r][v];
      }
      packed_pass<Rows, kType>(args, first_row, pass * kColumns, begin, end, fetch_from,
                               fetch_every, sums);
#pragma GCC unroll 16
      for (int r = 0; r < kRows; ++r) {
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) resting[pass][r][v] = sums[r][v];
      }
    }
  }
  for (int pass = 0; pass < kPasses; ++pass) {
    add_sums(resting[pass], args.first, to + pass * kColumns);
  }
}

template <typename Rows, Element kType, int kRows>
void packed_tile_of(const PackedChunkArgs& args, int rows, int first_row, int from, int every) {
  if constexpr (kRows > 0) {
    if (rows == kRows) return packed_tile<Rows, kType, kRows>(args, first_row, from, every);
    packed_tile_of<Rows, kType, kRows - 1>(args, rows, first_row, from, every);
  }
}

template <typename Rows, Element kType>
void multiply_packed_type(const PackedChunkArgs& args) {
  const int tiles = num_tiles(args.num_rows, kDirectTileRows);
  int first = 0;
  for (int i = 0; i < tiles; ++i) {
    const int rows = tile_rows_of(args.num_rows, tiles, i);
    packed_tile_of<Rows, kType, kDirectTileRows>(args, rows, first, i, tiles);
    first += rows;
  }
}

template <typename Rows>
void multiply_packed_chunk(const PackedChunkArgs& args) {
  if constexpr (Rows::kOnlyBF16) {
    multiply_packed_type<Rows, Element::kBF16>(args);
  } else {
    with_type(args.type, [&]<Element kType>() { multiply_packed_type<Rows, kType>(args); });
  }
}

// kLanes weight rows of a stored chunk and their sums, which rest in memory between lines.
template <int kRows>
struct StoredLane {
  const unsigned char* rows[kLanes];
  Floats sums[kRows][1] = {};
};

// `count` k of a line, as many as it has unless kPartial.
template <typename Rows, Element kType, bool kPartial, int kRows>
inline void multiply_line(const typename Rows::Value* x, int count,
                          const unsigned char* const* rows, int64_t offset,
                          StoredLane<kRows>& lane) {
  constexpr int kPerWord = 4 / size_of(kType);
  asm("" : "+r"(x));  // values stay operands in memory instead of registers from line to line
  Floats sums[kRows][1];
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) sums[r][0] = lane.sums[r][0];
  constexpr int kWords = kLanes == 16 ? 16 : 4;  // that are transposed in one go
#pragma GCC unroll 4
  for (int first = 0; first < kLineWords; first += kWords) {
    Words words[kWords];
#if CADRE_LANES == 16
    load_transposed_lines(rows, offset, words);
#else
    load_transposed(rows, offset + first * 4, words);
#endif
    if constexpr (kPartial) {
      for (int i = 0; i < kWords; ++i) {
        const int at = (first + i) * kPerWord;
        if (at + kPerWord <= count) {
          Rows::template word<kType, false>(x + at, words[i], sums);
        } else if (at < count) {
          Rows::template word<kType, true>(x + at, words[i], sums);
        }
      }
    } else {
#pragma GCC unroll 16
      for (int i = 0; i < kWords; ++i) {
        Rows::template word<kType, false>(x + (first + i) * kPerWord, words[i], sums);
      }
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < kRows; ++r) lane.sums[r][0] = sums[r][0];
}

template <typename Rows, Element kType, int kRows>
void multiply_last_line(const typename Rows::Value* x, int count, int64_t offset,
                        StoredLane<kRows>& lane) {
  unsigned char copies[kLanes][kLineBytes] = {};
  const unsigned char* rows[kLanes];
  for (int n = 0; n < kLanes; ++n) {
    __builtin_memcpy(copies[n], lane.rows[n] + offset,
                     static_cast<unsigned>(count * size_of(kType)));
    rows[n] = copies[n];
  }
  multiply_line<Rows, kType, true>(x, count, rows, 0, lane);
}

template <typename Rows, Element kType, int kRows>
void stored_tile(const StoredChunkArgs& args) {
  constexpr int kStep = kLineBytes / size_of(kType);
  constexpr int kMaxLanes = 2 * 16 / kLanes;
  const auto* x = static_cast<const typename Rows::Value*>(args.rows);
  StoredLane<kRows> lanes[kMaxLanes];
  const int num_lanes = args.columns / kLanes;
  const int64_t stride = args.row_stride * size_of(kType);
  for (int n = 0; n < args.columns; ++n) {
    lanes[n / kLanes].rows[n % kLanes] =
        static_cast<const unsigned char*>(args.weights) + n * stride;
  }
  const auto* fetch = static_cast<const char*>(args.fetch);
  int k = 0;
  for (; k + kStep <= args.k; k += kStep) {
    const int64_t offset = int64_t{k} * size_of(kType);
    for (int i = 0; i < num_lanes; ++i) {
      if (fetch != nullptr) {
        const char* line = fetch + i * kLanes * args.fetch_stride + offset;
#pragma GCC unroll 16
        for (int n = 0; n < kLanes; ++n, line += args.fetch_stride) prefetch(line);
      }
      multiply_line<Rows, kType, false>(x + k, kStep, lanes[i].rows, offset, lanes[i]);
    }
  }
  for (int i = 0; i < num_lanes; ++i) {
    if (k < args.k) {
      multiply_last_line<Rows, kType>(x + k, args.k - k, int64_t{k} * size_of(kType), lanes[i]);
    }
    for (int r = 0; r < kRows; ++r) {
      float* to = args.acc + r * kPanelColumns + i * kLanes;
      const Floats sums = lanes[i].sums[r][0];
      store(to, args.first ? sums : load<Floats>(to) + sums);
    }
  }
}

template <typename Rows, Element kType, int kRows>
void stored_tile_of(const StoredChunkArgs& args) {
  if constexpr (kRows > 0) {
    if (args.num_rows == kRows) return stored_tile<Rows, kType, kRows>(args);
    stored_tile_of<Rows, kType, kRows - 1>(args);
  }
}

template <typename Rows>
void multiply_stored_chunk(const StoredChunkArgs& args) {
  if constexpr (Rows::kOnlyBF16) {
    stored_tile_of<Rows, Element::kBF16, kDirectTileRows>(args);
  } else {
    with_type(args.type,
              [&]<Element kType>() { stored_tile_of<Rows, kType, kDirectTileRows>(args); });
  }
}

}  // namespace
}  // namespace cadre::cpu

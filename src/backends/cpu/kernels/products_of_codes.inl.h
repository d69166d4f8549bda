// Codes of quantised weights: their values, and products straight from them. Included by the
// isa_*.cc files after products_direct.inl.h; everything has internal linkage.
//
// A word holds the codes of one column for consecutive k. e4m3 becomes pairs of bfloat16, which are
// exact, by tables of 16 bytes: of a code s eee emmm (bits) the upper nibble gives the upper byte
// of the result and the lower nibble the lower one, but where eee is 0 (subnormals) both come from
// the lower nibble, and 0x7f is NaN. With AVX512_VBMI (CADRE_VBMI) each byte comes from one table
// of 128.

namespace cadre::cpu {
namespace {

typedef uint8_t Codes __attribute__((vector_size(kLanes * 4)));

// A table of 16 bytes for each 128 bits of a vector.
struct ByteTable {
  alignas(64) uint8_t bytes[64];
};

template <typename F>
constexpr ByteTable make_byte_table(F value) {
  ByteTable table{};
  for (int i = 0; i < 64; ++i) table.bytes[i] = static_cast<uint8_t>(value(i % 16));
  return table;
}

// The upper half of the float32 of an e4m3 code.
constexpr uint32_t bf16_of_e4m3(uint32_t code) {
  const uint32_t sign = (code & 0x80u) << 8;
  const uint32_t exponent = code >> 3 & 15u;
  uint32_t mantissa = code & 7u;
  if ((code & 0x7fu) == 0x7f) return sign | 0x7ff0u;
  if (exponent != 0) return sign | (exponent + 120) << 7 | mantissa << 4;
  if (mantissa == 0) return sign;
  uint32_t shifted = 0;
  while ((mantissa & 8u) == 0) {
    mantissa <<= 1;
    ++shifted;
  }
  return sign | (121 - shifted) << 7 | (mantissa & 7u) << 4;
}

constexpr uint32_t bf16_of_e2m1(uint32_t code) {
  constexpr uint32_t kMagnitudes[8] = {0, 0x3f00, 0x3f80, 0x3fc0, 0x4000, 0x4040, 0x4080, 0x40c0};
  return (code & 8u) << 12 | kMagnitudes[code & 7u];
}

#if CADRE_LANES > 4
// Upper bytes: by the upper nibble, by the lower one of codes below 16, and what NaN adds.
constexpr ByteTable kUpperByHigh =
    make_byte_table([](int i) { return (i & 8) << 4 | ((i & 7) == 0 ? 0 : (i & 7) + 60); });
constexpr ByteTable kUpperOfSmall = make_byte_table([](int i) { return bf16_of_e4m3(i) >> 8; });
constexpr ByteTable kUpperOfNaN = make_byte_table([](int i) { return i == 15 ? 0x3c : 0; });
// How the lower byte of codes below 16 differs from the lower nibble.
constexpr ByteTable kLowerOfSmall =
    make_byte_table([](int i) { return (bf16_of_e4m3(i) & 0xffu) ^ (i << 4 & 0xf0); });
// Four words of a lane -> the first two codes of each, then the others.
constexpr ByteTable kHalvesOfWords =
    make_byte_table([](int i) { return i % 8 / 2 * 4 + i / 8 * 2 + i % 2; });

inline Codes look_up(const ByteTable& table, Codes index) {
#if CADRE_LANES == 16
  return (Codes)_mm512_shuffle_epi8(load<__m512i>(table.bytes), (__m512i)index);
#else
  return (Codes)_mm256_shuffle_epi8(load<__m256i>(table.bytes), (__m256i)index);
#endif
}

inline Codes shuffle_lanes(Codes codes, const ByteTable& order) {
#if CADRE_LANES == 16
  return (Codes)_mm512_shuffle_epi8((__m512i)codes, load<__m512i>(order.bytes));
#else
  return (Codes)_mm256_shuffle_epi8((__m256i)codes, load<__m256i>(order.bytes));
#endif
}

// a - b, or 0 where that is negative.
inline Codes subtract_to_zero(Codes a, Codes b) {
#if CADRE_LANES == 16
  return (Codes)_mm512_subs_epu8((__m512i)a, (__m512i)b);
#else
  return (Codes)_mm256_subs_epu8((__m256i)a, (__m256i)b);
#endif
}

#ifdef CADRE_VBMI
struct LongTable {
  alignas(64) uint8_t bytes[128];
};
constexpr LongTable make_long_table(int shift) {
  LongTable table{};
  for (uint32_t i = 0; i < 128; ++i) {
    table.bytes[i] = static_cast<uint8_t>(bf16_of_e4m3(i) >> shift);
  }
  return table;
}
constexpr LongTable kUpperBytes = make_long_table(8);
constexpr LongTable kLowerBytes = make_long_table(0);

// By the lower seven bits of each index.
inline Codes look_up(const LongTable& table, Codes index) {
  return (Codes)_mm512_permutex2var_epi8(load<__m512i>(table.bytes), (__m512i)index,
                                         load<__m512i>(table.bytes + 64));
}
#endif

inline void interleave_bytes(Codes lower, Codes upper, Words (&out)[2]) {
#if CADRE_LANES == 16
  out[0] = (Words)_mm512_unpacklo_epi8((__m512i)lower, (__m512i)upper);
  out[1] = (Words)_mm512_unpackhi_epi8((__m512i)lower, (__m512i)upper);
#else
  out[0] = (Words)_mm256_unpacklo_epi8((__m256i)lower, (__m256i)upper);
  out[1] = (Words)_mm256_unpackhi_epi8((__m256i)lower, (__m256i)upper);
#endif
}
#endif

// Pairs of k of kLanes columns.
inline void e4m3_pairs(Words words, Words (&pairs)[2]) {
#if CADRE_LANES > 4
  const Codes codes = shuffle_lanes((Codes)words, kHalvesOfWords);
#ifdef CADRE_VBMI
  const Codes upper = look_up(kUpperBytes, codes) | (codes & uint8_t{0x80});
  const Codes lower = look_up(kLowerBytes, codes);
#else
  const Codes magnitude = codes & uint8_t{0x7f};
  const Codes small = magnitude + uint8_t{0x70};  // bit 7 set: not small, looks up 0
  const Codes high = (Codes)((Words)codes >> 4) & uint8_t{0x0f};
  const Codes nan = subtract_to_zero(magnitude, Codes{} + uint8_t{0x70});
  const Codes upper =
      look_up(kUpperByHigh, high) | look_up(kUpperOfSmall, small) | look_up(kUpperOfNaN, nan);
  const Codes lower = ((Codes)((Words)codes << 4) & uint8_t{0xf0}) ^ look_up(kLowerOfSmall, small);
#endif
  interleave_bytes(lower, upper, pairs);
#else
  struct Table {
    uint16_t bits[256];
  };
  static constexpr Table kTable = [] {
    Table table{};
    for (uint32_t i = 0; i < 256; ++i) table.bits[i] = static_cast<uint16_t>(bf16_of_e4m3(i));
    return table;
  }();
  for (int n = 0; n < kLanes; ++n) {
    const uint32_t word = words[n];
    pairs[0][n] = kTable.bits[word & 0xffu] | uint32_t{kTable.bits[word >> 8 & 0xffu]} << 16;
    pairs[1][n] = kTable.bits[word >> 16 & 0xffu] | uint32_t{kTable.bits[word >> 24]} << 16;
  }
#endif
}

// Code i of each word. -0 stays -0.
inline Floats e2m1_floats(Words words, int i) {
#if CADRE_LANES == 16
  const __m512 table =
      _mm512_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6, -0.0f, -0.5f, -1, -1.5f, -2, -3, -4, -6);
  return (Floats)_mm512_permutexvar_ps((__m512i)(i == 0 ? words : words >> 4 * i), table);
#elif CADRE_LANES == 8
  const __m256 table = _mm256_setr_ps(0, 0.5f, 1, 1.5f, 2, 3, 4, 6);
  const Words magnitude =
      (Words)_mm256_permutevar8x32_ps(table, (__m256i)(i == 0 ? words : words >> 4 * i));
  return (Floats)(magnitude | (words << (28 - 4 * i) & 0x80000000u));
#else
  Words bits;
  for (int n = 0; n < kLanes; ++n) bits[n] = bf16_of_e2m1(words[n] >> 4 * i & 15u) << 16;
  return (Floats)bits;
#endif
}

// From now on a register: compilers would load it again for its next use.
inline void keep_loaded(Words& words) {
#if CADRE_LANES == 16
  asm("" : "+v"(words));
#else
  static_cast<void>(words);
#endif
}

// The value of every code of kLanes words, k ascending.
template <Element kType, typename F>
inline void for_each_value(Words words, F f) {
  if constexpr (kType == Element::kE4m3) {
    Words pairs[2];
    e4m3_pairs(words, pairs);
#pragma GCC unroll 2
    for (int i = 0; i < 2; ++i) {
      f(2 * i, bf16_low(pairs[i]));
      f(2 * i + 1, bf16_high(pairs[i]));
    }
  } else {
#pragma GCC unroll 8
    for (int i = 0; i < 8; ++i) f(i, e2m1_floats(words, i));
  }
}

// Products with rows of float32. Sums of several columns take turns: each waits for its last one.
struct FloatCodes {
  using Value = float;

  // The k of one word of kVectors * kLanes columns.
  template <Element kType, int kRows, int kVectors>
  static inline void add(const float* x, const unsigned char* w, Floats (&sums)[kRows][kVectors]) {
    constexpr int kBytes = kLanes * 4;
    if constexpr (kType == Element::kE4m3) {
      constexpr int kTogether = kVectors < 2 || kRows > 1 ? 1 : 2;
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; v += kTogether) {
        add_pairs<kTogether>(x, w + v * kBytes, v, sums);
      }
    } else {
      // Loads at each byte of the words take the place of shifts, of which one a cycle is done.
#pragma GCC unroll 4
      for (int i = 0; i < 4; ++i) {
        Words words[kVectors];
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          words[v] = load<Words>(w + v * kBytes + i);
          keep_loaded(words[v]);
          add_k(x + 2 * i, e2m1_floats(words[v], 0), v, sums);
        }
#pragma GCC unroll 16
        for (int v = 0; v < kVectors; ++v) {
          add_k(x + 2 * i + 1, e2m1_floats(words[v], 1), v, sums);
        }
      }
    }
  }

 private:
  template <int kTogether, int kRows, int kVectors>
  static inline void add_pairs(const float* x, const unsigned char* w, int first,
                               Floats (&sums)[kRows][kVectors]) {
    Words pairs[kTogether][2];
#pragma GCC unroll 4
    for (int i = 0; i < kTogether; ++i) e4m3_pairs(load<Words>(w + i * kLanes * 4), pairs[i]);
#pragma GCC unroll 2
    for (int p = 0; p < 2; ++p) {
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        add_k(x + 2 * p, bf16_low(pairs[i][p]), first + i, sums);
      }
#pragma GCC unroll 4
      for (int i = 0; i < kTogether; ++i) {
        add_k(x + 2 * p + 1, bf16_high(pairs[i][p]), first + i, sums);
      }
    }
  }

  template <int kRows, int kVectors>
  static inline void add_k(const float* x, Floats weights, int v, Floats (&sums)[kRows][kVectors]) {
#pragma GCC unroll 16
    for (int r = 0; r < kRows; ++r) {
      sums[r][v] = multiply_add(broadcast(x[r * kChunk]), weights, sums[r][v]);
    }
  }
};

constexpr int kMaxCodeRows = 6;
constexpr uint64_t kFetchBlock = 16384;
// Sums that the registers hold beside tables and what is decoded.
constexpr int kMaxCodeSums = kLanes == 16 ? 16 : 8;

constexpr int code_vectors(int rows) {
  int vectors = kPanelColumns / kLanes;
  while (vectors > 1 && rows * vectors > kMaxCodeSums) vectors /= 2;
  return vectors;
}

// For `lines` lines of a packed panel, among the four of an aligned 256 bytes: as many of the next
// block of kFetchBlock bytes. One stream keeps too few pages under way, so four lines that follow
// each other fetch from the block's four quarters. Always inline: GCC 12 takes a function that only
// fetches for one without effect and drops the call.
[[gnu::always_inline]] inline void fetch_next_block(const unsigned char* at, int lines) {
  constexpr uint64_t kQuarter = kFetchBlock / 4;
  const auto address = reinterpret_cast<uint64_t>(at);
  const uint64_t offset = address % kFetchBlock;
  const unsigned char* first =
      at - offset + kFetchBlock + offset / 256 * 64 + offset / 64 % 4 * kQuarter;
#pragma GCC unroll 16
  for (int i = 0; i < lines; ++i) prefetch(first + i * kQuarter);
}

template <typename Rows, Element kType, int kRows>
void codes_tile(const CodesArgs& args) {
  constexpr int kVectors = code_vectors(kRows);
  constexpr int kPerWord = codes_per_word(kType);
  constexpr int kWordRow = kPanelColumns * 4;  // bytes of a word of every column
  constexpr int kBytes = kVectors * kLanes * 4;
  bool first = args.first;
  const float* row_scales = args.row_scales;
  const float* column_scales = args.column_scales;
  for (int begin = 0; begin < args.k; begin += args.piece) {
    const int end = begin + args.piece < args.k ? begin + args.piece : args.k;
    for (int column = 0; column < kPanelColumns; column += kVectors * kLanes) {
      const auto* x = static_cast<const typename Rows::Value*>(args.rows) + begin;
      const auto* w =
          static_cast<const unsigned char*>(args.codes) + begin / kPerWord * kWordRow + column * 4;
      Floats sums[kRows][kVectors] = {};
      for (int k = begin; k < end; k += kPerWord, x += kPerWord, w += kWordRow) {
        if (args.fetches_next_block) {
          fetch_next_block(w, (kBytes + 63) / 64);
        } else if (args.fetch_rows != nullptr) {
          // Lines of one word's columns lie in as many neighbouring rows.
          const auto line =
              static_cast<uint64_t>(w - static_cast<const unsigned char*>(args.codes)) / 64;
          const char* const* rows = args.fetch_rows + line % kPanelColumns;
          const auto ahead = static_cast<uint64_t>(args.fetch_ahead) + line / kPanelColumns * 64;
#pragma GCC unroll 16
          for (int b = 0; b < kBytes / 64; ++b) prefetch(rows[b] + ahead);
        }
        Rows::template add<kType>(x, w, sums);
      }
#pragma GCC unroll 16
      for (int v = 0; v < kVectors; ++v) {
        const Floats scales = load<Floats>(column_scales + column + v * kLanes);
#pragma GCC unroll 16
        for (int r = 0; r < kRows; ++r) {
          float* acc = args.acc + r * kPanelColumns + column + v * kLanes;
          store(acc,
                add_scaled(load<Floats>(acc), first, scale_of(row_scales, r, scales), sums[r][v]));
        }
      }
    }
    first = false;
    if (row_scales != nullptr) row_scales += kRows;
    column_scales += kPanelColumns;
  }
}

template <typename Rows, Element kType, int kRows>
void codes_tile_of(const CodesArgs& args) {
  if constexpr (kRows > 0) {
    if (args.num_rows == kRows) return codes_tile<Rows, kType, kRows>(args);
    codes_tile_of<Rows, kType, kRows - 1>(args);
  }
}

template <typename Rows>
void multiply_codes(const CodesArgs& args) {
  if (args.type == Element::kE4m3) {
    return codes_tile_of<Rows, Element::kE4m3, kMaxCodeRows>(args);
  }
  codes_tile_of<Rows, Element::kE2m1, kMaxCodeRows>(args);
}

// As pack_floats leaves the panel.
template <Element kType, int kSubPanel>
void decode_floats_of(const DecodeArgs& args) {
  constexpr int kPerWord = codes_per_word(kType);
  for (int column = 0; column < kPanelColumns; column += kLanes) {
    const auto sink = float_sink<kSubPanel>(args.panel, column);
    const auto* from = static_cast<const unsigned char*>(args.codes) + column * 4;
    for (int k = 0; k < args.k; k += kPerWord, from += kPanelColumns * 4) {
      prefetch(from + args.fetch_ahead);
      for_each_value<kType>(load<Words>(from), [&](int i, Floats weights) {
        store(sink.at + (k + i) * sink.row_floats, weights);
      });
    }
  }
}

template <int kSubPanel>
void decode_floats(const DecodeArgs& args) {
  if (args.type == Element::kE4m3) return decode_floats_of<Element::kE4m3, kSubPanel>(args);
  decode_floats_of<Element::kE2m1, kSubPanel>(args);
}

// Byte i of each word as a float32 exponent: 0 is 2^-127, 255 is NaN.
template <int i>
inline void expand_byte(const Words (&words)[kPanelColumns / kLanes], bool has_nan, float* scales) {
#pragma GCC unroll 16
  for (int v = 0; v < kPanelColumns / kLanes; ++v) {
    Words bits = (i == 3 ? words[v] : words[v] << (24 - 8 * i)) >> 1 & 0x7f800000u;
    bits = select(bits == 0, broadcast_word(0x00400000u), bits);
    if (has_nan) bits = select(bits == 0x7f800000u, broadcast_word(0x7fc00000u), bits);
    store(scales + v * kLanes, bits);
  }
}

[[maybe_unused]] void expand_scales(const ExpandScalesArgs& args) {
  const auto* from = static_cast<const unsigned char*>(args.words);
  for (int i = 0; i < args.fetch_words; ++i) {
    fetch_next_block(from + i * kPanelColumns * 4, kPanelColumns * 4 / 64);
  }
  Words words[kPanelColumns / kLanes];
  [[maybe_unused]] Words ones = {};  // the upper bit of every byte that is 255
#pragma GCC unroll 16
  for (int v = 0; v < kPanelColumns / kLanes; ++v) {
    words[v] = load<Words>(from + v * kLanes * 4);
    ones |= words[v] & ((words[v] & 0x7f7f7f7fu) + 0x01010101u);
  }
#if CADRE_LANES == 16
  const bool has_nan = _mm512_test_epi32_mask((__m512i)ones, _mm512_set1_epi32(-0x7f7f7f80)) != 0;
#else
  const bool has_nan = true;
#endif
  expand_byte<0>(words, has_nan, args.scales);
  expand_byte<1>(words, has_nan, args.scales + kPanelColumns);
  expand_byte<2>(words, has_nan, args.scales + 2 * kPanelColumns);
  expand_byte<3>(words, has_nan, args.scales + 3 * kPanelColumns);
}

}  // namespace
}  // namespace cadre::cpu

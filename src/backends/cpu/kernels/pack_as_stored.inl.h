// The packed form of experts: whole columns of weights into panels of pairs of k, bit for bit, and
// a chunk of such a panel into the scratch panel that a table multiplies with. Included by the
// isa_*.cc files after pack.inl.h; everything has internal linkage.
//
// A panel is written slice by slice: 64 bytes along k of all its columns, 4 KiB, are put together
// in the L1 cache and leave in one run. Whole lines of the rows are read, and whole lines of the
// panel are written past the caches, for nobody reads them soon.

namespace cadre::cpu {
namespace {

constexpr int kLineBytes = 64;
constexpr int kLineWords = kLineBytes / 4;
constexpr int kSliceBytes = kPanelColumns * kLineBytes;
// Lines ahead of the one read: rows are too many for the processor to follow by itself.
constexpr int kLinesAhead = 8;

// a0 b0 a1 b1 ..., and back.
inline void interleave(Words a, Words b, Words* out) {
#if CADRE_LANES == 16
  out[0] = __builtin_shufflevector(a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
  out[1] =
      __builtin_shufflevector(a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
#elif CADRE_LANES == 8
  out[0] = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  out[1] = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#else
  out[0] = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  out[1] = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#endif
}

inline void deinterleave(Words a, Words b, Words* even, Words* odd) {
#if CADRE_LANES == 16
  *even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
  *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
#elif CADRE_LANES == 8
  *even = __builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14);
  *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15);
#else
  *even = __builtin_shufflevector(a, b, 0, 2, 4, 6);
  *odd = __builtin_shufflevector(a, b, 1, 3, 5, 7);
#endif
}

// One line of kLanes rows: word i of all rows -> words[i].
inline void transpose_lines(const unsigned char* const* rows, Words* words) {
#if CADRE_LANES == 16
  load_transposed_lines(rows, 0, words);
#else
  for (int s = 0; s < 4; ++s) load_transposed(rows, 16 * s, words + 4 * s);
#endif
}

// The words of kLanes columns, where they belong in the slice.
template <int kSize>
inline void put_words(const Words* words, int column, unsigned char* slice) {
  unsigned char* to = slice + column * 2 * kSize;
#pragma GCC unroll 16
  for (int i = 0; i < kLineWords; ++i) {
    if constexpr (kSize == 2) {
      store(to + i * kPanelColumns * 4, words[i]);
    } else if (i % 2 == 0) {
      Words pairs[2];
      interleave(words[i], words[i + 1], pairs);
      store(to + i / 2 * kPanelColumns * 8, pairs[0]);
      store(to + i / 2 * kPanelColumns * 8 + kLanes * 4, pairs[1]);
    }
  }
}

struct StoredLines {
  const StoredColumns* part;
  int first;  // column
  int count;  // columns, up to kLanes
  int64_t k;
  int k_count;

  template <int kSize>
  const unsigned char* at(int64_t n, int64_t i) const {
    return static_cast<const unsigned char*>(part->data) +
           ((first + n) * part->row_stride + (k + i) * part->col_stride) * kSize;
  }
};

template <int kSize>
inline void read_along_k(const StoredLines& lines, Words* words) {
  const unsigned char* rows[kLanes];
  unsigned char copies[kLanes][kLineBytes];
  const bool whole = lines.count == kLanes && lines.k_count * kSize == kLineBytes;
  for (int n = 0; n < kLanes; ++n) {
    rows[n] = lines.at<kSize>(n, 0);
    if (whole) {
      prefetch(rows[n] + kLinesAhead * kLineBytes);
      continue;
    }
    __builtin_memset(copies[n], 0, kLineBytes);
    if (n < lines.count) {
      __builtin_memcpy(copies[n], rows[n], static_cast<unsigned>(lines.k_count * kSize));
    }
    rows[n] = copies[n];
  }
  transpose_lines(rows, words);
}

// Elements of kLanes columns at one k, in the low bits of the words.
template <int kSize>
inline Words read_columns(const StoredLines& lines, int i) {
  unsigned char gathered[kLanes * kSize] = {};
  const unsigned char* from = gathered;
  if (lines.part->row_stride == 1 && lines.count == kLanes) {
    from = lines.at<kSize>(0, i);
  } else {
    for (int n = 0; n < lines.count; ++n) {
      __builtin_memcpy(gathered + n * kSize, lines.at<kSize>(n, i), kSize);
    }
  }
  if constexpr (kSize == 4) return load<Words>(from);
  return widen_halfs(load<Halfs>(from));
}

template <int kSize>
inline void read_across_k(const StoredLines& lines, Words* words) {
  for (int i = 0; i < kLineWords; ++i) words[i] = Words{};
  for (int i = 0; i < lines.k_count; ++i) {
    const Words columns = read_columns<kSize>(lines, i);
    if constexpr (kSize == 4) {
      words[i] = columns;
    } else {
      words[i / 2] |= i % 2 == 0 ? columns : columns << 16;
    }
  }
}

// From a slice to the panel, past the caches where the instruction set can.
inline void write_slice(unsigned char* to, const unsigned char* slice, int bytes) {
#if CADRE_LANES == 16
  for (int i = 0; i < bytes; i += 64) {
    _mm512_stream_si512(reinterpret_cast<__m512i*>(to + i), _mm512_load_si512(slice + i));
  }
#elif CADRE_LANES == 8
  for (int i = 0; i < bytes; i += 32) {
    _mm256_stream_si256(reinterpret_cast<__m256i*>(to + i),
                        _mm256_load_si256(reinterpret_cast<const __m256i*>(slice + i)));
  }
#else
  __builtin_memcpy(to, slice, static_cast<unsigned>(bytes));
#endif
}

template <int kSize>
void pack_stored_size(const PackStoredArgs& args) {
  constexpr int kStep = kLineBytes / kSize;
  constexpr int kPairBytes = kPanelColumns * 2 * kSize;
  alignas(64) unsigned char slice[kSliceBytes];
  auto* panel = static_cast<unsigned char*>(args.panel);
  const int width = kPanelColumns / args.num_parts;
  for (int64_t k = 0; k < args.k; k += kStep) {
    const int count = args.k - k < kStep ? static_cast<int>(args.k - k) : kStep;
    for (int column = 0; column < kPanelColumns; column += kLanes) {
      const StoredColumns& part = args.parts[column / width];
      const int first = column % width;
      const int left = part.columns - first;
      StoredLines lines{&part, first, left < kLanes ? left : kLanes, k, count};
      if (lines.count < 0) lines.count = 0;
      Words words[kLineWords];
      if (part.col_stride == 1) {
        read_along_k<kSize>(lines, words);
      } else {
        read_across_k<kSize>(lines, words);
      }
      put_words<kSize>(words, column, slice);
    }
    const int bytes = (count + 1) / 2 * kPairBytes;
    write_slice(panel, slice, bytes);
    panel += bytes;
  }
#if CADRE_LANES > 4
  _mm_sfence();  // the writes past the caches come before what the thread publishes next
#endif
}

void pack_stored(const PackStoredArgs& args) {
  if (args.type == Element::kF32) return pack_stored_size<4>(args);
  pack_stored_size<2>(args);
}

// kLanes columns of one pair of k.
template <Element kType, Element kCompute, typename Sink>
inline void unpack_pair(const unsigned char* from, int k, Sink& sink) {
  const Words words = load<Words>(from);
  if constexpr (kType == Element::kF32) {
    Words even, odd;
    deinterleave(words, load<Words>(from + kLanes * 4), &even, &odd);
    sink.template pair<kCompute>(k, (Floats)even, (Floats)odd);
  } else {
    sink_pair<kType, kCompute>(words, k, sink);
  }
}

template <typename MakeSink>
void unpack_with(const UnpackArgs& args, MakeSink make_sink) {
  with_type(args.type, [&]<Element kType>() {
    with_type(args.compute, [&]<Element kCompute>() {
      constexpr int kColumnBytes = 2 * size_of(kType);
      for (int column = 0; column < kPanelColumns; column += kLanes) {
        auto sink = make_sink(column);
        const auto* from = static_cast<const unsigned char*>(args.packed) + column * kColumnBytes;
        for (int k = 0; k < args.k; k += 2, from += kPanelColumns * kColumnBytes) {
          unpack_pair<kType, kCompute>(from, k, sink);
        }
      }
    });
  });
}

// As pack_floats leaves the panel.
template <int kSubPanel>
void unpack_floats(const UnpackArgs& args) {
  unpack_with(args, [&](int column) { return float_sink<kSubPanel>(args.panel, column); });
}

}  // namespace
}  // namespace cadre::cpu

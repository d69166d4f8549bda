// The packed form of experts: whole columns of weights into panels of pairs of k, bit for bit, and
// a chunk of such a panel into the scratch panel that a table multiplies with. Included by the
// isa_*.cc files after pack.inl.h; everything has internal linkage.
//
// A block is kBlockLines cache lines along k of all columns: long enough for the rows' own order in
// memory, and small enough to be written while it lies in the L1 cache. Stores go through the
// caches: the system has just cleared these pages there, and that write to memory is saved.

namespace cadre::cpu {
namespace {

constexpr int kLineBytes = 64;
constexpr int kLineWords = kLineBytes / 4;
constexpr int kBlockLines = 4;
constexpr int kSliceBytes = kPanelColumns * kLineBytes;  // one line of every column

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
  unsigned char* to = slice + column * (kSize == 4 ? 8 : 4);
#pragma GCC unroll 16
  for (int i = 0; i < kLineWords; ++i) {
    if constexpr (kSize < 4) {
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
  int64_t k_total;  // of the matrix
  bool fetches;

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
      // Rows are too many to be followed without.
      if (lines.fetches) prefetch(rows[n] + kBlockLines * kLineBytes);
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
  const unsigned char* from = lines.at<kSize>(0, i);
  const int64_t stride = lines.part->row_stride;
  // Every second element: the last one's neighbour is read too, where a later k lies behind it.
  if (stride == 2 && lines.count == kLanes && lines.k + i + 1 < lines.k_total &&
      lines.part->col_stride > 0) {
    if constexpr (kSize == 2) return load<Words>(from) & 0xffffu;
    if constexpr (kSize == 4) {
      Words even, odd;
      deinterleave(load<Words>(from), load<Words>(from + kLanes * 4), &even, &odd);
      return even;
    }
  }
  unsigned char gathered[kLanes * kSize] = {};
  if (stride != 1 || lines.count < kLanes) {
    for (int n = 0; n < lines.count; ++n) {
      __builtin_memcpy(gathered + n * kSize, lines.at<kSize>(n, i), kSize);
    }
    from = gathered;
  }
  if constexpr (kSize == 4) return load<Words>(from);
  if constexpr (kSize == 1) return __builtin_convertvector(load<Bytes>(from), Words);
  return widen_halfs(load<Halfs>(from));
}

template <int kSize>
inline void read_across_k(const StoredLines& lines, Words* words) {
  for (int i = 0; i < kLineWords; ++i) words[i] = Words{};
  for (int i = 0; i < lines.k_count; ++i) {
    prefetch(lines.at<kSize>(0, i + kBlockLines * kLineBytes / kSize));
    const Words columns = read_columns<kSize>(lines, i);
    constexpr int kPerWord = 4 / kSize;
    words[i / kPerWord] |= columns << (i % kPerWord * 8 * (kSize % 4));
  }
}

// `count` k from k on, of kLanes columns, to a slice of the panel.
template <int kSize>
inline void pack_line(const PackStoredArgs& args, int column, int64_t k, int count,
                      unsigned char* slice) {
  const int width = kPanelColumns / args.num_parts;
  const StoredColumns& part = args.parts[column / width];
  const int left = part.columns - column % width;
  const int columns = left < 0 ? 0 : left < kLanes ? left : kLanes;
  const StoredLines lines{&part, column % width, columns, k, count, args.k, args.fetches};
  Words words[kLineWords];
  if (part.col_stride == 1) {
    read_along_k<kSize>(lines, words);
  } else {
    read_across_k<kSize>(lines, words);
  }
  put_words<kSize>(words, column, slice);
}

template <int kSize>
void pack_stored_size(const PackStoredArgs& args) {
  constexpr int kStep = kLineBytes / kSize;
  constexpr int64_t kBlock = kBlockLines * kStep;
  auto* panel = static_cast<unsigned char*>(args.panel);
  const int64_t whole = args.k / kStep * kStep;
  for (int64_t begin = 0; begin < whole; begin += kBlock) {
    const int64_t end = begin + kBlock < whole ? begin + kBlock : whole;
    for (int column = 0; column < kPanelColumns; column += kLanes) {
      for (int64_t k = begin; k < end; k += kStep) {
        pack_line<kSize>(args, column, k, kStep, panel + k / kStep * kSliceBytes);
      }
    }
  }
  const int rest = static_cast<int>(args.k - whole);
  if (rest == 0) return;
  unsigned char slice[kSliceBytes];
  for (int column = 0; column < kPanelColumns; column += kLanes) {
    pack_line<kSize>(args, column, whole, rest, slice);
  }
  constexpr int kUnit = kSize == 1 ? 4 : 2;  // k that are written together
  __builtin_memcpy(
      panel + whole / kStep * kSliceBytes, slice,
      static_cast<unsigned>((rest + kUnit - 1) / kUnit * kUnit * kPanelColumns * kSize));
}

void pack_stored(const PackStoredArgs& args) {
  if (args.type == Element::kF32) return pack_stored_size<4>(args);
  if (!is_code(args.type)) return pack_stored_size<2>(args);
  PackStoredArgs bytes = args;
  if (args.type == Element::kE2m1) bytes.k = (args.k + 1) / 2;
  pack_stored_size<1>(bytes);
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

// Packing of a chunk of weights, from wherever they lie, into a panel with the columns in the
// lanes. Included by the isa_*.cc files after lanes.inl.h; everything has internal linkage.
//
// Weights with consecutive k (the usual layout) are transposed in registers, 4 words of kLanes rows
// at a time; weights with consecutive n are loaded as they are; anything else is gathered one by
// one. No byte outside the block's own elements is read, for the block may end where a mapped file
// ends.

namespace cadre::cpu {
namespace {

// Where packed values go. A sink takes the floats of (k, k + 1) for kLanes columns.
struct FloatSink {
  float* at;       // [k][kSubPanel] of this group of columns
  int row_floats;  // from one k to the next
  template <Element kCompute>
  void pair(int k, Floats even, Floats odd) {
    store(at + k * row_floats, round_to<kCompute>(even));
    store(at + (k + 1) * row_floats, round_to<kCompute>(odd));
  }
};

// 4 words of row j in lane group j % 4 ... -> word i of all rows: out[i] lane n = row n word i.
inline void load_transposed(const unsigned char* const* rows, int64_t offset, Words* out) {
#if CADRE_LANES == 16
  __m512i a[4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    // 128-bit loads put four rows into one register without using the shuffle port.
    const auto at = [&](int r) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset));
    };
    __m512i v = _mm512_castsi128_si512(at(j));
    v = _mm512_inserti32x4(v, at(4 + j), 1);
    v = _mm512_inserti32x4(v, at(8 + j), 2);
    a[j] = _mm512_inserti32x4(v, at(12 + j), 3);
  }
  const __m512i t0 = _mm512_unpacklo_epi32(a[0], a[1]), t1 = _mm512_unpackhi_epi32(a[0], a[1]);
  const __m512i t2 = _mm512_unpacklo_epi32(a[2], a[3]), t3 = _mm512_unpackhi_epi32(a[2], a[3]);
  out[0] = (Words)_mm512_unpacklo_epi64(t0, t2);
  out[1] = (Words)_mm512_unpackhi_epi64(t0, t2);
  out[2] = (Words)_mm512_unpacklo_epi64(t1, t3);
  out[3] = (Words)_mm512_unpackhi_epi64(t1, t3);
#elif CADRE_LANES == 8
  __m256i a[4];
  for (int j = 0; j < 4; ++j) {
    const auto at = [&](int r) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset));
    };
    a[j] = _mm256_inserti128_si256(_mm256_castsi128_si256(at(j)), at(4 + j), 1);
  }
  const __m256i t0 = _mm256_unpacklo_epi32(a[0], a[1]), t1 = _mm256_unpackhi_epi32(a[0], a[1]);
  const __m256i t2 = _mm256_unpacklo_epi32(a[2], a[3]), t3 = _mm256_unpackhi_epi32(a[2], a[3]);
  out[0] = (Words)_mm256_unpacklo_epi64(t0, t2);
  out[1] = (Words)_mm256_unpackhi_epi64(t0, t2);
  out[2] = (Words)_mm256_unpacklo_epi64(t1, t3);
  out[3] = (Words)_mm256_unpackhi_epi64(t1, t3);
#else
  const Words a = load<Words>(rows[0] + offset), b = load<Words>(rows[1] + offset);
  const Words c = load<Words>(rows[2] + offset), d = load<Words>(rows[3] + offset);
  const Words t0 = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const Words t1 = __builtin_shufflevector(a, b, 2, 6, 3, 7);
  const Words t2 = __builtin_shufflevector(c, d, 0, 4, 1, 5);
  const Words t3 = __builtin_shufflevector(c, d, 2, 6, 3, 7);
  out[0] = __builtin_shufflevector(t0, t2, 0, 1, 4, 5);
  out[1] = __builtin_shufflevector(t0, t2, 2, 3, 6, 7);
  out[2] = __builtin_shufflevector(t1, t3, 0, 1, 4, 5);
  out[3] = __builtin_shufflevector(t1, t3, 2, 3, 6, 7);
#endif
}

#if CADRE_LANES == 16
// 16 words of each row, word i of all rows -> out[i]. A row's cache line is read in one go: rows
// that lie a power of two apart share a few sets of the L1 cache and would push each other out
// between two visits.
inline void load_transposed_lines(const unsigned char* const* rows, int64_t offset, Words* out) {
  __m512i a[4][4];
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    const auto at = [&](int r, int step) {
      return _mm_loadu_si128(reinterpret_cast<const __m128i*>(rows[r] + offset) + step);
    };
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) a[s][j] = _mm512_castsi128_si512(at(j, s));
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) a[s][j] = _mm512_inserti32x4(a[s][j], at(4 + j, s), 1);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) a[s][j] = _mm512_inserti32x4(a[s][j], at(8 + j, s), 2);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) a[s][j] = _mm512_inserti32x4(a[s][j], at(12 + j, s), 3);
  }
#pragma GCC unroll 4
  for (int s = 0; s < 4; ++s) {
    const __m512i t0 = _mm512_unpacklo_epi32(a[s][0], a[s][1]);
    const __m512i t1 = _mm512_unpackhi_epi32(a[s][0], a[s][1]);
    const __m512i t2 = _mm512_unpacklo_epi32(a[s][2], a[s][3]);
    const __m512i t3 = _mm512_unpackhi_epi32(a[s][2], a[s][3]);
    out[4 * s] = (Words)_mm512_unpacklo_epi64(t0, t2);
    out[4 * s + 1] = (Words)_mm512_unpackhi_epi64(t0, t2);
    out[4 * s + 2] = (Words)_mm512_unpacklo_epi64(t1, t3);
    out[4 * s + 3] = (Words)_mm512_unpackhi_epi64(t1, t3);
  }
}
#endif

// A word of two 16-bit k for kLanes columns -> a pair.
template <Element kType, Element kCompute, typename Sink>
inline void sink_pair(Words word, int k, Sink& sink) {
  if constexpr (kType == Element::kBF16 && requires { sink.words(k, word); }) {
    sink.words(k, word);
  } else if constexpr (kType == Element::kBF16) {
    // bfloat16 weights are exact in every compute type: float16 computes in float32 too.
    sink.template pair<Element::kF32>(k, bf16_low(word), bf16_high(word));
  } else {
    constexpr Element kRound = kCompute == Element::kF16 ? Element::kF32 : kCompute;
    sink.template pair<kRound>(k, f16_to_float(word & 0xffffu), f16_to_float(word >> 16));
  }
}

// Four words a row -> pairs of floats. k counts from the start of the chunk.
template <Element kType, Element kCompute, typename Sink>
inline void sink_words(const Words* words, int k, Sink& sink) {
  if constexpr (kType == Element::kF32) {
    sink.template pair<kCompute>(k, (Floats)words[0], (Floats)words[1]);
    sink.template pair<kCompute>(k + 2, (Floats)words[2], (Floats)words[3]);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) sink_pair<kType, kCompute>(words[i], k + 2 * i, sink);
  }
}

constexpr unsigned char kZeros[kChunk * 4] = {};

// Consecutive k.
template <Element kType, Element kCompute, typename Sink>
void pack_k_contiguous(const PackArgs& args, int first, Sink sink) {
  constexpr int kSize = size_of(kType);
  constexpr int kStep = 16 / kSize;  // k in 16 bytes
  const unsigned char* rows[kLanes];
  for (int n = 0; n < kLanes; ++n) {
    rows[n] = first + n < args.columns ? static_cast<const unsigned char*>(args.weights) +
                                             (first + n) * args.row_stride * kSize
                                       : kZeros;
  }
  int k = 0;
#if CADRE_LANES == 16
  for (; k + 4 * kStep <= args.k; k += 4 * kStep) {
    const int64_t offset = int64_t{k} * kSize;
    if (args.prefetch_ahead != 0) {
      for (int n = 0; n < kLanes; ++n) prefetch(rows[n] + offset + args.prefetch_ahead);
    }
    Words line[16];
    load_transposed_lines(rows, offset, line);
#pragma GCC unroll 4
    for (int s = 0; s < 4; ++s) sink_words<kType, kCompute>(line + 4 * s, k + s * kStep, sink);
  }
#endif
  Words words[4];
  for (; k + kStep <= args.k; k += kStep) {
    const int64_t offset = int64_t{k} * kSize;
    if (args.prefetch_ahead != 0 && offset % 64 == 0) {
      for (int n = 0; n < kLanes; ++n) prefetch(rows[n] + offset + args.prefetch_ahead);
    }
    load_transposed(rows, offset, words);
    sink_words<kType, kCompute>(words, k, sink);
  }
  if (k == args.k) return;
  unsigned char tail[kLanes][16] = {};
  const unsigned char* tail_rows[kLanes];
  for (int n = 0; n < kLanes; ++n) {
    __builtin_memcpy(tail[n], rows[n] + int64_t{k} * kSize,
                     static_cast<unsigned>((args.k - k) * kSize));
    tail_rows[n] = tail[n];
  }
  load_transposed(tail_rows, 0, words);
  sink_words<kType, kCompute>(words, k, sink);
}

// kLanes columns at one k, however they lie; missing ones are zero.
template <Element kType>
inline Floats load_columns(const PackArgs& args, int first, int k) {
  constexpr int kSize = size_of(kType);
  if (k >= args.k) return Floats{};
  const unsigned char* from = static_cast<const unsigned char*>(args.weights) +
                              (first * args.row_stride + k * args.col_stride) * kSize;
  const int count = args.columns - first < kLanes ? args.columns - first : kLanes;
  if (args.row_stride == 1 && count == kLanes) return load_as_float<kType>(from);
  unsigned char gathered[kLanes * kSize] = {};
  for (int n = 0; n < count; ++n) {
    __builtin_memcpy(gathered + n * kSize, from + n * args.row_stride * kSize, kSize);
  }
  return load_as_float<kType>(gathered);
}

// Consecutive n, or any strides.
template <Element kType, Element kCompute, typename Sink>
void pack_strided(const PackArgs& args, int first, Sink sink) {
  constexpr Element kRound =
      kType == Element::kBF16 || kType == kCompute ? Element::kF32 : kCompute;
  for (int k = 0; k < args.k; k += 2) {
    sink.template pair<kRound>(k, load_columns<kType>(args, first, k),
                               load_columns<kType>(args, first, k + 1));
  }
}

template <Element kType, Element kCompute, typename MakeSink>
void pack_typed(const PackArgs& args, MakeSink make_sink) {
  for (int first = 0; first < args.width; first += kLanes) {
    auto sink = make_sink(args.first_column + first);
    if (args.col_stride == 1 || first >= args.columns) {
      pack_k_contiguous<kType, kCompute>(args, first, sink);
    } else {
      pack_strided<kType, kCompute>(args, first, sink);
    }
  }
}

// kSubPanel columns lie together: [kPanelColumns / kSubPanel][kChunk][kSubPanel] floats.
template <int kSubPanel>
inline FloatSink float_sink(void* panel, int column) {
  return {static_cast<float*>(panel) + column / kSubPanel * kSubPanel * kChunk + column % kSubPanel,
          kSubPanel};
}

template <int kSubPanel>
void pack_floats(const PackArgs& args) {
  const auto make_sink = [&](int column) { return float_sink<kSubPanel>(args.panel, column); };
  with_type(args.type, [&]<Element kType>() {
    with_type(args.compute,
              [&]<Element kCompute>() { pack_typed<kType, kCompute>(args, make_sink); });
  });
}

}  // namespace
}  // namespace cadre::cpu

// Codes of quantised weights as pairs of bfloat16, for the instructions that multiply two k at
// once. Included by the isa_*.cc files with 16 lanes after pack_pairs.inl.h and
// products_of_codes.inl.h; everything has internal linkage.

namespace cadre::cpu {
namespace {

// Pairs of e2m1 codes 2 i and 2 i + 1 of each word, as bfloat16.
inline Words e2m1_pair(Words words, int i) {
  struct Table {
    alignas(64) uint16_t bits[32];
  };
  static constexpr Table kTable = [] {  // twice: look-ups take five bits
    Table table{};
    for (uint32_t j = 0; j < 32; ++j) table.bits[j] = static_cast<uint16_t>(bf16_of_e2m1(j));
    return table;
  }();
  const Words both = words >> 8 * i;
  const Words index = (both & 0xffffu) | (both << 12 & 0xffff0000u);
  return (Words)_mm512_permutexvar_epi16((__m512i)index, load<__m512i>(kTable.bits));
}

// The pairs of every word, k ascending.
template <Element kType, typename F>
inline void for_each_pair(Words words, F f) {
  if constexpr (kType == Element::kE4m3) {
    Words pairs[2];
    e4m3_pairs(words, pairs);
    f(0, pairs[0]);
    f(2, pairs[1]);
  } else {
#pragma GCC unroll 4
    for (int i = 0; i < 4; ++i) f(2 * i, e2m1_pair(words, i));
  }
}

template <Element kType>
void decode_pairs_of(const DecodeArgs& args) {
  for (int column = 0; column < kPanelColumns; column += kLanes) {
    PairSink sink{static_cast<uint32_t*>(args.panel) + column};
    const auto* from = static_cast<const unsigned char*>(args.codes) + column * 4;
    for (int k = 0; k < args.k; k += codes_per_word(kType), from += kPanelColumns * 4) {
      prefetch(from + args.fetch_ahead);
      for_each_pair<kType>(load<Words>(from), [&](int i, Words pair) { sink.words(k + i, pair); });
    }
  }
}

// As pack_pairs leaves the panel.
void decode_pairs(const DecodeArgs& args) {
  if (args.type == Element::kE4m3) return decode_pairs_of<Element::kE4m3>(args);
  decode_pairs_of<Element::kE2m1>(args);
}

}  // namespace
}  // namespace cadre::cpu

// Packing of bfloat16 pairs, for the instructions that multiply two k at once. Included by the
// isa_*.cc files after pack_as_stored.inl.h; everything has internal linkage.

namespace cadre::cpu {
namespace {

// The panel is [k / 2][kPanelColumns] words, each a pair of bfloat16 (even k low).
struct PairSink {
  uint32_t* at;
  void words(int k, Words pairs) { store(at + k / 2 * kPanelColumns, pairs); }
  template <Element>
  void pair(int k, Floats even, Floats odd) {
    words(k, (round_bf16(even) >> 16) | round_bf16(odd));
  }
};

void pack_pairs(const PackArgs& args) {
  const auto make_sink = [&](int column) {
    return PairSink{static_cast<uint32_t*>(args.panel) + column};
  };
  with_type(args.type,
            [&]<Element kType>() { pack_typed<kType, Element::kBF16>(args, make_sink); });
}

// As pack_pairs leaves the panel.
void unpack_pairs(const UnpackArgs& args) {
  unpack_with(args,
              [&](int column) { return PairSink{static_cast<uint32_t*>(args.panel) + column}; });
}

}  // namespace
}  // namespace cadre::cpu

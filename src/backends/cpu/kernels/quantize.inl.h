// Activations to e4m3 with scales found on the way or given, as quant/activations.h says. Included
// by the isa_*.cc files after lanes.inl.h; everything has internal linkage.

namespace cadre::cpu {
namespace {

// The nearest e4m3 value of each lane, ties to even; beyond 448 it is 448, NaN stays NaN.
inline Words round_e4m3(Floats x) {
  const Words magnitude = (Words)x & 0x7fffffffu;
  const Words normal = (magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) & 0xfff00000u;
  // Multiples of 2^-9: the sum has no bits below.
  const Words small = (Words)(((Floats)magnitude + 0x1p14f) - 0x1p14f);
  Words rounded = select(magnitude < 0x3c800000u, small, normal);                    // 2^-6
  rounded = select(magnitude >= 0x43e00000u, broadcast_word(0x43e00000u), rounded);  // 448
  rounded = select(magnitude > 0x7f800000u, broadcast_word(0x7fc00000u), rounded);
  return rounded | ((Words)x & 0x80000000u);
}

// The first `count` elements, the rest zero.
template <Element kType>
inline Floats load_some(const unsigned char* from, int64_t count) {
  if (count >= kLanes) return load_as_float<kType>(from);
  unsigned char copy[kLanes * 4] = {};
  __builtin_memcpy(copy, from, static_cast<unsigned>(count * size_of(kType)));
  return load_as_float<kType>(copy);
}

template <Element kType>
inline float largest_magnitude(const unsigned char* x, int64_t count) {
  Words largest = {};
  for (int64_t i = 0; i < count; i += kLanes) {
    const Words bits = (Words)load_some<kType>(x + i * size_of(kType), count - i) & 0x7fffffffu;
    largest = select(largest < bits, bits, largest);
  }
  uint32_t all = 0;
  for (int n = 0; n < kLanes; ++n) all = all < largest[n] ? largest[n] : all;
  float value;
  __builtin_memcpy(&value, &all, sizeof value);
  return value;
}

// codes[i] = f(x[i]). Ascending: a vector is read before its codes are written, which are never
// wider.
template <Element kType, typename F>
inline void write_codes(const unsigned char* x, int64_t count, unsigned char* codes, F f) {
  for (int64_t i = 0; i < count; i += kLanes) {
    const Floats value = load_some<kType>(x + i * size_of(kType), count - i);
    const Floats code = (Floats)round_e4m3(f(value));
    store_rounded<Element::kBF16>(codes + i * 2, code,
                                  count - i < kLanes ? static_cast<int>(count - i) : kLanes);
  }
}

template <Element kType>
inline float quantize_group(const unsigned char* x, int64_t count, unsigned char* codes) {
  const float largest = largest_magnitude<kType>(x, count);
  if (!(largest <= __FLT_MAX__)) {  // a NaN or an infinity
    __builtin_memset(codes, 0, static_cast<uint64_t>(count) * 2);
    return __builtin_nanf("");
  }
  const float floored = largest < 1e-10f ? 1e-10f : largest;
  const Floats inverse = broadcast(448.0f / floored);
  write_codes<kType>(x, count, codes, [&](Floats value) { return value * inverse; });
  return floored / 448.0f;
}

void quantize_row(const QuantizeArgs& args) {
  with_type(args.type, [&]<Element kType>() {
    const auto* x = static_cast<const unsigned char*>(args.x);
    auto* codes = static_cast<unsigned char*>(args.codes);
    if (args.static_scale > 0) {
      const Floats scale = broadcast(args.static_scale);
      return write_codes<kType>(x, args.k, codes, [&](Floats value) { return value / scale; });
    }
    for (int64_t k = 0, g = 0; k < args.k; k += args.group, ++g) {
      const int64_t count = args.k - k < args.group ? args.k - k : args.group;
      args.scales[g] = quantize_group<kType>(x + k * size_of(kType), count, codes + k * 2);
    }
  });
}

}  // namespace
}  // namespace cadre::cpu

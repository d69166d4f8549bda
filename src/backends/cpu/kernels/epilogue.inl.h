// What happens to finished sums: gate functions, biases, routing weights, the sum over experts.
// Included by the isa_*.cc files after lanes.inl.h; everything has internal linkage. Values pass
// through whole vectors whatever the number of valid columns, so that a value's bits never depend
// on its place.

namespace cadre::cpu {
namespace {

inline Floats power_of_two(Ints n) { return (Floats)((Words)(n + 127) << 23); }

// Within 1 ulp where the result is a normal number; infinity above the largest one, zero below the
// smallest denormal; NaN stays NaN.
inline Floats exponential(Floats x) {
  x = max(broadcast(-104.0f), min(broadcast(89.0f), x));
  const Floats magic = broadcast(0x1.8p23f);  // adding it rounds to an integer in the low bits
  const Floats shifted = multiply_add(x, broadcast(1.44269504f), magic);
  const Floats n = shifted - magic;
  Floats r = multiply_add(n, broadcast(-0.693359375f), x);
  r = multiply_add(n, broadcast(2.12194440e-4f), r);
  Floats p = broadcast(1.0f / 5040);
  constexpr float kTaylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
  for (const float c : kTaylor) p = multiply_add(p, r, broadcast(c));
  const Ints exponent = (Ints)shifted - (Ints)magic;
  const Ints half = exponent >> 1;  // 2^exponent itself may lie outside float32
  return p * power_of_two(half) * power_of_two(exponent - half);
}

inline Floats sigmoid(Floats x) { return 1.0f / (1.0f + exponential(-x)); }

// erfc(z) for z >= 0 with a relative error of about 1.2e-7: W. J. Cody's form t * exp(-z^2 + P(t)),
// t = 1 / (1 + z / 2), coefficients from Numerical Recipes, section 6.2.
inline Floats erfc_positive(Floats z) {
  const Floats t = 1.0f / (1.0f + 0.5f * z);
  Floats p = broadcast(0.17087277f);
  constexpr float kFit[] = {-0.82215223f, 1.48851587f, -1.13520398f, 0.27886807f, -0.18628806f,
                            0.09678418f,  0.37409196f, 1.00002368f,  -1.26551223f};
  for (const float c : kFit) p = multiply_add(p, t, broadcast(c));
  return t * exponential(p - z * z);
}

// x * Phi(x)
inline Floats gelu(Floats x) {
  const Floats z = x * 0.70710678f;
  const Floats tail = 0.5f * erfc_positive((Floats)((Words)z & 0x7fffffffu));
  return x * (x < 0.0f ? tail : 1.0f - tail);
}

template <GateKind kKind>
inline Floats activate(Floats x) {
  if constexpr (kKind == GateKind::kSilu) return x * sigmoid(x);
  if constexpr (kKind == GateKind::kGelu) return gelu(x);
  if constexpr (kKind == GateKind::kGeluTanh) {
    // 0.5 * (1 + tanh(u)) = sigmoid(2 u)
    return x * sigmoid(1.5957691216f * (x + 0.044715f * x * x * x));
  }
  const Floats positive = max(Floats{}, x);
  if constexpr (kKind == GateKind::kRelu2) return positive * positive;
  return positive;
}

template <GateKind kKind>
inline Floats gated(const GateArgs& args, Floats gate, Floats up) {
  gate = min(broadcast(args.limit), gate);
  up = max(broadcast(-args.limit), min(broadcast(args.limit), up));
  if constexpr (kKind == GateKind::kScaledSwiglu) {
    return (up + 1.0f) * gate * sigmoid(args.alpha * gate);
  } else {
    return activate<kKind>(gate) * up;
  }
}

template <GateKind kKind, Element kOut>
void gate_rows(const GateArgs& args) {
  for (int r = 0; r < args.num_rows; ++r) {
    const float* acc = args.acc + r * kPanelColumns;
    unsigned char* out =
        static_cast<unsigned char*>(args.out) + r * args.out_stride * size_of(kOut);
    for (int n = 0; n < args.columns; n += kLanes) {
      Floats h;
      if (args.has_gate) {
        const Floats up = load<Floats>(acc + 32 + n) + load<Floats>(args.up_bias + n);
        h = gated<kKind>(args, load<Floats>(acc + n) + load<Floats>(args.gate_bias + n), up);
      } else {
        h = activate<kKind>(load<Floats>(acc + n) + load<Floats>(args.up_bias + n));
      }
      store_rounded<kOut>(out + n * size_of(kOut), h, args.columns - n);
    }
  }
}

// Calls f.template operator()<GateKind>() for the kind.
template <typename F>
inline void with_gate_kind(GateKind kind, F f) {
  switch (kind) {
    case GateKind::kSilu:
      return f.template operator()<GateKind::kSilu>();
    case GateKind::kGelu:
      return f.template operator()<GateKind::kGelu>();
    case GateKind::kGeluTanh:
      return f.template operator()<GateKind::kGeluTanh>();
    case GateKind::kRelu:
      return f.template operator()<GateKind::kRelu>();
    case GateKind::kRelu2:
      return f.template operator()<GateKind::kRelu2>();
    case GateKind::kScaledSwiglu:
      return f.template operator()<GateKind::kScaledSwiglu>();
  }
}

void gate_function(const GateArgs& args) {
  with_type(args.out_type, [&]<Element kOut>() {
    with_gate_kind(args.kind, [&]<GateKind kKind>() { gate_rows<kKind, kOut>(args); });
  });
}

// Columns [n, n + kLanes) of row r.
template <Element kOut>
inline void finish_vector(const FinishArgs& args, int r, int n, Floats y) {
  if (args.bias != nullptr) y += load<Floats>(args.bias + n);
  if (args.scales != nullptr) y *= args.scales[r];
  store_rounded<kOut>(static_cast<unsigned char*>(args.out[r]) + n * size_of(kOut), y,
                      args.columns - n);
}

void finish_rows(const FinishArgs& args) {
  with_type(args.out_type, [&]<Element kOut>() {
    for (int r = 0; r < args.num_rows; ++r) {
      const float* acc = args.acc + r * kPanelColumns;
      for (int n = 0; n < args.columns; n += kLanes) {
        finish_vector<kOut>(args, r, n, load<Floats>(acc + n));
      }
    }
  });
}

// A row of parts is padded to whole vectors by its owner, so loads may pass `columns`.
void combine_parts(const CombineArgs& args) {
  with_type(args.out_type, [&]<Element kOut>() {
    for (int64_t n = 0; n < args.columns; n += kLanes) {
      Floats sum = {};
      for (int64_t p = 0; p < args.num_parts; ++p) {
        if (args.used[p]) sum += load<Floats>(args.parts + p * args.part_stride + n);
      }
      const int64_t left = args.columns - n;
      store_rounded<kOut>(static_cast<unsigned char*>(args.out) + n * size_of(kOut), sum,
                          left < kLanes ? static_cast<int>(left) : kLanes);
    }
  });
}

}  // namespace
}  // namespace cadre::cpu

// Quantised tensors as ExpertsWeights: every layout leads to the values that were stored, and the
// reference reads them as a hand does.
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cadre/error.h"
#include "cadre/experts.h"
#include "core/str_cat.h"
#include "quant/float8.h"
#include "support/compare.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

using test::expect_error;
using test::to_doubles;

constexpr int64_t kE = 3, kH = 40, kI = 6;
constexpr ScaleLayout kMx{DType::kF8E8M0, 1, 32};
constexpr ScaleLayout kOne{DType::kF32, 0, 0};

ExpertsConfig config() {
  return {.num_experts = kE, .hidden_size = kH, .intermediate_size = kI, .top_k = 1};
}

std::vector<float> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

QuantizedWeight random_weight(const Dims& shape, StorageFormat format, const ScaleLayout& layout,
                              uint32_t seed) {
  const auto values = random_values(num_elements(shape), seed);
  return quantize({values.data(), DType::kF32, shape}, format, layout);
}

std::vector<double> dequantized(const QuantizedTensor& weight, const Dims& shape) {
  const Tensor out(DType::kF32, shape);
  dequantize(weight, out);
  return to_doubles(out.view());
}

// Element (n, k), by the words above ExpertMatrix.
double read(const ExpertsWeights& w, const ExpertMatrix& m, int64_t n, int64_t k) {
  const ScaleLayout& layout = w.scale_layout;
  const int64_t row = layout.block_rows == 0 ? 0 : (n + m.scale_row_offset) / layout.block_rows;
  const int64_t col = layout.block_cols == 0 ? 0 : k / layout.block_cols;
  const int64_t at = row * m.scale_row_stride + col * m.scale_col_stride;
  const float scale = layout.dtype == DType::kF32
                          ? static_cast<const float*>(m.scales)[at]
                          : e8m0_to_float(static_cast<const uint8_t*>(m.scales)[at]);
  const auto* data = static_cast<const uint8_t*>(m.data);
  if (w.format == StorageFormat::kFp4) {
    const uint8_t two = data[n * m.row_stride + k / 2];
    return e2m1_to_float(static_cast<uint8_t>(k % 2 == 0 ? two : two >> 4)) * scale;
  }
  return e4m3_to_float(data[n * m.row_stride + k * m.col_stride]) * scale;
}

struct Format {
  StorageFormat format;
  ScaleLayout layout;
};
const Format kFormats[] = {{StorageFormat::kFp8Block, {DType::kF32, 4, 8}},
                           {StorageFormat::kFp8Block, {DType::kF8E8M0, 4, 16}},
                           {StorageFormat::kFp8Block, {DType::kF32, 1, 8}},
                           {StorageFormat::kFp8Block, {DType::kF32, 128, 128}},
                           {StorageFormat::kMxFp8, kMx},
                           {StorageFormat::kFp4, kMx}};

// gate, up and down of expert e against the fused tensors that they came from, dequantised.
void expect_values(const ExpertsConfig& c, const ExpertsWeights& w,
                   const std::vector<double>& fused, const std::vector<double>& down) {
  const int64_t rows = c.has_gate ? 2 * kI : kI;
  for (int64_t e = 0; e < kE; ++e) {
    const auto i = static_cast<size_t>(e);
    const auto fused_at = [&](int64_t row, int64_t k) {
      return fused[static_cast<size_t>((e * rows + row) * kH + k)];
    };
    for (int64_t n = 0; n < kI; ++n) {
      for (int64_t k = 0; k < kH; ++k) {
        const int64_t up_row = !c.has_gate ? n : c.is_concatenated ? kI + n : 2 * n + 1;
        EXPECT_EQ(read(w, w.up[i], n, k), fused_at(up_row, k)) << e << " " << n << " " << k;
        if (c.has_gate) {
          EXPECT_EQ(read(w, w.gate[i], n, k), fused_at(c.is_concatenated ? n : 2 * n, k));
        }
        EXPECT_EQ(read(w, w.down[i], k, n), down[static_cast<size_t>((e * kH + k) * kI + n)]);
      }
    }
  }
}

TEST(QuantizedFused, UpMayBeginInsideABlock) {
  for (const Format& f : kFormats) {
    for (const bool has_gate : {true, false}) {
      ExpertsConfig c = config();
      c.has_gate = has_gate;
      const int64_t rows = has_gate ? 2 * kI : kI;
      const auto up = random_weight({kE, rows, kH}, f.format, f.layout, 1);
      const auto down = random_weight({kE, kH, kI}, f.format, f.layout, 2);
      const ExpertsWeights w =
          make_experts_weights(c, QuantizedFusedExperts{up.view(), down.view()});
      EXPECT_EQ(w.format, f.format);
      EXPECT_EQ(w.scale_layout, f.layout);
      EXPECT_EQ(w.up[0].scale_row_offset, has_gate ? kI % f.layout.block_rows : 0);
      expect_values(c, w, dequantized(up.view(), {kE, rows, kH}),
                    dequantized(down.view(), {kE, kH, kI}));
    }
  }
}

TEST(QuantizedFused, InterleavedRowsHaveScalesOfTheirOwn) {
  for (const Format& f : kFormats) {
    ExpertsConfig c = config();
    c.is_concatenated = false;
    const auto up = random_weight({kE, 2 * kI, kH}, f.format, f.layout, 1);
    const auto down = random_weight({kE, kH, kI}, f.format, f.layout, 2);
    const QuantizedFusedExperts fused{up.view(), down.view()};
    if (f.layout.block_rows != 1) {
      expect_error<InvalidArgument>([&] { make_experts_weights(c, fused); },
                                    {"gate_up_proj", "one row", "interleaved"});
      continue;
    }
    expect_values(c, make_experts_weights(c, fused), dequantized(up.view(), {kE, 2 * kI, kH}),
                  dequantized(down.view(), {kE, kH, kI}));
  }
}

// gate_up_proj [E, 2I, H] and scales [E, 2 * ceil(I / rows), ..]: each half was quantised alone.
TEST(QuantizedFused, GateAndUpMayHaveBlocksOfTheirOwn) {
  for (const int64_t block : {4, 128}) {  // 2I = 12: 3 rows of scales or 4; 1 or 2
    const ScaleLayout layout{DType::kF32, block, 8};
    const auto halves = random_weight({kE * 2, kI, kH}, StorageFormat::kFp8Block, layout, 1);
    const auto down = random_weight({kE, kH, kI}, StorageFormat::kFp8Block, layout, 2);
    const int64_t scale_rows = halves.scales->dim(1), scale_cols = halves.scales->dim(2);
    const QuantizedTensor up{StorageFormat::kFp8Block, layout,
                             halves.values->reshape({kE, 2 * kI, kH}),
                             halves.scales->reshape({kE, 2 * scale_rows, scale_cols})};
    const ExpertsWeights w = make_experts_weights(config(), QuantizedFusedExperts{up, down.view()});
    expect_values(config(), w, dequantized(halves.view(), {kE * 2, kI, kH}),
                  dequantized(down.view(), {kE, kH, kI}));
  }
}

TEST(QuantizedFused, TransposedValuesHaveTransposedScales) {
  for (const bool is_concatenated : {true, false}) {
    const ScaleLayout layout{DType::kF32, is_concatenated ? 4 : 1, 8};
    const ScaleLayout turned{DType::kF32, 8, layout.block_rows};
    ExpertsConfig c = config();
    c.is_transposed = true;
    c.is_concatenated = is_concatenated;
    auto up = random_weight({kE, kH, 2 * kI}, StorageFormat::kFp8Block, turned, 1);
    auto down = random_weight({kE, kI, kH}, StorageFormat::kFp8Block, turned, 2);
    const auto turn = [](const std::vector<double>& from, int64_t rows, int64_t cols) {
      std::vector<double> to(from.size());
      for (int64_t i = 0; i < static_cast<int64_t>(from.size()); ++i) {
        const int64_t e = i / (rows * cols), row = i / cols % rows, col = i % cols;
        to[static_cast<size_t>((e * cols + col) * rows + row)] = from[static_cast<size_t>(i)];
      }
      return to;
    };
    const auto expected_up = turn(dequantized(up.view(), {kE, kH, 2 * kI}), kH, 2 * kI);
    const auto expected_down = turn(dequantized(down.view(), {kE, kI, kH}), kI, kH);
    up.layout = down.layout = layout;  // rows and columns of [N, K]
    expect_values(c, make_experts_weights(c, QuantizedFusedExperts{up.view(), down.view()}),
                  expected_up, expected_down);
  }
}

TEST(QuantizedFused, PerTensorScalesOfGateAndUpStaySeparate) {
  for (const bool is_concatenated : {true, false}) {
    for (const bool shared : {false, true}) {
      ExpertsConfig c = config();
      c.is_concatenated = is_concatenated;
      auto up = random_weight({kE, 2 * kI, kH}, StorageFormat::kFp8Tensor, kOne, 1);
      const auto down = random_weight({kE, kH, kI}, StorageFormat::kFp8Tensor, kOne, 2);
      const std::vector<float> two = {1, 2, 3, 4, 5, 6};
      if (!shared) up.scales = Tensor(DType::kF32, {kE, 2, 1});
      if (!shared) std::memcpy(up.scales->mutable_data(), two.data(), sizeof(float) * 6);
      const ExpertsWeights w =
          make_experts_weights(c, QuantizedFusedExperts{up.view(), down.view()});
      for (size_t e = 0; e < kE; ++e) {
        const auto* scales = up.scales->as<float>();
        EXPECT_EQ(*static_cast<const float*>(w.gate[e].scales), scales[shared ? e : 2 * e]);
        EXPECT_EQ(*static_cast<const float*>(w.up[e].scales), scales[shared ? e : 2 * e + 1]);
        EXPECT_EQ(*static_cast<const float*>(w.down[e].scales), down.scales->as<float>()[e]);
      }
      if (shared) {
        expect_values(c, w, dequantized(up.view(), {kE, 2 * kI, kH}),
                      dequantized(down.view(), {kE, kH, kI}));
      }
    }
  }
}

// GPT-OSS: blocks [E, N, K / 32, 16] of bytes, scales of bytes, biases, interleaved rows, and a
// config that says "transposed", which plain weights of the same model are.
TEST(QuantizedFused, GptOssBlocksHaveColumnsLastWhateverTheConfigSays) {
  constexpr int64_t kSize = 64;
  ExpertsConfig c = config();
  c.hidden_size = c.intermediate_size = kSize;
  c.is_transposed = true;
  c.is_concatenated = false;
  c.has_bias = true;
  const auto up = random_weight({kE, 2 * kSize, kSize}, StorageFormat::kFp4, kMx, 1);
  const auto down = random_weight({kE, kSize, kSize}, StorageFormat::kFp4, kMx, 2);
  const auto as_blocks = [&](const QuantizedWeight& w, int64_t n) {
    return QuantizedTensor{StorageFormat::kFp4, kMx,
                           TensorView(w.values->data(), DType::kU8, {kE, n, 2, 16}),
                           TensorView(w.scales->data(), DType::kU8, {kE, n, 2})};
  };
  const auto bias = random_values(kE * 2 * kSize, 3);
  const ExpertsWeights w =
      make_experts_weights(c, QuantizedFusedExperts{as_blocks(up, 2 * kSize),
                                                    as_blocks(down, kSize),
                                                    {bias.data(), DType::kF32, {kE, 2 * kSize}},
                                                    {bias.data(), DType::kF32, {kE, kSize}}});
  const auto fused = dequantized(up.view(), {kE, 2 * kSize, kSize});
  for (int64_t n = 0; n < kSize; ++n) {
    for (int64_t k = 0; k < kSize; ++k) {
      const auto gate = static_cast<size_t>((2 * kSize * 2 + 2 * n) * kSize + k);
      EXPECT_EQ(read(w, w.gate[2], n, k), fused[gate]);
      EXPECT_EQ(read(w, w.up[2], n, k), fused[gate + kSize]);
    }
  }
  EXPECT_EQ(w.up_bias[1].data, bias.data() + 2 * kSize + 1);
  EXPECT_EQ(w.up_bias[1].stride, 2);
}

TEST(QuantizedFused, ExpertsMayLieApart) {
  const ScaleLayout layout{DType::kF32, 4, 8};
  ExpertsConfig c = config();
  c.num_experts = 2;
  const auto up = random_weight({kE, 2 * kI, kH}, StorageFormat::kFp8Block, layout, 1);
  const auto down = random_weight({kE, kH, kI}, StorageFormat::kFp8Block, layout, 2);
  const auto every_second = [](const QuantizedWeight& w) {  // experts 0 and 2
    const auto pick = [](const TensorView& t) {
      return TensorView(t.data(), t.dtype(), {2, t.dim(1), t.dim(2)},
                        {2 * t.stride(0), t.stride(1), 1});
    };
    return QuantizedTensor{w.format, w.layout, pick(w.values.view()), pick(w.scales.view())};
  };
  const ExpertsWeights w =
      make_experts_weights(c, QuantizedFusedExperts{every_second(up), every_second(down)});
  const auto fused = dequantized(up.view(), {kE, 2 * kI, kH});
  EXPECT_EQ(read(w, w.up[1], 3, 9), fused[static_cast<size_t>((2 * 2 * kI + kI + 3) * kH + 9)]);
}

TEST(QuantizedPerExpert, GateAndUpKeepTheirScales) {
  for (const Format& f : kFormats) {
    std::vector<QuantizedWeight> weights;
    std::vector<QuantizedTensor> gate, up, down;
    for (uint32_t e = 0; e < kE; ++e) {
      weights.push_back(random_weight({kI, kH}, f.format, f.layout, 3 * e));
      gate.push_back(weights.back().view());
      weights.push_back(random_weight({kI, kH}, f.format, f.layout, 3 * e + 1));
      up.push_back(weights.back().view());
      weights.push_back(random_weight({kH, kI}, f.format, f.layout, 3 * e + 2));
      down.push_back(weights.back().view());
    }
    const std::vector<float> inputs = {1, 2, 3};
    const ExpertsWeights w =
        make_experts_weights(config(), QuantizedExperts{gate, up, down, inputs, inputs, inputs});
    for (size_t e = 0; e < kE; ++e) {
      const auto expected_gate = dequantized(gate[e], {kI, kH});
      const auto expected_up = dequantized(up[e], {kI, kH});
      const auto expected_down = dequantized(down[e], {kH, kI});
      for (int64_t n = 0; n < kI; ++n) {
        for (int64_t k = 0; k < kH; ++k) {
          EXPECT_EQ(read(w, w.gate[e], n, k), expected_gate[static_cast<size_t>(n * kH + k)]);
          EXPECT_EQ(read(w, w.up[e], n, k), expected_up[static_cast<size_t>(n * kH + k)]);
          EXPECT_EQ(read(w, w.down[e], k, n), expected_down[static_cast<size_t>(k * kI + n)]);
        }
      }
      EXPECT_EQ(w.gate[e].input_scale, inputs[e]);
      EXPECT_EQ(w.down[e].input_scale, inputs[e]);
      EXPECT_EQ(w.up[e].scale_row_offset, 0);
    }
  }
}

// Per-tensor scales are stored as a scalar, [1] or [1, 1].
TEST(QuantizedPerExpert, OneScaleHasAnyShape) {
  const auto up = random_weight({kI, kH}, StorageFormat::kFp8Tensor, kOne, 1);
  const auto down = random_weight({kH, kI}, StorageFormat::kFp8Tensor, kOne, 2);
  for (const Dims& shape : {Dims{}, Dims{1}, Dims{1, 1}}) {
    QuantizedTensor up_view = up.view(), down_view = down.view();
    up_view.scales = TensorView(up.scales->data(), DType::kF32, shape);
    down_view.scales = TensorView(down.scales->data(), DType::kF32, shape);
    ExpertsConfig c = config();
    c.has_gate = false;
    const std::vector<QuantizedTensor> ups(kE, up_view), downs(kE, down_view);
    const ExpertsWeights w = make_experts_weights(c, QuantizedExperts{{}, ups, downs});
    EXPECT_EQ(read(w, w.up[1], 2, 3), dequantized(up.view(), {kI, kH})[2 * kH + 3]);
  }
}

TEST(QuantizedFused, NamesTensorShapesAndDtypes) {
  const ScaleLayout layout{DType::kF32, 4, 8};
  const auto up = random_weight({kE, 2 * kI, kH}, StorageFormat::kFp8Block, layout, 1);
  const auto down = random_weight({kE, kH, kI}, StorageFormat::kFp8Block, layout, 2);
  const auto refuse = [&](const QuantizedTensor& u, const QuantizedTensor& d,
                          std::initializer_list<std::string> parts) {
    expect_error<InvalidArgument>(
        [&] {
          make_experts_weights(config(), QuantizedFusedExperts{u, d});
        },
        parts);
  };
  const auto with_values = [&](const TensorView& values) {
    QuantizedTensor t = up.view();
    t.values = values;
    return t;
  };
  const auto with_scales = [&](const TensorView& scales) {
    QuantizedTensor t = up.view();
    t.scales = scales;
    return t;
  };
  const void* data = up.values->data();
  const void* scales = up.scales->data();
  refuse(with_values({data, DType::kF8E4M3, {kE, kI, kH}}), down.view(),
         {"gate_up_proj", "[3, 12, 40]", "float8_e4m3 [3, 6, 40]"});
  refuse(with_values({data, DType::kI8, {kE, 2 * kI, kH}}), down.view(),
         {"gate_up_proj", "float8_e4m3 [3, 12, 40]", "int8"});
  refuse(with_scales({scales, DType::kF32, {kE, 2, 5}}), down.view(),
         {"scales of gate_up_proj: float8_e4m3 [3, 12, 40]", "float32 [3, 3, 5], or [3, 4, 5]",
          "float32 [3, 2, 5]"});
  refuse(with_scales({scales, DType::kF32, {kE, 3, 4}}), down.view(), {"[3, 3, 5]", "[3, 3, 4]"});
  refuse(with_scales({scales, DType::kF32, {kE, 15}}), down.view(), {"[3, 3, 5]", "[3, 15]"});
  refuse(with_scales({scales, DType::kBF16, {kE, 3, 5}}), down.view(), {"float32", "bfloat16"});
  refuse(with_scales({scales, DType::kU8, {kE, 3, 5}}), down.view(), {"float32", "uint8"});
  refuse(with_scales({}), down.view(), {"scales of gate_up_proj", "no tensor"});
  refuse(with_scales({scales, DType::kF32, {kE, 3, 5}, {DeviceType::kCuda, 0}}), down.view(),
         {"beside the values", "cuda"});
  QuantizedTensor other = down.view();
  other.layout.block_rows = 8;
  refuse(up.view(), other, {"down_proj", "4 x 8 as gate_up_proj", "8 x 8"});
  other = up.view();
  other.layout.dtype = DType::kF16;
  refuse(other, down.view(), {"float16"});
  const std::vector<float> bad = {1, 0, 1};
  expect_error<InvalidArgument>(
      [&] {
        QuantizedFusedExperts fused{up.view(), down.view()};
        fused.down_input_scales = bad;
        make_experts_weights(config(), fused);
      },
      {"input scales of down", "got 0 for expert 1"});
  expect_error<InvalidArgument>(
      [&] {
        QuantizedFusedExperts fused{up.view(), down.view()};
        fused.gate_up_input_scales = std::span<const float>(bad).first(2);
        make_experts_weights(config(), fused);
      },
      {"input scales of gate", "expected 3", "got 2"});
}

TEST(QuantizedPerExpert, NamesTheTensorThatDoesNotFit) {
  const ScaleLayout layout{DType::kF32, 4, 8};
  const auto a = random_weight({kI, kH}, StorageFormat::kFp8Block, layout, 1);
  const auto b = random_weight({kH, kI}, StorageFormat::kFp8Block, layout, 2);
  const std::vector<QuantizedTensor> up(kE, a.view()), down(kE, b.view());
  const auto refuse = [&](const QuantizedExperts& tensors,
                          std::initializer_list<std::string> parts) {
    expect_error<InvalidArgument>([&] { make_experts_weights(config(), tensors); }, parts);
  };
  refuse({{}, up, down}, {"gate: expected 3 tensors"});
  refuse({up, up, up}, {"down[0]", "[40, 6]", "[6, 40]"});
  std::vector<QuantizedTensor> odd = up;
  odd[1].scales = TensorView(a.scales->data(), DType::kF32, {1, 5});
  refuse({up, odd, down}, {"scales of up[1]: float8_e4m3 [6, 40]", "float32 [2, 5]", "[1, 5]"});
  odd = up;
  odd[2].scales = {};
  refuse({odd, up, down}, {"scales of gate[2]", "no tensor"});
  odd = up;
  odd[2].format = StorageFormat::kMxFp8;
  refuse({odd, up, down}, {"gate[2]", "fp8", "mxfp8"});
  refuse({{}, {}, {}}, {"up: expected 3 tensors"});
}

// ---- the reference, by hand ---------------------------------------------------------------------

// One expert without a gate, relu: x is 1 at `picked` and 0 elsewhere, up picks it into h[picked],
// and down [5 * 16, 32] has at column `picked` all 16 codes of e2m1 in rows of each exponent byte.
TEST(ReferenceByHand, AllCodesOfE2m1TheOrderOfNibblesAndExponentBytes) {
  constexpr std::array<uint8_t, 5> kExponents = {0, 1, 127, 254, 255};
  constexpr std::array<double, 5> kScales = {0x1p-127, 0x1p-126, 1, 0x1p127, 0};
  constexpr std::array<double, 16> kValues = {0,    0.5,  1,  1.5,  2,  3,  4,  6,
                                              -0.0, -0.5, -1, -1.5, -2, -3, -4, -6};
  ExpertsConfig c{.num_experts = 1, .hidden_size = 80, .intermediate_size = 32, .top_k = 1};
  c.activation = Activation::kRelu;
  c.has_gate = false;
  for (const int64_t picked : {0, 1}) {
    const auto nibble = [&](int code) {
      return static_cast<uint8_t>(picked == 0 ? code : code << 4);
    };
    std::vector<uint8_t> up(32 * 40), up_scales(32 * 3, 127), down(80 * 16), down_scales(80);
    up[static_cast<size_t>(picked * 40)] = nibble(2);  // row `picked`, column `picked`: 1
    for (size_t n = 0; n < 80; ++n) {
      down[n * 16] = nibble(static_cast<int>(n % 16));
      down_scales[n] = kExponents[n / 16];
    }
    const std::vector<QuantizedTensor> ups = {{StorageFormat::kFp4,
                                               kMx,
                                               {up.data(), DType::kI8, {32, 40}},
                                               {up_scales.data(), DType::kF8E8M0, {32, 3}}}};
    const std::vector<QuantizedTensor> downs = {{StorageFormat::kFp4,
                                                 kMx,
                                                 {down.data(), DType::kI8, {80, 16}},
                                                 {down_scales.data(), DType::kF8E8M0, {80, 1}}}};
    const ExpertsWeights w = make_experts_weights(c, QuantizedExperts{{}, ups, downs});
    std::vector<float> x(80);
    x[static_cast<size_t>(picked)] = 1;
    const int32_t id = 0;
    const float one = 1;
    const RoutedTokens tokens{{x.data(), DType::kF32, {1, 80}},
                              {&id, DType::kI32, {1, 1}},
                              {&one, DType::kF32, {1, 1}},
                              {}};
    std::vector<double> out(80);
    reference_forward(c, w, tokens, out.data());
    for (size_t n = 0; n < 80; ++n) {
      if (kExponents[n / 16] == 255) {
        EXPECT_TRUE(std::isnan(out[n])) << n;
      } else {
        EXPECT_EQ(out[n], kValues[n % 16] * kScales[n / 16]) << n;
      }
    }
  }
}

// The same with e4m3 and two float32 scales, 1.5 and 0.25, in blocks of 40 rows; activations
// quantised: 3 is 448 * (3 / 448), so that nothing is lost.
TEST(ReferenceByHand, CodesOfE4m3WithScaleOneAndAHalf) {
  const std::vector<uint8_t> codes = {0x38, 0x40, 0x7e, 0x01, 0xb8, 0x00, 0xfe, 0x39, 0x08, 0x7f};
  const std::vector<double> values = {1, 2, 448, 0x1p-9, -1, 0, -448, 1.125, 0x1p-6, 0};
  ExpertsConfig c{.num_experts = 1, .hidden_size = 80, .intermediate_size = 2, .top_k = 1};
  c.activation = Activation::kRelu;
  c.has_gate = false;
  std::vector<uint8_t> up(2 * 80), down(80 * 2);
  up[80] = 0x38;  // h[1] = x[0] * 1 * 0.5
  for (size_t n = 0; n < 80; ++n) down[2 * n + 1] = codes[n % 10];
  const ScaleLayout layout{DType::kF32, 40, 128};
  const std::vector<float> up_scale = {0.5f}, down_scales = {1.5f, 0.25f};
  const std::vector<QuantizedTensor> ups = {{StorageFormat::kFp8Block,
                                             layout,
                                             {up.data(), DType::kF8E4M3, {2, 80}},
                                             {up_scale.data(), DType::kF32, {1, 1}}}};
  const std::vector<QuantizedTensor> downs = {{StorageFormat::kFp8Block,
                                               layout,
                                               {down.data(), DType::kF8E4M3, {80, 2}},
                                               {down_scales.data(), DType::kF32, {2, 1}}}};
  const ExpertsWeights w = make_experts_weights(c, QuantizedExperts{{}, ups, downs});
  std::vector<float> x(80);
  x[0] = 3;
  const int32_t id = 0;
  const float half = 0.5f;
  const RoutedTokens tokens{{x.data(), DType::kF32, {1, 80}},
                            {&id, DType::kI32, {1, 1}},
                            {&half, DType::kF32, {1, 1}},
                            {}};
  for (const ActivationScheme scheme : {ActivationScheme::kNone, ActivationScheme::kDynamic}) {
    std::vector<double> out(80);
    reference_forward(c, w, tokens, out.data(), scheme);
    for (size_t n = 0; n < 80; ++n) {
      if (codes[n % 10] == 0x7f) {
        EXPECT_TRUE(std::isnan(out[n]));
      } else {  // 0.5 * (3 * 0.5) * value * scale; the scales of activations are rounded to float32
        const double expected = 0.75 * values[n % 10] * down_scales[n / 40];
        EXPECT_NEAR(out[n], expected, std::abs(expected) * 3e-7) << n;
      }
    }
  }
}

}  // namespace
}  // namespace cadre

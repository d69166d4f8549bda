#include "backends/cpu/kernels/isa.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "backends/cpu/kernels/panel_product.h"
#include "backends/cpu/kernels/scalars.h"
#include "cadre/error.h"

namespace cadre::cpu {
namespace {

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables;
  for (const Isa isa : kAllIsas) {
    if (is_available(isa)) tables.push_back(&kernels_for(isa, DType::kBF16));
  }
  return tables;
}

TEST(Isa, WithoutARequestAnAvailableOneIsChosen) {
  EXPECT_TRUE(is_available(choose_isa(nullptr)));
  EXPECT_TRUE(is_available(Isa::kPortable));
}

TEST(Isa, TakesTheRequestedOneOrSaysWhatThereIs) {
  for (const Isa isa : kAllIsas) {
    const std::string name(name_of(isa));
    if (is_available(isa)) {
      EXPECT_EQ(choose_isa(name.c_str()), isa);
      continue;
    }
    try {
      choose_isa(name.c_str());
      ADD_FAILURE() << name;
    } catch (const Unsupported& e) {
      EXPECT_NE(std::string(e.what()).find("this processor has only portable"), std::string::npos);
    }
  }
}

TEST(Isa, RefusesAnUnknownName) {
  for (const char* name : {"", "sse9", "AVX2"}) {
    try {
      choose_isa(name);
      ADD_FAILURE() << name;
    } catch (const InvalidArgument& e) {
      EXPECT_NE(std::string(e.what()).find("CADRE_CPU_ISA: expected one of portable, avx2"),
                std::string::npos);
    }
  }
}

TEST(Isa, OnlyComputeDtypesHaveKernels) {
  EXPECT_EQ(element_of(DType::kF16), Element::kF16);
  EXPECT_THROW(element_of(DType::kI32), InvalidArgument);
  EXPECT_THROW(kernels_for(Isa::kPortable, DType::kF64), InvalidArgument);
}

TEST(SplitRows, CoversAllRowsWithBlocksOfLikeSize) {
  EXPECT_EQ(split_rows(0).count, 0);
  for (int64_t rows = 1; rows < 2000; ++rows) {
    const RowBlocks blocks = split_rows(rows);
    EXPECT_LE(blocks.rows_per_block, kMaxBlockRows);
    EXPECT_GE(blocks.count * blocks.rows_per_block, rows);
    EXPECT_LT((blocks.count - 1) * blocks.rows_per_block, rows);
  }
  EXPECT_EQ(split_rows(200).rows_per_block, 108);  // not 192 and a rest of 8
}

TEST(ByteOffset, IsComputedIn64Bits) {
  const WeightMatrix wide{nullptr, 1 << 20, 1, Element::kBF16, {}};
  EXPECT_EQ(byte_offset(wide, 1 << 12, 5), ((int64_t{1} << 32) + 5) * 2);
  const WeightMatrix tall{nullptr, 1, int64_t{1} << 31, Element::kF32, {}};
  EXPECT_EQ(byte_offset(tall, 3, 7), (3 + (int64_t{7} << 31)) * 4);
  const WeightMatrix bytes{nullptr, int64_t{1} << 20, 1, Element::kE4m3, {}};
  EXPECT_EQ(byte_offset(bytes, 1 << 13, 5), (int64_t{1} << 33) + 5);
  const WeightMatrix nibbles{nullptr, int64_t{1} << 20, 1, Element::kE2m1, {}};  // rows in bytes
  EXPECT_EQ(byte_offset(nibbles, 1 << 13, 6), (int64_t{1} << 33) + 3);
}

// The gate kernel of a table on one row of up values, without a gate.
std::vector<float> activated(const KernelTable& table, GateKind kind, const std::vector<float>& x) {
  std::vector<float> out(x.size());
  const float zeros[kPanelColumns] = {};
  for (size_t first = 0; first < x.size(); first += kPanelColumns) {
    float acc[kPanelColumns] = {};
    const size_t count = std::min<size_t>(kPanelColumns, x.size() - first);
    std::memcpy(acc, x.data() + first, count * sizeof(float));
    GateArgs args{};
    args.acc = acc;
    args.num_rows = 1;
    args.columns = static_cast<int>(count);
    args.kind = kind;
    args.limit = std::numeric_limits<float>::infinity();
    args.gate_bias = args.up_bias = zeros;
    args.out_type = Element::kF32;
    args.out = out.data() + first;
    table.gate(args);
  }
  return out;
}

double truth(GateKind kind, double x) {
  switch (kind) {
    case GateKind::kSilu:
      return x / (1 + std::exp(-x));
    case GateKind::kGelu:
      return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    case GateKind::kGeluTanh:
      return 0.5 * x * (1 + std::tanh(std::sqrt(2 / M_PI) * (x + 0.044715 * x * x * x)));
    case GateKind::kRelu:
      return std::max(x, 0.0);
    case GateKind::kRelu2:
      return std::max(x, 0.0) * std::max(x, 0.0);
    default:
      return 0;
  }
}

TEST(Activations, LieWithinAFewUlpsOfTheTruth) {
  std::vector<float> x;
  for (float v = -30; v <= 30; v += 0.0137f) x.push_back(v);
  for (const KernelTable* table : available_tables()) {
    for (const GateKind kind : {GateKind::kSilu, GateKind::kGelu, GateKind::kGeluTanh,
                                GateKind::kRelu, GateKind::kRelu2}) {
      const auto out = activated(*table, kind, x);
      double worst = 0;
      for (size_t i = 0; i < x.size(); ++i) {
        const double expected = truth(kind, x[i]);
        // In the far tails of gelu the exponent itself is rounded: absolute below 1e-3.
        const double scale = std::max(std::abs(expected), 1e-3);
        worst = std::max(worst, std::abs(out[i] - expected) / scale);
      }
      EXPECT_LE(worst, kind == GateKind::kSilu ? 3e-7 : 2e-6)
          << table->name << " " << static_cast<int>(kind);
    }
  }
}

// Where exp leaves float32 the product must still go to the limit, not to x times something small.
TEST(Activations, GoToTheirLimitsFarOut) {
  std::vector<float> x;
  for (float v = 80; v < 110; v += 0.21f) x.insert(x.end(), {v, -v});
  for (const float v : {1e3f, 1e10f, 1e30f, 1e38f, 3e38f}) x.insert(x.end(), {v, -v});
  for (const KernelTable* table : available_tables()) {
    for (const GateKind kind : {GateKind::kSilu, GateKind::kGelu, GateKind::kGeluTanh}) {
      const auto out = activated(*table, kind, x);
      for (size_t i = 0; i < x.size(); ++i) {
        // Below -88.7 the sigmoid is zero in float32; the truth there is smaller than 3e-37.
        const double expected = x[i] > 0 ? x[i] : truth(kind, x[i]);
        const double tolerance = x[i] > 0 ? 1e-6 * x[i] : 1e-5 * -expected + 3e-37;
        EXPECT_NEAR(out[i], expected, tolerance) << table->name << " " << x[i];
      }
    }
  }
}

TEST(Activations, HaveTheSameBitsAtEveryPlaceOfAVector) {
  for (const KernelTable* table : available_tables()) {
    for (const GateKind kind : {GateKind::kSilu, GateKind::kGelu, GateKind::kGeluTanh}) {
      const auto many = activated(*table, kind, std::vector<float>(kPanelColumns - 1, 1.2345f));
      const auto one = activated(*table, kind, {1.2345f});
      for (const float value : many) EXPECT_EQ(value, one[0]) << table->name;
    }
  }
}

TEST(Activations, KeepNaNAndLargeValues) {
  constexpr float kBig = 3e38f;
  for (const KernelTable* table : available_tables()) {
    for (const GateKind kind : {GateKind::kSilu, GateKind::kGelu, GateKind::kGeluTanh,
                                GateKind::kRelu, GateKind::kRelu2}) {
      const auto out = activated(*table, kind, {std::nanf(""), 1000, -1000});
      EXPECT_TRUE(std::isnan(out[0])) << table->name << " " << static_cast<int>(kind);
      EXPECT_EQ(out[1], kind == GateKind::kRelu2 ? 1e6f : 1000);
      EXPECT_NEAR(out[2], 0, 1e-30);
    }
    EXPECT_EQ(activated(*table, GateKind::kSilu, {kBig})[0], kBig);
  }
}

// Every 16-bit pattern widens exactly, and its float rounds back to it.
TEST(Conversions, AreThoseOfTheScalarTypes) {
  for (const KernelTable* table : available_tables()) {
    for (const Element type : {Element::kBF16, Element::kF16}) {
      for (uint32_t base = 0; base < 0x10000; base += kPanelColumns) {
        uint16_t bits[kPanelColumns];
        for (uint32_t i = 0; i < kPanelColumns; ++i) bits[i] = static_cast<uint16_t>(base + i);
        float wide[kChunk];
        const void* row = bits;
        table->widen({&row, 0, 1, kPanelColumns, type, wide});
        uint16_t back[kPanelColumns];
        void* out = back;
        table->finish({wide, 1, kPanelColumns, nullptr, nullptr, type, &out});
        for (int i = 0; i < kPanelColumns; ++i) {
          const float expected = read_float(&bits[i], type);
          if (std::isnan(expected)) {
            EXPECT_TRUE(std::isnan(wide[i]));
            EXPECT_TRUE(std::isnan(read_float(&back[i], type)));
          } else {
            EXPECT_EQ(wide[i], expected);
            EXPECT_EQ(back[i], bits[i]) << table->name;
          }
        }
      }
    }
  }
}

TEST(Conversions, RoundToNearestEven) {
  std::vector<float> values;
  for (uint64_t bits = 0; bits < 0x100000000u; bits += 0x00012345u) {
    float value;
    const auto narrow = static_cast<uint32_t>(bits);
    std::memcpy(&value, &narrow, 4);
    if (!std::isnan(value)) values.push_back(value);
  }
  for (const float tie : {1.00390625f, 1.01171875f, 65519.9f, 65520.0f, 5.9e-8f, 2.9e-8f}) {
    values.push_back(tie);
  }
  values.resize(values.size() / kPanelColumns * kPanelColumns);
  for (const KernelTable* table : available_tables()) {
    for (size_t first = 0; first < values.size(); first += kPanelColumns) {
      uint16_t bf16[kPanelColumns], f16[kPanelColumns];
      void* to_bf16 = bf16;
      void* to_f16 = f16;
      const float* acc = values.data() + first;
      table->finish({acc, 1, kPanelColumns, nullptr, nullptr, Element::kBF16, &to_bf16});
      table->finish({acc, 1, kPanelColumns, nullptr, nullptr, Element::kF16, &to_f16});
      for (int i = 0; i < kPanelColumns; ++i) {
        ASSERT_EQ(bf16[i], BFloat16(acc[i]).bits) << table->name << " " << acc[i];
        ASSERT_EQ(f16[i], Float16(acc[i]).bits) << table->name << " " << acc[i];
      }
    }
  }
}

}  // namespace
}  // namespace cadre::cpu

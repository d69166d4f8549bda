// Products of weights in place that end with the gate function or the results: bit for bit what the
// steps give one by one.
#include <gtest/gtest.h>

#include <limits>
#include <random>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/panel_product.h"
#include "cadre/float16.h"

namespace cadre::cpu {
namespace {

std::vector<BFloat16> random_values(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<BFloat16> values(static_cast<size_t>(count));
  for (BFloat16& value : values) value = BFloat16(normal(random));
  return values;
}

std::vector<float> random_floats(int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> normal;
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(random);
  return values;
}

// One panel of weights in place: `columns` of gate and as many of up, or of up alone.
class Panel {
 public:
  Panel(const KernelTable& kernels, int num_rows, int64_t k, int columns, int parts)
      : kernels_(kernels),
        num_rows_(num_rows),
        k_(k),
        rows_(random_values(num_rows * k, 1)),
        weights_(random_values(int64_t{parts} * columns * k, 2)),
        arranged_(static_cast<size_t>(arranged_bytes(num_rows, k))),
        sums_(kSumFloats),
        acc_(static_cast<size_t>(num_rows) * kPanelColumns) {
    std::vector<const void*> rows;
    for (int r = 0; r < num_rows; ++r) rows.push_back(rows_.data() + r * k);
    kernels.pair({rows.data(), 0, num_rows, k, arranged_.data()});
    for (int column = 0; column < columns; column += 16) {
      for (int p = 0; p < parts; ++p) {
        groups_.push_back({weights_.data() + (p * columns + column) * k, k, p * 32 + column});
      }
    }
  }

  void multiply(const GateArgs* gate, const FinishArgs* finish) {
    kernels_.multiply_in_place(
        {groups_.data(), static_cast<int>(groups_.size()), nullptr, k_,
         num_rows_ == 1 ? static_cast<void*>(rows_.data()) : arranged_.data(), num_rows_,
         sums_.data(), acc_.data(), gate, finish});
  }

  int num_rows() const { return num_rows_; }
  const float* acc() const { return acc_.data(); }

 private:
  const KernelTable& kernels_;
  int num_rows_;
  int64_t k_;
  std::vector<BFloat16> rows_;
  std::vector<BFloat16> weights_;
  std::vector<unsigned char> arranged_;
  std::vector<WeightRows> groups_;
  std::vector<float> sums_;
  std::vector<float> acc_;
};

const KernelTable* in_place_table() {
  if (!is_available(Isa::kAmx)) return nullptr;
  return &kernels_for(Isa::kAmx, DType::kBF16);
}

GateArgs gate_args(const Panel& panel, GateKind kind, int columns, const float* biases) {
  GateArgs args{};
  args.acc = panel.acc();
  args.num_rows = panel.num_rows();
  args.columns = columns;
  args.has_gate = true;
  args.kind = kind;
  args.limit = std::numeric_limits<float>::infinity();
  args.alpha = 1.702f;
  args.gate_bias = biases;
  args.up_bias = biases + 32;
  args.out_type = Element::kBF16;
  return args;
}

TEST(InPlace, GatesOnTheWayAsAfterwards) {
  const KernelTable* kernels = in_place_table();
  if (kernels == nullptr) GTEST_SKIP() << "this processor has no AMX";
  const std::vector<float> biases = random_floats(64, 3);
  for (const int num_rows : {16, 17, 32, 68, 96, 191}) {
    for (const int columns : {16, 32}) {
      for (const int64_t k : {96, 272, 640}) {
        for (const GateKind kind : {GateKind::kSilu, GateKind::kGelu, GateKind::kScaledSwiglu}) {
          Panel panel(*kernels, num_rows, k, columns, 2);
          GateArgs gate = gate_args(panel, kind, columns, biases.data());
          const auto words = static_cast<size_t>(arranged_rows(num_rows)) * kStepK;
          std::vector<uint16_t> h(static_cast<size_t>(num_rows) * kPanelColumns);
          std::vector<uint16_t> expected(words);
          panel.multiply(nullptr, nullptr);
          gate.out = h.data();
          gate.out_stride = kPanelColumns;
          kernels->gate(gate);
          std::vector<const void*> rows;
          for (int r = 0; r < num_rows; ++r) rows.push_back(h.data() + r * kPanelColumns);
          kernels->pair({rows.data(), 0, num_rows, columns, expected.data()});
          std::vector<uint16_t> got(words, uint16_t{0x7fff});
          gate.out = got.data();
          panel.multiply(&gate, nullptr);
          int different = 0;  // of the rows that there are: the padding's values are free
          for (size_t i = 0; i < words; ++i) {
            const size_t token = i / 512 * 16 + i / 2 % 16;
            if (token < static_cast<size_t>(num_rows) && got[i] != expected[i]) ++different;
          }
          EXPECT_EQ(different, 0) << num_rows << " rows, " << columns << " columns, k " << k;
        }
      }
    }
  }
}

TEST(InPlace, FinishesOnTheWayAsAfterwards) {
  const KernelTable* kernels = in_place_table();
  if (kernels == nullptr) GTEST_SKIP() << "this processor has no AMX";
  const std::vector<float> bias = random_floats(64, 4);
  for (const int num_rows : {1, 5, 16, 17, 68, 192}) {
    for (const int columns : {16, 48, 64}) {
      Panel panel(*kernels, num_rows, 304, columns, 1);
      const std::vector<float> scales = random_floats(num_rows, 5);
      const auto results = [&](std::vector<float>& out) {
        std::vector<void*> rows;
        for (int r = 0; r < num_rows; ++r) rows.push_back(out.data() + r * columns);
        return rows;
      };
      std::vector<float> expected(static_cast<size_t>(num_rows * columns));
      std::vector<float> got(expected.size(), -1.0f);
      panel.multiply(nullptr, nullptr);
      std::vector<void*> rows = results(expected);
      FinishArgs finish{panel.acc(),   num_rows,      columns,    bias.data(),
                        scales.data(), Element::kF32, rows.data()};
      kernels->finish(finish);
      rows = results(got);
      finish.out = rows.data();
      panel.multiply(nullptr, &finish);
      EXPECT_EQ(got, expected) << num_rows << " rows, " << columns << " columns";
    }
  }
}

}  // namespace
}  // namespace cadre::cpu

#include <gtest/gtest.h>

#include <memory>
#include <vector>

#include "cadre/error.h"
#include "cadre/experts.h"

namespace cadre {
namespace {

constexpr int64_t kE = 3, kH = 5, kI = 4;

ExpertsConfig config() {
  return {.num_experts = kE, .hidden_size = kH, .intermediate_size = kI, .top_k = 1};
}

// A tensor whose elements are their own index, so that a read value tells where it lay.
class Counting {
 public:
  explicit Counting(const Dims& shape) : values_(static_cast<size_t>(num_elements(shape))) {
    for (size_t i = 0; i < values_.size(); ++i) values_[i] = static_cast<float>(i);
    view = TensorView(values_.data(), DType::kF32, shape);
  }
  TensorView view;

 private:
  std::vector<float> values_;
};

float at(const ExpertMatrix& m, int64_t n, int64_t k) {
  return static_cast<const float*>(m.data)[n * m.row_stride + k * m.col_stride];
}

float at(const ExpertVector& v, int64_t n) {
  return static_cast<const float*>(v.data)[n * v.stride];
}

// The index of element (e, row, k) of the logical gate_up [E, 2I, H] in its storage.
int64_t index_of(bool transposed, int64_t rows, int64_t e, int64_t row, int64_t k,
                 int64_t columns) {
  return e * rows * columns + (transposed ? k * rows + row : row * columns + k);
}

TEST(FusedExperts, ResolvesEveryLayoutIntoPointersAndStrides) {
  for (const bool transposed : {false, true}) {
    for (const bool concatenated : {false, true}) {
      ExpertsConfig c = config();
      c.is_transposed = transposed;
      c.is_concatenated = concatenated;
      const Counting up(transposed ? Dims{kE, kH, 2 * kI} : Dims{kE, 2 * kI, kH});
      const Counting down(transposed ? Dims{kE, kI, kH} : Dims{kE, kH, kI});
      const ExpertsWeights w = make_experts_weights(c, {up.view, down.view});
      ASSERT_EQ(w.gate.size(), 3u);
      EXPECT_EQ(w.format, StorageFormat::kF32);
      for (int64_t e = 0; e < kE; ++e) {
        const auto i = static_cast<size_t>(e);
        for (int64_t n = 0; n < kI; ++n) {
          for (int64_t k = 0; k < kH; ++k) {
            const int64_t gate_row = concatenated ? n : 2 * n;
            const int64_t up_row = concatenated ? kI + n : 2 * n + 1;
            EXPECT_EQ(at(w.gate[i], n, k), index_of(transposed, 2 * kI, e, gate_row, k, kH));
            EXPECT_EQ(at(w.up[i], n, k), index_of(transposed, 2 * kI, e, up_row, k, kH));
            EXPECT_EQ(at(w.down[i], k, n), index_of(transposed, kH, e, k, n, kI));
          }
        }
      }
    }
  }
}

TEST(FusedExperts, ResolvesBiases) {
  for (const bool concatenated : {false, true}) {
    ExpertsConfig c = config();
    c.has_bias = true;
    c.is_concatenated = concatenated;
    const Counting up({kE, 2 * kI, kH}), down({kE, kH, kI}), up_bias({kE, 2 * kI}),
        down_bias({kE, kH});
    const ExpertsWeights w =
        make_experts_weights(c, {up.view, down.view, up_bias.view, down_bias.view});
    EXPECT_EQ(at(w.gate_bias[1], 3), concatenated ? 8 + 3 : 8 + 6);
    EXPECT_EQ(at(w.up_bias[2], 1), concatenated ? 16 + 4 + 1 : 16 + 3);
    EXPECT_EQ(at(w.down_bias[2], 4), 14);
  }
}

TEST(FusedExperts, WorkWithoutAGateAndWithAWiderExpertStride) {
  ExpertsConfig c = config();
  c.has_gate = false;
  const Counting memory({1000}), down({kE, kH, kI});
  const TensorView up(memory.view.data(), DType::kF32, {kE, kI, kH}, {100, 7, 1});
  const ExpertsWeights w = make_experts_weights(c, {up, down.view});
  EXPECT_TRUE(w.gate.empty());
  EXPECT_EQ(at(w.up[2], 3, 4), 200 + 21 + 4);
}

TEST(FusedExperts, KeepsTheOwnerAlive) {
  const auto owner = std::make_shared<int>(1);
  const Counting up({kE, 2 * kI, kH}), down({kE, kH, kI});
  const ExpertsWeights w = make_experts_weights(config(), {up.view, down.view}, owner);
  EXPECT_EQ(owner.use_count(), 2);
}

// Expert e of a [200000, 2I, H] tensor lies beyond 2^31 elements, and beyond 2^32 bytes: addresses
// only, nothing is read.
TEST(FusedExperts, AddressesBeyond2To31Elements) {
  ExpertsConfig c = config();
  c.num_experts = 200000;
  c.hidden_size = 2048;
  c.intermediate_size = 768;
  const auto base = uintptr_t{1} << 40;
  const auto view = [&](const Dims& shape) {
    return TensorView(reinterpret_cast<const void*>(base), DType::kBF16, shape);
  };
  const ExpertsWeights w =
      make_experts_weights(c, {view({200000, 1536, 2048}), view({200000, 2048, 768})});
  EXPECT_EQ(reinterpret_cast<uintptr_t>(w.up[199999].data),
            base + (uint64_t{199999} * 1536 * 2048 + 768 * 2048) * 2);
}

std::string refusal(const ExpertsConfig& c, const FusedExperts& fused) {
  try {
    make_experts_weights(c, fused);
  } catch (const InvalidArgument& e) {
    return e.what();
  }
  return "accepted";
}

TEST(FusedExperts, NamesTheTensorThatDoesNotFit) {
  const float data[400] = {};
  const auto view = [&](const Dims& shape, DType dtype = DType::kF32, Device device = {}) {
    return TensorView(data, dtype, shape, device);
  };
  const TensorView up = view({kE, 2 * kI, kH}), down = view({kE, kH, kI});
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(refusal(config(), {view({kE, kI, kH}), down}),
         "gate_up_proj: expected [3, 8, 5], got gate_up_proj: float32 [3, 4, 5]");
  expect(refusal(config(), {up, view({kE, kI, kH})}), "down_proj: expected [3, 5, 4]");
  expect(refusal(config(), {up, {}}), "down_proj: expected [3, 5, 4], got no tensor");
  expect(refusal(config(), {up, view({kE, kH, kI}, DType::kBF16)}),
         "down_proj: expected float32 as gate_up_proj, got down_proj: bfloat16");
  expect(refusal(config(), {view({kE, 2 * kI, kH}, DType::kI32), down}),
         "gate_up_proj: expected float32, float16 or bfloat16, got gate_up_proj: int32");
  expect(refusal(config(), {up, view({kE, kH, kI}, DType::kF32, {DeviceType::kCuda, 0})}),
         "down_proj: expected memory on cpu");
  expect(refusal(config(), {up, down, view({kE, 2 * kI}), {}}), "no bias (has_bias = false)");
  expect(refusal(config(), {TensorView(data, DType::kF32, {kE, 2 * kI, kH}, {80, 10, 2}), down}),
         "stride 1 in the last dimension, not 2");
  expect(refusal(config(), {TensorView(nullptr, DType::kF32, {kE, 2 * kI, kH}), down}),
         "not a null pointer");
  ExpertsConfig biased = config();
  biased.has_bias = true;
  expect(refusal(biased, {up, down, {}, view({kE, kH})}), "gate_up_proj_bias: expected [3, 8]");
  expect(refusal(biased, {up, down, view({kE, 2 * kI}), view({kE, kI})}),
         "down_proj_bias: expected [3, 5]");
  expect(refusal(biased, {up, down, view({kE, 2 * kI}), view({kE, kH}, DType::kBF16)}),
         "down_proj_bias: expected float32 as gate_up_proj_bias");
  ExpertsConfig ungated = config();
  ungated.has_gate = false;
  expect(refusal(ungated, {up, down}), "up_proj: expected [3, 4, 5]");
}

TEST(PerExpertTensors, AreTakenAsTheyAre) {
  const Counting a({kI, kH}), b({kH, kI});
  const std::vector<TensorView> up(3, a.view), down(3, b.view);
  const ExpertsWeights w = make_experts_weights(config(), up, up, down);
  EXPECT_EQ(at(w.gate[2], 3, 4), 19);
  EXPECT_EQ(at(w.down[0], 4, 3), 19);
}

TEST(PerExpertTensors, NamesTheTensorThatDoesNotFit) {
  const Counting a({kI, kH}), b({kH, kI});
  const std::vector<TensorView> up(3, a.view), down(3, b.view), two(2, a.view);
  const auto refused = [](const ExpertsConfig& c, const auto& gate, const auto& u, const auto& d) {
    try {
      make_experts_weights(c, gate, u, d);
    } catch (const InvalidArgument& e) {
      return std::string(e.what());
    }
    return std::string("accepted");
  };
  const auto expect = [](const std::string& text, const std::string& part) {
    EXPECT_NE(text.find(part), std::string::npos) << text;
  };
  expect(refused(config(), up, two, down), "up: expected 3 tensors (num_experts), got 2");
  expect(refused(config(), std::vector<TensorView>(), up, down), "gate: expected 3 tensors");
  std::vector<TensorView> wrong = down;
  wrong[1] = a.view;
  expect(refused(config(), up, up, wrong), "down[1]: expected [5, 4], got down[1]: float32 [4, 5]");
  wrong = down;
  wrong[2] = TensorView(b.view.data(), DType::kBF16, {kH, kI});
  expect(refused(config(), up, up, wrong), "down[2]: expected float32 as up[0]");
  ExpertsConfig biased = config();
  biased.has_bias = true;
  expect(refused(biased, up, up, down), "has_bias: expected false");
  ExpertsConfig ungated = config();
  ungated.has_gate = false;
  expect(refused(ungated, up, up, down), "gate: expected no tensors");
}

}  // namespace
}  // namespace cadre

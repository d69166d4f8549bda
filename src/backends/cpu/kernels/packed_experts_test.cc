#include "backends/cpu/kernels/packed_experts.h"

#include <gtest/gtest.h>

#include <cstring>
#include <functional>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "conformance/guarded_buffer.h"
#include "support/expect_error.h"

namespace cadre::cpu {
namespace {

using test::expect_error;
using test::GuardedBuffer;

constexpr StorageFormat kFormats[] = {StorageFormat::kF32, StorageFormat::kF16,
                                      StorageFormat::kBF16};
constexpr int64_t kSizes[] = {1, 31, 32, 33, 64, 65, 96, 100};

int64_t size_of(Element type) { return type == Element::kF32 ? 4 : 2; }

enum class Order { kRows, kColumns, kInterleaved };

std::vector<const KernelTable*> available_tables() {
  std::vector<const KernelTable*> tables;
  for (const Isa isa : kAllIsas) {
    if (!is_available(isa)) continue;
    for (const DType dtype : {DType::kBF16, DType::kF32}) {
      const KernelTable* table = &kernels_for(isa, dtype);
      if (std::find(tables.begin(), tables.end(), table) == tables.end()) tables.push_back(table);
    }
  }
  return tables;
}

// Random bits of [N, K] matrices, each with unreadable memory behind it.
class Matrices {
 public:
  explicit Matrices(Element type) : size_(size_of(type)) {}

  ExpertMatrix add(int64_t n, int64_t k, Order order) {
    ExpertMatrix matrix;
    if (order == Order::kRows) {
      matrix.row_stride = k + 3;
    } else {
      matrix.row_stride = order == Order::kColumns ? 1 : 2;
      matrix.col_stride = n * matrix.row_stride + 1;
    }
    const int64_t last = (n - 1) * matrix.row_stride + (k - 1) * matrix.col_stride;
    buffers_.emplace_back(static_cast<size_t>((last + 1) * size_));
    char* data = buffers_.back().data();
    for (int64_t i = 0; i < (last + 1) * size_; ++i) data[i] = static_cast<char>(next());
    matrix.data = data;
    return matrix;
  }

 private:
  uint64_t next() {
    state_ = state_ * 6364136223846793005u + 1442695040888963407u;
    return state_ >> 40;
  }
  int64_t size_;
  uint64_t state_ = 7;
  std::vector<GuardedBuffer> buffers_;
};

ExpertsConfig config_of(int64_t experts, int64_t hidden, int64_t intermediate, bool has_gate) {
  ExpertsConfig config;
  config.num_experts = experts;
  config.hidden_size = hidden;
  config.intermediate_size = intermediate;
  config.top_k = 1;
  config.has_gate = has_gate;
  return config;
}

ExpertsWeights weights_of(const ExpertsConfig& config, StorageFormat format, Order order,
                          Matrices& matrices) {
  ExpertsWeights weights;
  weights.format = format;
  for (int64_t e = 0; e < config.num_experts; ++e) {
    const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
    if (config.has_gate) weights.gate.push_back(matrices.add(inner, hidden, order));
    weights.up.push_back(matrices.add(inner, hidden, order));
    weights.down.push_back(matrices.add(hidden, inner, order));
  }
  return weights;
}

// The element of a panel's column at k as the header of packed_experts.h describes it: `width`
// columns of each matrix side by side.
std::vector<char> panel_by_definition(const std::vector<const ExpertMatrix*>& parts, int64_t panel,
                                      int64_t n, int64_t k, int64_t size) {
  const auto width = static_cast<int64_t>(64 / parts.size());
  std::vector<char> bytes(static_cast<size_t>((k + 1) / 2 * 64 * 2 * size), '\0');
  for (int64_t column = 0; column < 64; ++column) {
    const ExpertMatrix& matrix = *parts[static_cast<size_t>(column / width)];
    const int64_t row = panel * width + column % width;
    for (int64_t i = 0; i < k && row < n; ++i) {
      std::memcpy(bytes.data() + ((i / 2 * 64 + column) * 2 + i % 2) * size,
                  static_cast<const char*>(matrix.data) +
                      (row * matrix.row_stride + i * matrix.col_stride) * size,
                  static_cast<size_t>(size));
    }
  }
  return bytes;
}

// Empty when every panel of the expert is as defined, else which one is not.
std::string difference(const PackedExperts& packed, const ExpertsConfig& config,
                       const ExpertsWeights& weights, int64_t expert) {
  const auto e = static_cast<size_t>(expert);
  const int64_t size = size_of(packed.layout().type);
  const int64_t hidden = config.hidden_size, inner = config.intermediate_size;
  std::vector<const ExpertMatrix*> parts = {&weights.up[e]};
  if (config.has_gate) parts.insert(parts.begin(), &weights.gate[e]);
  for (int64_t p = 0; p < packed.layout().gate_up.count; ++p) {
    const std::vector<char> expected = panel_by_definition(parts, p, inner, hidden, size);
    if (std::memcmp(packed.gate_up(expert, p), expected.data(), expected.size()) != 0) {
      return "gate_up panel " + std::to_string(p);
    }
  }
  for (int64_t p = 0; p < packed.layout().down.count; ++p) {
    const std::vector<char> expected =
        panel_by_definition({&weights.down[e]}, p, hidden, inner, size);
    if (std::memcmp(packed.down(expert, p), expected.data(), expected.size()) != 0) {
      return "down panel " + std::to_string(p);
    }
  }
  return "";
}

TEST(PackedExperts, HoldWhatTheDefinitionSaysForEverySizeStrideAndInstructionSet) {
  ThreadPool pool(2);
  for (const StorageFormat format : kFormats) {
    for (const int64_t hidden : kSizes) {
      for (const int64_t inner : kSizes) {
        for (const bool has_gate : {true, false}) {
          for (const Order order : {Order::kRows, Order::kColumns, Order::kInterleaved}) {
            const ExpertsConfig config = config_of(1, hidden, inner, has_gate);
            const PackedLayout layout = packed_layout(config, format);
            Matrices matrices(layout.type);
            const ExpertsWeights weights = weights_of(config, format, order, matrices);
            for (const KernelTable* table : available_tables()) {
              PackedExperts packed(layout);
              packed.pack(*table, config, weights, 0, pool);
              ASSERT_EQ(difference(packed, config, weights, 0), "")
                  << table->name << " " << name_of(format) << " " << hidden << " x " << inner
                  << " order " << static_cast<int>(order);
            }
          }
        }
      }
    }
  }
}

// Bytes [N, count] of a matrix, k the faster one, as words of four bytes of 64 columns.
std::vector<char> words_by_definition(const std::vector<const char*>& parts, int64_t row_stride,
                                      int64_t col_stride, int64_t panel, int64_t n, int64_t count) {
  const auto width = static_cast<int64_t>(64 / parts.size());
  std::vector<char> bytes(static_cast<size_t>((count + 3) / 4 * 64 * 4), '\0');
  for (int64_t column = 0; column < 64; ++column) {
    const int64_t row = panel * width + column % width;
    for (int64_t i = 0; i < count && row < n; ++i) {
      bytes[static_cast<size_t>((i / 4 * 64 + column) * 4 + i % 4)] =
          parts[static_cast<size_t>(column / width)][row * row_stride + i * col_stride];
    }
  }
  return bytes;
}

std::vector<char> random_bytes(int64_t count, uint64_t seed) {
  std::vector<char> bytes(static_cast<size_t>(count));
  for (char& byte : bytes) {
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    byte = static_cast<char>(seed >> 40);
  }
  return bytes;
}

TEST(PackedExperts, HoldCodesAndTheScalesThatComeInWords) {
  ThreadPool pool(2);
  for (const StorageFormat format :
       {StorageFormat::kFp8Block, StorageFormat::kMxFp8, StorageFormat::kFp4}) {
    for (const bool by_columns : {false, true}) {
      if (by_columns && format == StorageFormat::kFp4) continue;
      for (const int64_t hidden : {1, 5, 33, 64, 129, 200}) {
        for (const int64_t inner : {1, 31, 64, 100}) {
          for (const bool has_gate : {true, false}) {
            const ExpertsConfig config = config_of(1, hidden, inner, has_gate);
            const bool has_words = format != StorageFormat::kFp8Block;
            ExpertsWeights weights;
            weights.format = format;
            weights.scale_layout =
                has_words ? ScaleLayout{DType::kF8E8M0, 1, 32} : ScaleLayout{DType::kF32, 128, 128};
            std::vector<std::vector<char>> memory;
            const auto matrix = [&](int64_t n, int64_t k) {
              const int64_t stride = row_bytes(format, k);
              memory.push_back(random_bytes(n * stride, memory.size()));
              ExpertMatrix m;
              m.data = memory.back().data();
              m.row_stride = by_columns ? 1 : stride;
              m.col_stride = by_columns ? n : 1;
              memory.push_back(random_bytes(n * (k + 31) / 32 * 4, memory.size()));
              m.scales = memory.back().data();
              m.scale_row_stride = (k + 31) / 32;
              return m;
            };
            if (has_gate) weights.gate = {matrix(inner, hidden)};
            weights.up = {matrix(inner, hidden)};
            weights.down = {matrix(hidden, inner)};
            for (const KernelTable* table : available_tables()) {
              PackedExperts packed(packed_layout(config, format));
              packed.pack(*table, config, weights, 0, pool);
              const auto expect = [&](const std::byte* panel,
                                      const std::vector<const ExpertMatrix*>& parts, int64_t p,
                                      int64_t n, int64_t k) {
                std::vector<const char*> values, scales;
                for (const ExpertMatrix* m : parts) {
                  values.push_back(static_cast<const char*>(m->data));
                  scales.push_back(static_cast<const char*>(m->scales));
                }
                const ExpertMatrix& m = *parts[0];
                std::vector<char> all = words_by_definition(values, m.row_stride, m.col_stride, p,
                                                            n, row_bytes(format, k));
                if (has_words) {
                  std::vector<char> words =
                      words_by_definition(scales, m.scale_row_stride, 1, p, n, (k + 31) / 32);
                  all.insert(all.begin(), words.begin(), words.end());
                }
                ASSERT_EQ(std::memcmp(panel, all.data(), all.size()), 0)
                    << table->name << " " << name_of(format) << " " << n << " x " << k;
              };
              std::vector<const ExpertMatrix*> parts = {&weights.up[0]};
              if (has_gate) parts.insert(parts.begin(), &weights.gate[0]);
              for (int64_t p = 0; p < packed.layout().gate_up.count; ++p) {
                expect(packed.gate_up(0, p), parts, p, inner, hidden);
              }
              for (int64_t p = 0; p < packed.layout().down.count; ++p) {
                expect(packed.down(0, p), {&weights.down[0]}, p, hidden, inner);
              }
            }
          }
        }
      }
    }
  }
}

TEST(PackedLayout, CountsWordsOfCodesAndScales) {
  const ExpertsConfig config = config_of(3, 100, 129, true);
  const PackedLayout fp8 = packed_layout(config, StorageFormat::kFp8Block);
  EXPECT_EQ(fp8.gate_up.panel_bytes, 25u * 256);
  EXPECT_EQ(fp8.down.panel_bytes, 33u * 256);
  const PackedLayout fp4 = packed_layout(config, StorageFormat::kFp4);
  EXPECT_EQ(fp4.gate_up.panel_bytes, (1u + 13) * 256);  // a row of scales for each 128 of k
  EXPECT_EQ(fp4.down.panel_bytes, (2u + 17) * 256);
  EXPECT_EQ(prepacked_bytes(config, StorageFormat::kFp4), fp4.bytes());
  EXPECT_FALSE(fp8 == packed_layout(config, StorageFormat::kMxFp8));
}

TEST(PackedExperts, EveryThreadCountWritesTheSame) {
  const ExpertsConfig config = config_of(3, 300, 150, true);
  Matrices matrices(Element::kBF16);
  const ExpertsWeights weights = weights_of(config, StorageFormat::kBF16, Order::kRows, matrices);
  for (const int threads : {1, 3, 16}) {
    ThreadPool pool(threads);
    PackedExperts packed(packed_layout(config, StorageFormat::kBF16));
    for (int64_t e = 2; e >= 0; --e) {
      packed.pack(kernels_for(Isa::kPortable, DType::kF32), config, weights, e, pool);
    }
    for (int64_t e = 0; e < 3; ++e) EXPECT_EQ(difference(packed, config, weights, e), "") << e;
  }
}

TEST(PackedExperts, BeginAtMultiplesOfACacheLineOnAHugePage) {
  const PackedExperts packed(packed_layout(config_of(2, 33, 31, true), StorageFormat::kF16));
  EXPECT_EQ(reinterpret_cast<uintptr_t>(packed.gate_up(0, 0)) % HugeArena::kAlignment, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(packed.down(0, 0)) % 64, 0u);
  EXPECT_EQ(reinterpret_cast<uintptr_t>(packed.gate_up(1, 0)) % 64, 0u);
}

TEST(PackedLayout, CountsPanelsAndBytes) {
  const PackedLayout layout = packed_layout(config_of(5, 100, 33, true), StorageFormat::kBF16);
  EXPECT_EQ(layout.gate_up.count, 2);  // 32 columns of h each
  EXPECT_EQ(layout.gate_up.panel_bytes, 100u * 64 * 2);
  EXPECT_EQ(layout.down.count, 2);
  EXPECT_EQ(layout.down.panel_bytes, 34u * 64 * 2);
  EXPECT_EQ(layout.bytes(), 5u * (2 * 12800 + 2 * 4352));
  EXPECT_EQ(packed_layout(config_of(5, 100, 33, false), StorageFormat::kF32).gate_up.count, 1);
  EXPECT_FALSE(layout == packed_layout(config_of(5, 100, 33, true), StorageFormat::kF16));
  EXPECT_TRUE(layout == packed_layout(config_of(5, 100, 34, true), StorageFormat::kBF16));
}

TEST(PackedLayout, RefusesSizesThatOverflow) {
  const int64_t largest = int64_t{1} << 28;
  expect_error<InvalidArgument>(
      [&] {
        packed_layout(config_of(int64_t{1} << 20, largest, largest, true), StorageFormat::kF32);
      },
      {"prepack experts", "1048576 experts", "268435456 x 268435456", "63 bits"});
}

// A chunk that is unpacked is the chunk that is packed straight from the weights.
TEST(Unpack, GivesWhatPackGives) {
  ThreadPool pool(1);
  for (const StorageFormat format : kFormats) {
    const ExpertsConfig config = config_of(1, 165, 64, false);
    const PackedLayout layout = packed_layout(config, format);
    Matrices matrices(layout.type);
    const ExpertsWeights weights = weights_of(config, format, Order::kRows, matrices);
    for (const KernelTable* table : available_tables()) {
      PackedExperts packed(layout);
      packed.pack(*table, config, weights, 0, pool);
      for (const Element compute : {Element::kF32, Element::kF16, Element::kBF16}) {
        if (table->row_type == Element::kBF16 && compute != Element::kBF16) continue;
        for (const int64_t k0 : {int64_t{0}, int64_t{kChunk}}) {
          const int k = k0 == 0 ? kChunk : 37;
          std::vector<char> expected(kPanelBytes, '\0'), panel(kPanelBytes, '\0');
          PackArgs pack{};
          pack.weights = static_cast<const char*>(weights.up[0].data) + k0 * size_of(layout.type);
          pack.row_stride = weights.up[0].row_stride;
          pack.col_stride = 1;
          pack.type = layout.type;
          pack.compute = compute;
          pack.columns = pack.width = kPanelColumns;
          pack.k = k;
          pack.panel = expected.data();
          table->pack(pack);
          table->unpack({packed.gate_up(0, 0) + k0 * kPanelColumns * size_of(layout.type),
                         layout.type, compute, k, panel.data()});
          EXPECT_EQ(std::memcmp(panel.data(), expected.data(), panel.size()), 0)
              << table->name << " " << name_of(format) << " from " << k0 << " compute "
              << static_cast<int>(compute);
        }
      }
    }
  }
}

TEST(Prepack, TellsOfEveryExpertInOrderAndMayBeRepeated) {
  ThreadPool pool(2);
  for (const StorageFormat format : kFormats) {
    const ExpertsConfig config = config_of(3, 70, 40, true);
    Matrices matrices(packed_layout(config, format).type);
    ExpertsWeights weights = weights_of(config, format, Order::kRows, matrices);
    EXPECT_EQ(packed_bytes(weights), 0u);
    std::vector<int64_t> told;
    prepack(config, weights, pool, [&](int64_t e) { told.push_back(e); });
    EXPECT_EQ(told, (std::vector<int64_t>{0, 1, 2}));
    ASSERT_NE(weights.packed, nullptr);
    EXPECT_EQ(packed_bytes(weights), prepacked_bytes(config, format));
    EXPECT_EQ(packed_bytes(weights), weights.packed->bytes());
    weights.up[1] = matrices.add(40, 70, Order::kColumns);
    prepack(config, weights, pool);
    for (int64_t e = 0; e < 3; ++e) {
      EXPECT_EQ(difference(*weights.packed, config, weights, e), "") << name_of(format) << e;
    }
  }
}

TEST(Prepack, LeavesNoEarlierFormWhenItFails) {
  ThreadPool pool(1);
  const ExpertsConfig config = config_of(2, 8, 8, true);
  Matrices matrices(Element::kBF16);
  ExpertsWeights good = weights_of(config, StorageFormat::kBF16, Order::kRows, matrices);
  prepack(config, good, pool);
  const auto expect_none = [&](const ExpertsConfig& c, const auto& change,
                               const std::function<void(int64_t)>& on_expert) {
    ExpertsWeights weights = good;
    change(weights);
    EXPECT_ANY_THROW(prepack(c, weights, pool, on_expert));
    EXPECT_EQ(weights.packed, nullptr);
  };
  const auto nothing = [](ExpertsWeights&) {};
  expect_none(config, [](ExpertsWeights& w) { w.format = StorageFormat::kFp8Block; }, {});
  expect_none(config, [](ExpertsWeights& w) { w.device = {DeviceType::kCuda, 0}; }, {});
  expect_none(config, [](ExpertsWeights& w) { w.up[1].data = nullptr; }, {});
  expect_none(config_of(3, 8, 8, true), nothing, {});
  expect_none(config_of(0, 8, 8, true), nothing, {});
  expect_none(config, nothing, [](int64_t) { throw std::runtime_error("stop"); });
}

TEST(Prepack, SaysWhatItCannotTake) {
  ThreadPool pool(1);
  const ExpertsConfig config = config_of(2, 8, 8, true);
  Matrices matrices(Element::kBF16);
  const ExpertsWeights good = weights_of(config, StorageFormat::kBF16, Order::kRows, matrices);
  const auto attempt = [&](const auto& change) {
    return [&, change] {
      ExpertsWeights weights = good;
      change(weights);
      prepack(config, weights, pool);
    };
  };
  expect_error<InvalidArgument>(
      attempt([](ExpertsWeights& w) { w.format = StorageFormat::kFp8Block; }),
      {"prepack experts", "expected scales beside fp8 values"});
  expect_error<Unsupported>(attempt([](ExpertsWeights& w) {
                              w.device = {DeviceType::kCuda, 1};
                            }),
                            {"prepack experts", "CPU memory", "cuda:1"});
  expect_error<InvalidArgument>(attempt([](ExpertsWeights& w) { w.gate[1].data = nullptr; }),
                                {"prepack experts", "gate of expert 1", "null"});
  expect_error<InvalidArgument>(attempt([](ExpertsWeights& w) { w.down[0].data = nullptr; }),
                                {"prepack experts", "down of expert 0", "null"});
  expect_error<InvalidArgument>(attempt([](ExpertsWeights& w) { w.up.pop_back(); }),
                                {"prepack experts", "up"});
}

TEST(Prepack, WithoutAddressSpaceIsAFailureOfTheDevice) {
  expect_error<DeviceError>([] { HugeArena arena(size_t{1} << 60); },
                            {"could not map", "packed experts", "--prepack off"});
}

}  // namespace
}  // namespace cadre::cpu

// The plan against a stable sort on the host, and the weighted sum against double loops.
#include "backends/cuda/kernels/routing.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <limits>
#include <numeric>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "core/device_runtime.h"

namespace cadre::cuda {
namespace {

constexpr Device kDevice = {DeviceType::kCuda, 0};

class Gpu : public testing::Test {
 protected:
  void SetUp() override {
    DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
    if (runtime == nullptr || runtime->device_count() == 0) GTEST_SKIP() << "needs a GPU";
    runtime_ = runtime;
    stream_ = runtime->make_stream(0, nullptr);
  }
  const Stream& stream() const { return stream_->get(); }

  template <typename T>
  std::shared_ptr<void> to_device(const std::vector<T>& values) {
    auto memory = allocate_shared_memory(kDevice, values.size() * sizeof(T));
    if (!values.empty()) {
      runtime_->copy(memory.get(), values.data(), values.size() * sizeof(T), stream());
      runtime_->synchronize(stream());
    }
    return memory;
  }
  template <typename T>
  std::vector<T> to_host(const void* data, size_t count) {
    std::vector<T> values(count);
    if (count != 0) runtime_->copy(values.data(), data, count * sizeof(T), stream());
    runtime_->synchronize(stream());
    return values;
  }

  DeviceRuntime* runtime_ = nullptr;
  std::unique_ptr<DeviceStream> stream_;
};

struct PlanOnHost {
  std::vector<int32_t> offsets, pair_of_row, row_of_pair;
};

PlanOnHost expected_plan(const std::vector<int64_t>& ids, int64_t num_experts) {
  PlanOnHost plan;
  plan.offsets.assign(static_cast<size_t>(num_experts) + 1, 0);
  plan.row_of_pair.assign(ids.size(), -1);
  plan.pair_of_row.assign(ids.size(), -1);
  for (const int64_t id : ids) {
    if (id >= 0 && id < num_experts) ++plan.offsets[static_cast<size_t>(id) + 1];
  }
  std::partial_sum(plan.offsets.begin(), plan.offsets.end(), plan.offsets.begin());
  std::vector<int32_t> next(plan.offsets.begin(), plan.offsets.end() - 1);
  for (size_t p = 0; p < ids.size(); ++p) {
    if (ids[p] < 0 || ids[p] >= num_experts) continue;
    const int32_t row = next[static_cast<size_t>(ids[p])]++;
    plan.row_of_pair[p] = row;
    plan.pair_of_row[static_cast<size_t>(row)] = static_cast<int32_t>(p);
  }
  return plan;
}

enum class Spread { kEven, kSkewed, kOne, kNone };

class Routing : public Gpu {
 protected:
  std::vector<int64_t> make_ids(int64_t pairs, int64_t experts, Spread spread, bool narrow) {
    const int64_t invalid[] = {-1,
                               experts,
                               experts + 1,
                               std::numeric_limits<int32_t>::max(),
                               narrow ? -7 : int64_t{1} << 32,
                               narrow ? -8 : std::numeric_limits<int64_t>::min()};
    std::vector<int64_t> ids(static_cast<size_t>(pairs));
    for (int64_t& id : ids) {
      const auto draw = static_cast<int64_t>(random_() % 1000003);
      id = draw % experts;
      if (spread == Spread::kSkewed && draw % 4 != 0)
        id = (draw / 7) % std::min<int64_t>(3, experts);
      if (spread == Spread::kOne) id = experts - 1;
      if (spread == Spread::kNone || draw % 11 == 5) id = invalid[draw % 6];
    }
    return ids;
  }

  template <typename Id>
  void check(int64_t tokens, int64_t top_k, int64_t experts, Spread spread, int64_t gap) {
    const int64_t pairs = tokens * top_k;
    const auto ids = make_ids(pairs, experts, spread, sizeof(Id) == 4);
    std::vector<Id> rows(static_cast<size_t>(tokens * (top_k + gap)), Id{0});
    for (int64_t p = 0; p < pairs; ++p) {
      rows[static_cast<size_t>(p / top_k * (top_k + gap) + p % top_k)] =
          static_cast<Id>(ids[static_cast<size_t>(p)]);
    }
    const auto memory = to_device(rows);
    const TensorView index(memory.get(), sizeof(Id) == 4 ? DType::kI32 : DType::kI64,
                           {tokens, top_k}, {top_k + gap, 1}, kDevice);
    const int64_t counters = pairs % 7 * 1000;
    const size_t bytes = routing_plan_bytes(pairs, experts, counters);
    Workspace workspace(kDevice, bytes);
    {
      const Workspace::Scope scope(workspace);
      runtime_->fill(workspace.allocate(bytes), 0x5a, bytes, stream());
    }
    const RoutingPlan plan = plan_routing(index, experts, workspace, stream(), counters);
    EXPECT_LE(workspace.used(), bytes);
    const PlanOnHost expected = expected_plan(ids, experts);
    const auto count = static_cast<size_t>(pairs);
    const auto what = [&] {
      return testing::Message() << "tokens " << tokens << " k " << top_k << " experts " << experts
                                << " spread " << static_cast<int>(spread) << " gap " << gap
                                << " id bytes " << sizeof(Id);
    };
    EXPECT_TRUE(to_host<int32_t>(plan.expert_offsets, expected.offsets.size()) == expected.offsets)
        << what();
    EXPECT_TRUE(to_host<int32_t>(plan.row_of_pair, count) == expected.row_of_pair) << what();
    EXPECT_TRUE(to_host<int32_t>(plan.pair_of_row, count) == expected.pair_of_row) << what();
    const auto num_counters = static_cast<size_t>(counters);
    EXPECT_TRUE(to_host<uint32_t>(plan.counters, num_counters) ==
                std::vector<uint32_t>(num_counters))
        << what();
  }

  std::mt19937_64 random_{7};
};

TEST_F(Routing, IsTheStableSortOfTheValidPairs) {
  const std::pair<int64_t, int64_t> sizes[] = {{0, 8},    {1, 1},    {1, 8},    {3, 2},
                                               {64, 8},   {65, 7},   {256, 8},  {257, 8},
                                               {300, 10}, {2000, 6}, {5000, 8}, {16384, 8}};
  for (const auto& [tokens, top_k] : sizes) {
    for (const int64_t experts : {1, 6, 60, 128, 256, 257, 1025, 2049, 4096}) {
      for (const Spread spread : {Spread::kEven, Spread::kSkewed, Spread::kOne, Spread::kNone}) {
        check<int32_t>(tokens, top_k, experts, spread, 0);
      }
      check<int64_t>(tokens, top_k, experts, Spread::kEven, 3);
    }
  }
}

// Small enough for compute-sanitizer: one block, and the fewest tiles.
TEST_F(Routing, OneBlockAndFewTiles) {
  check<int64_t>(100, 8, 60, Spread::kSkewed, 1);
  check<int32_t>(600, 8, 130, Spread::kEven, 0);
}

TEST_F(Routing, MillionsOfPairs) {
  check<int32_t>(400000, 8, 128, Spread::kEven, 0);
  check<int64_t>(100003, 22, 512, Spread::kSkewed, 1);
}

TEST_F(Routing, TheSameCallGivesTheSameBits) {
  const int64_t experts = 128;
  for (const int64_t pairs : {64, 2048, 131072}) {
    const auto ids = make_ids(pairs, experts, Spread::kEven, false);
    const auto memory = to_device(ids);
    const TensorView index(memory.get(), DType::kI64, {pairs / 8, 8}, kDevice);
    Workspace workspace(kDevice, routing_plan_bytes(pairs, experts));
    std::vector<int32_t> first;
    for (int i = 0; i < 100; ++i) {
      const Workspace::Scope scope(workspace);
      const RoutingPlan plan = plan_routing(index, experts, workspace, stream());
      auto rows = to_host<int32_t>(plan.pair_of_row, static_cast<size_t>(pairs));
      if (i == 0) first = rows;
      ASSERT_TRUE(rows == first) << pairs << " pairs, repetition " << i;
    }
  }
}

// ---- the weighted sum --------------------------------------------------------------------------

std::vector<char> encode(const std::vector<float>& values, DType dtype) {
  std::vector<char> bytes(values.size() * size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto put = [&](auto v) { std::memcpy(bytes.data() + i * sizeof(v), &v, sizeof(v)); };
    if (dtype == DType::kF32) put(values[i]);
    if (dtype == DType::kBF16) put(BFloat16(values[i]));
    if (dtype == DType::kF16) put(Float16(values[i]));
  }
  return bytes;
}

std::vector<float> decode(const std::vector<char>& bytes, DType dtype) {
  std::vector<float> values(bytes.size() / size_of(dtype));
  for (size_t i = 0; i < values.size(); ++i) {
    const auto get = [&](auto v) {
      std::memcpy(&v, bytes.data() + i * sizeof(v), sizeof(v));
      values[i] = static_cast<float>(v);
    };
    if (dtype == DType::kF32) get(float{});
    if (dtype == DType::kBF16) get(BFloat16{});
    if (dtype == DType::kF16) get(Float16{});
  }
  return values;
}

struct CombineCase {
  int64_t tokens, top_k, hidden, gap, shift;  // shift: elements off the alignment of out
  DType y, weights, out;
};

class Combine : public Gpu {
 protected:
  std::vector<float> randoms(size_t count) {
    std::vector<float> values(count);
    for (float& v : values) v = static_cast<float>(random_() % 20001) / 10000.0f - 1.0f;
    return values;
  }

  void check(const CombineCase& c) {
    const auto pairs = static_cast<size_t>(c.tokens * c.top_k);
    const auto hidden = static_cast<size_t>(c.hidden);
    std::vector<int32_t> row_of_pair(pairs);
    std::iota(row_of_pair.begin(), row_of_pair.end(), 0);
    std::shuffle(row_of_pair.begin(), row_of_pair.end(), random_);
    auto weights = randoms(pairs);
    for (size_t p = 0; p < pairs; ++p) {
      if (random_() % 5 != 0) continue;
      row_of_pair[p] = -1;
      weights[p] = std::numeric_limits<float>::quiet_NaN();
    }
    const auto y_bytes = encode(randoms(pairs * hidden), c.y);
    const auto weight_bytes = encode(weights, c.weights);
    const int64_t stride = c.hidden + c.gap;
    const size_t out_count = static_cast<size_t>(c.tokens * stride + c.shift);
    const auto y = to_device(y_bytes);
    const auto w = to_device(weight_bytes);
    const auto rows = to_device(row_of_pair);
    const auto out = to_device(std::vector<char>(out_count * size_of(c.out), '\xff'));
    combine(TensorView(y.get(), c.y, {static_cast<int64_t>(pairs), c.hidden}, kDevice),
            static_cast<const int32_t*>(rows.get()),
            TensorView(w.get(), c.weights, {c.tokens, c.top_k}, kDevice),
            MutableTensorView(
                static_cast<char*>(out.get()) + static_cast<size_t>(c.shift) * size_of(c.out),
                c.out, {c.tokens, c.hidden}, {stride, 1}, kDevice),
            stream());
    compare(c, row_of_pair, decode(y_bytes, c.y), decode(weight_bytes, c.weights),
            to_host<char>(out.get(), out_count * size_of(c.out)));
  }

  void compare(const CombineCase& c, const std::vector<int32_t>& row_of_pair,
               const std::vector<float>& y, const std::vector<float>& weights,
               const std::vector<char>& out_bytes) {
    const auto out = decode(out_bytes, c.out);
    const auto hidden = static_cast<size_t>(c.hidden);
    const double unit = c.out == DType::kF32 ? 1e-6 : c.out == DType::kF16 ? 6e-4 : 4.5e-3;
    const double smallest = c.out == DType::kF16 ? 3.1e-8 : 0;  // half a step of its denormals
    size_t wrong = 0;
    for (size_t i = 0; i < out.size(); ++i) {
      const int64_t at = static_cast<int64_t>(i) - c.shift;
      const int64_t t = at < 0 ? 0 : at / (c.hidden + c.gap);
      const int64_t column = at < 0 ? c.hidden : at % (c.hidden + c.gap);
      if (column >= c.hidden) {  // not the call's memory
        wrong += !std::isnan(out[i]);
        continue;
      }
      double sum = 0;
      double scale = 0;
      for (int64_t s = 0; s < c.top_k; ++s) {
        const auto p = static_cast<size_t>(t * c.top_k + s);
        if (row_of_pair[p] < 0) continue;
        const double part =
            static_cast<double>(weights[p]) *
            y[static_cast<size_t>(row_of_pair[p]) * hidden + static_cast<size_t>(column)];
        sum += part;
        scale += std::abs(part);
      }
      wrong += !(std::abs(out[i] - sum) <= unit * (scale + 1e-6) + smallest);
    }
    EXPECT_EQ(wrong, 0u) << "tokens " << c.tokens << " k " << c.top_k << " hidden " << c.hidden
                         << " gap " << c.gap << " shift " << c.shift << " y " << name_of(c.y)
                         << " weights " << name_of(c.weights) << " out " << name_of(c.out);
  }

  std::mt19937_64 random_{11};
};

TEST_F(Combine, SumsInEveryDtypeSizeAndStride) {
  for (const DType compute : {DType::kF32, DType::kBF16, DType::kF16}) {
    for (const DType y : {DType::kF32, compute}) {
      for (const DType weights : {DType::kF32, compute}) {
        for (const DType out : {DType::kF32, compute}) {
          for (const int64_t hidden : {1, 5, 8, 64, 68, 250, 2048, 2880}) {
            check({9, 2, hidden, 0, 0, y, weights, out});
            check({70, 8, hidden, 8, 0, y, weights, out});
            check({3, 22, hidden, 3, 0, y, weights, out});
            check({5, 3, hidden, 0, 1, y, weights, out});
          }
          check({0, 8, 64, 0, 0, y, weights, out});
        }
      }
    }
  }
}

// All values of y are equal, so that any wrong address within it is a fault of the device only, and
// one that wraps is.
TEST_F(Combine, AddressesBeyond2To31Elements) {
  const int64_t rows = 300000;
  const int64_t hidden = 8192;
  const auto bytes = static_cast<size_t>(rows * hidden * 2);
  if (runtime_->memory(0).free_bytes < 2 * bytes) GTEST_SKIP() << "needs " << 2 * bytes << " bytes";
  const auto y = allocate_shared_memory(kDevice, bytes);
  runtime_->fill(y.get(), 0x3f, bytes, stream());  // 0x3f3f: 0.746...
  const std::vector<int32_t> row_of_pair = {299999, 270000, 0, -1};
  const auto map = to_device(row_of_pair);
  const auto weights = to_device(std::vector<float>{1.0f, 2.0f, 4.0f, 8.0f});
  const auto out = allocate_shared_memory(kDevice, 2 * hidden * sizeof(float));
  combine(TensorView(y.get(), DType::kBF16, {rows, hidden}, kDevice),
          static_cast<const int32_t*>(map.get()),
          TensorView(weights.get(), DType::kF32, {2, 2}, kDevice),
          MutableTensorView(out.get(), DType::kF32, {2, hidden}, kDevice), stream());
  const auto sums = to_host<float>(out.get(), static_cast<size_t>(2 * hidden));
  const float one = decode({0x3f, 0x3f}, DType::kBF16)[0];
  EXPECT_EQ(sums[0], 3 * one);
  EXPECT_EQ(sums[static_cast<size_t>(2 * hidden - 1)], 4 * one);
}

}  // namespace
}  // namespace cadre::cuda

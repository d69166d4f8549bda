// The grouped GEMM against double loops: dtypes, layouts, strides, groups, gates.
#include "backends/cuda/kernels/portable_gemm.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "core/device_runtime.h"

namespace cadre::cuda {
namespace {

constexpr Device kDevice = {DeviceType::kCuda, 0};

void put(char* at, DType dtype, float value) {
  const auto write = [&](auto v) { std::memcpy(at, &v, sizeof(v)); };
  if (dtype == DType::kF32) write(value);
  if (dtype == DType::kBF16) write(BFloat16(value));
  if (dtype == DType::kF16) write(Float16(value));
}

float get(const char* at, DType dtype) {
  float result = 0;
  const auto read = [&](auto v) {
    std::memcpy(&v, at, sizeof(v));
    result = static_cast<float>(v);
  };
  if (dtype == DType::kF32) read(float{});
  if (dtype == DType::kBF16) read(BFloat16{});
  if (dtype == DType::kF16) read(Float16{});
  return result;
}

struct Layout {
  bool transposed = false;
  int64_t row_gap = 0;  // elements beyond a row's own
  int64_t shift = 0;    // elements off alignment, of x and W
  bool table = false;
  int64_t row_step = 1;  // 2: interleaved gate and up
};

struct GemmCase {
  DType dtype = DType::kBF16;
  std::vector<int32_t> rows = {37};  // of each group
  int64_t n = 64, k = 64;
  bool gather = false;
  int64_t top_k = 1;
  bool dual = false;
  bool has_bias = false;
  bool f32_out = true;
  bool accumulate = false;
  bool use_offsets = true;
  int64_t bound = 0;  // of rows beyond the real ones
  int64_t out_gap = 0;
  Layout layout;
  GateFunction gate;
};

class Gemm : public testing::Test {
 protected:
  void SetUp() override {
    runtime_ = find_device_runtime(DeviceType::kCuda);
    if (runtime_ == nullptr || runtime_->device_count() == 0) GTEST_SKIP() << "needs a GPU";
    stream_ = runtime_->make_stream(0, nullptr);
  }

  // Random values of a dtype on the host and the device; what lies in gaps is NaN.
  struct Values {
    DType dtype;
    std::vector<char> host;
    std::shared_ptr<void> device;
    double at(int64_t i) const {
      return get(host.data() + static_cast<size_t>(i) * size_of(dtype), dtype);
    }
    const char* address(int64_t i) const {
      return static_cast<const char*>(device.get()) + static_cast<size_t>(i) * size_of(dtype);
    }
  };
  Values random(DType dtype, int64_t count, float scale) {
    Values v{dtype, std::vector<char>(static_cast<size_t>(count) * size_of(dtype)), nullptr};
    for (int64_t i = 0; i < count; ++i) {
      const float value = (static_cast<float>(random_() % 20001) / 10000.0f - 1.0f) * scale;
      put(v.host.data() + static_cast<size_t>(i) * size_of(dtype), dtype, value);
    }
    upload(v);
    return v;
  }
  void upload(Values& v) { v.device = to_device(v.host.data(), v.host.size()); }
  std::shared_ptr<void> to_device(const void* data, size_t bytes) {
    auto memory = allocate_shared_memory(kDevice, bytes);
    runtime_->copy(memory.get(), data, bytes, stream_->get());
    runtime_->synchronize(stream_->get());
    return memory;
  }

  // Where the element (n, k) of group g lies, with one place for all groups.
  struct Matrices {
    Values values;
    int64_t shift, row_stride, col_stride, group_stride;
    int64_t index(int64_t g, int64_t row, int64_t col) const {
      return shift + g * group_stride + row * row_stride + col * col_stride;
    }
  };
  Matrices make_matrices(const GemmCase& c, float scale) {
    const Layout& l = c.layout;
    const auto groups = static_cast<int64_t>(c.rows.size());
    Matrices m;
    m.shift = l.shift;
    m.row_stride = l.transposed ? 1 : (c.k + l.row_gap) * l.row_step;
    m.col_stride = l.transposed ? c.n + l.row_gap : 1;
    m.group_stride = l.transposed ? c.k * m.col_stride : c.n * m.row_stride;
    m.values = random(c.dtype, l.shift + groups * m.group_stride, scale);
    return m;
  }
  DeviceMatrices on_device(const GemmCase& c, const Matrices& m) {
    DeviceMatrices d;
    d.first = {m.values.address(m.shift), m.row_stride, m.col_stride};
    d.expert_stride = m.group_stride;
    if (!c.layout.table) return d;
    std::vector<DeviceMatrix> table;
    for (size_t g = 0; g < c.rows.size(); ++g) {
      table.push_back(
          {m.values.address(m.index(static_cast<int64_t>(g), 0, 0)), m.row_stride, m.col_stride});
    }
    kept_.push_back(to_device(table.data(), table.size() * sizeof(DeviceMatrix)));
    d.table = static_cast<const DeviceMatrix*>(kept_.back().get());
    d.first = {};
    d.first.data = m.values.address(0);
    return d;
  }

  void check(const GemmCase& c, double bound);

  DeviceRuntime* runtime_ = nullptr;
  std::unique_ptr<DeviceStream> stream_;
  std::vector<std::shared_ptr<void>> kept_;
  std::mt19937 random_{3};
};

double reference_gate(const GateFunction& f, double gate, double up, bool dual) {
  const auto activate = [&](double x) {
    if (f.activation == Activation::kSilu) return x / (1 + std::exp(-x));
    if (f.activation == Activation::kGelu) return 0.5 * x * std::erfc(-x / std::sqrt(2.0));
    return x < 0 ? 0 : x;
  };
  if (!dual) return activate(up);
  if (f.has_limit) {
    gate = std::min<double>(gate, f.limit);
    up = std::max<double>(std::min<double>(up, f.limit), -f.limit);
  }
  if (f.has_alpha) return (up + 1) * gate / (1 + std::exp(-double{f.alpha} * gate));
  return activate(gate) * up;
}

void Gemm::check(const GemmCase& c, double bound) {
  kept_.clear();
  const auto groups = static_cast<int64_t>(c.rows.size());
  std::vector<int32_t> offsets = {0};
  for (const int32_t r : c.rows) offsets.push_back(offsets.back() + r);
  const int64_t rows = offsets.back();
  const int64_t x_stride = c.k + c.layout.row_gap;
  const int64_t x_rows = c.gather ? rows / c.top_k + 1 : rows;
  std::vector<int32_t> pairs(static_cast<size_t>(rows));
  for (int32_t& p : pairs)
    p = static_cast<int32_t>(random_() % static_cast<uint64_t>(x_rows * c.top_k));

  const Values x = random(c.dtype, c.layout.shift + x_rows * x_stride, 1);
  const float scale = 1.5f / std::sqrt(static_cast<float>(c.k));
  const Matrices w = make_matrices(c, scale);
  const Matrices up = make_matrices(c, scale);
  const Values bias = random(DType::kF32, groups * c.n, 0.5f);
  const Values up_bias = random(DType::kBF16, groups * c.n, 0.5f);
  const DType out_dtype = c.f32_out ? DType::kF32 : c.dtype;
  const int64_t out_stride = c.n + c.out_gap;
  Values out = random(out_dtype, (rows + 1) * out_stride, 1);
  const std::vector<char> before = out.host;

  PortableGemm gemm;
  gemm.dtype = c.dtype;
  gemm.num_groups = groups;
  const auto offsets_memory = to_device(offsets.data(), offsets.size() * 4);
  const auto pairs_memory = to_device(pairs.data(), std::max<size_t>(4, pairs.size() * 4));
  if (c.use_offsets) gemm.offsets = static_cast<const int32_t*>(offsets_memory.get());
  gemm.max_rows = rows + c.bound;
  gemm.n = c.n;
  gemm.k = c.k;
  gemm.x = x.address(c.layout.shift);
  gemm.x_stride = x_stride;
  if (c.gather) gemm.pair_of_row = static_cast<const int32_t*>(pairs_memory.get());
  gemm.top_k = c.top_k;
  gemm.w = on_device(c, w);
  if (c.dual) gemm.up_w = on_device(c, up);
  if (c.has_bias) {
    gemm.bias_dtype = DType::kF32;
    gemm.bias = {{bias.address(0), 1}, c.n, nullptr};
    if (c.dual) {  // both in one dtype
      gemm.bias_dtype = DType::kBF16;
      gemm.bias = {{up_bias.address(0), 1}, c.n, nullptr};
      gemm.up_bias = {{up_bias.address(0), 1}, c.n, nullptr};
    }
  }
  gemm.apply_gate = c.dual || !c.gate.has_gate;
  gemm.gate = c.gate;
  gemm.out = const_cast<char*>(out.address(0));
  gemm.out_dtype = out_dtype;
  gemm.out_stride = out_stride;
  gemm.accumulate = c.accumulate;
  portable_gemm(gemm, stream_->get());
  runtime_->copy(out.host.data(), out.device.get(), out.host.size(), stream_->get());
  runtime_->synchronize(stream_->get());

  double difference = 0;
  double norm = 0;
  size_t touched = 0;
  for (int64_t g = 0; g < groups; ++g) {
    for (int64_t r = offsets[static_cast<size_t>(g)]; r < offsets[static_cast<size_t>(g) + 1];
         ++r) {
      const int64_t source = c.gather ? pairs[static_cast<size_t>(r)] / c.top_k : r;
      for (int64_t n = 0; n < c.n; ++n) {
        double sum = 0;
        double up_sum = 0;
        for (int64_t k = 0; k < c.k; ++k) {
          const double value = x.at(c.layout.shift + source * x_stride + k);
          sum += value * w.values.at(w.index(g, n, k));
          if (c.dual) up_sum += value * up.values.at(up.index(g, n, k));
        }
        if (c.has_bias) {
          sum += (c.dual ? up_bias : bias).at(g * c.n + n);
          up_sum += up_bias.at(g * c.n + n);
        }
        if (c.dual) sum = reference_gate(c.gate, sum, up_sum, true);
        if (!c.dual && !c.gate.has_gate) sum = reference_gate(c.gate, 0, sum, false);
        const int64_t at = r * out_stride + n;
        if (c.accumulate) {
          sum += get(before.data() + static_cast<size_t>(at) * size_of(out_dtype), out_dtype);
        }
        const double delta = out.at(at) - sum;
        difference += delta * delta;
        norm += sum * sum;
      }
    }
  }
  for (int64_t r = 0; r <= rows; ++r) {  // nothing else is written
    for (int64_t n = r == rows ? 0 : c.n; n < out_stride; ++n) {
      const auto at = static_cast<size_t>(r * out_stride + n) * size_of(out_dtype);
      touched += std::memcmp(out.host.data() + at, before.data() + at, size_of(out_dtype)) != 0;
    }
  }
  const double error = norm == 0 ? std::sqrt(difference) : std::sqrt(difference / norm);
  EXPECT_TRUE(error <= bound) << "error " << error << " dtype " << name_of(c.dtype) << " groups "
                              << groups << " rows " << rows << " n " << c.n << " k " << c.k
                              << " gather " << c.gather << " dual " << c.dual << " bias "
                              << c.has_bias << " f32 out " << c.f32_out << " transposed "
                              << c.layout.transposed << " gap " << c.layout.row_gap << " shift "
                              << c.layout.shift << " table " << c.layout.table;
  EXPECT_EQ(touched, 0u);
}

// With float32 outputs, products of 16-bit values are exact: only the sums round.
double bound_of(const GemmCase& c) {
  if (c.dtype == DType::kF32) return 1e-6;
  if (c.f32_out) return 3e-6;
  return c.dtype == DType::kBF16 ? 3e-3 : 4e-4;
}

constexpr DType kDTypes[] = {DType::kBF16, DType::kF16, DType::kF32};

TEST_F(Gemm, OneGroupOfEverySize) {
  for (const DType dtype : kDTypes) {
    for (const int64_t rows : {1, 7, 64, 65, 128, 300}) {
      for (const auto& [n, k] : {std::pair<int64_t, int64_t>{1, 1},
                                 {5, 8},
                                 {64, 64},
                                 {128, 96},
                                 {129, 127},
                                 {200, 320},
                                 {33, 1025}}) {
        GemmCase c;
        c.dtype = dtype;
        c.rows = {static_cast<int32_t>(rows)};
        c.n = n;
        c.k = k;
        c.use_offsets = rows % 2 == 0;
        c.accumulate = rows == 65;
        c.f32_out = rows != 7;
        c.out_gap = n % 3;
        check(c, bound_of(c));
      }
    }
  }
}

TEST_F(Gemm, TallTiles) {
  for (const DType dtype : kDTypes) {
    for (const bool dual : {false, true}) {
      GemmCase c;
      c.dtype = dtype;
      c.rows = {500, 130, 0, 129, 300, 1};
      c.n = 2100;
      c.k = 72;
      c.dual = dual;
      c.has_bias = true;
      c.gather = true;
      c.top_k = 4;
      check(c, bound_of(c) * (dual ? 2 : 1));
    }
  }
}

TEST_F(Gemm, GroupsGatherAndGate) {
  for (const DType dtype : kDTypes) {
    for (const bool dual : {false, true}) {
      for (const bool has_bias : {false, true}) {
        for (const bool f32_out : {false, true}) {
          GemmCase c;
          c.dtype = dtype;
          c.rows = {0, 3, 64, 0, 130, 1, 65, 0};
          c.n = 100;
          c.k = 136;
          c.dual = dual;
          c.has_bias = has_bias;
          c.f32_out = f32_out;
          c.gather = true;
          c.top_k = 3;
          c.bound = 500;
          check(c, bound_of(c) * (dual ? 2 : 1));
        }
      }
    }
  }
}

TEST_F(Gemm, ManyGroups) {
  for (const size_t groups : {257u, 1025u, 4096u}) {
    GemmCase c;
    c.rows.assign(groups, 0);
    for (size_t g = 0; g < groups; g += 3) c.rows[g] = static_cast<int32_t>(g % 5);
    c.rows.back() = 2;
    c.n = 24;
    c.k = 16;
    check(c, bound_of(c));
  }
}

TEST_F(Gemm, LayoutsOfAnyStrideAndAlignment) {
  for (const DType dtype : kDTypes) {
    for (const bool dual : {false, true}) {
      for (const Layout& layout : {Layout{true, 0, 0, false, 1}, Layout{false, 3, 0, false, 1},
                                   Layout{false, 8, 1, false, 1}, Layout{false, 0, 0, true, 1},
                                   Layout{true, 5, 3, true, 1}, Layout{false, 0, 0, false, 2}}) {
        GemmCase c;
        c.dtype = dtype;
        c.rows = {5, 0, 70, 12};
        c.n = 90;
        c.k = 104;
        c.dual = dual;
        c.layout = layout;
        c.gather = layout.shift != 0;
        c.top_k = 2;
        check(c, bound_of(c) * (dual ? 2 : 1));
      }
    }
  }
}

TEST_F(Gemm, GateFunctions) {
  for (const GateFunction& gate : {GateFunction{Activation::kGelu, true, false, false, 0, 0},
                                   GateFunction{Activation::kRelu, true, false, false, 0, 0},
                                   GateFunction{Activation::kSilu, true, true, false, 0.5f, 0},
                                   GateFunction{Activation::kSilu, true, true, true, 0.7f, 1.702f},
                                   GateFunction{Activation::kSilu, false, false, false, 0, 0},
                                   GateFunction{Activation::kGelu, false, false, false, 0, 0}}) {
    GemmCase c;
    c.rows = {20, 9};
    c.k = 200;
    c.dual = gate.has_gate;
    c.gate = gate;
    c.has_bias = true;
    check(c, 2 * bound_of(c));
  }
}

// 3 x tf32 in long sums.
TEST_F(Gemm, Float32KeepsItsBoundInLongSums) {
  GemmCase c;
  c.dtype = DType::kF32;
  c.rows = {24};
  c.n = 40;
  c.k = 14336;
  check(c, 1e-6);
}

}  // namespace
}  // namespace cadre::cuda

// matmul() against double loops on the host: every dtype, layout, stride and alignment, with and
// without cuBLASLt (the second ctest entry runs with CADRE_CUBLASLT=off).
#include "backends/cuda/kernels/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "cadre/float16.h"
#include "core/str_cat.h"
#include "support/gpu.h"

namespace cadre::cuda {
namespace {

using test::Gpu;

/// Values of a dtype in a buffer that begins `offset` elements after an aligned address.
class Buffer {
 public:
  Buffer(DType dtype, int64_t count, int64_t offset)
      : offset_(offset), host_(dtype, {count + offset}) {}

  int64_t count() const { return host_->numel() - offset_; }
  void set(int64_t i, float value) {
    i += offset_;
    if (host_->dtype() == DType::kBF16) {
      host_->as<BFloat16>()[i] = BFloat16(value);
    } else if (host_->dtype() == DType::kF16) {
      host_->as<Float16>()[i] = Float16(value);
    } else {
      host_->as<float>()[i] = value;
    }
  }
  double get(int64_t i) const {
    i += offset_;
    if (host_->dtype() == DType::kBF16) return static_cast<float>(host_->as<BFloat16>()[i]);
    if (host_->dtype() == DType::kF16) return static_cast<float>(host_->as<Float16>()[i]);
    return host_->as<float>()[i];
  }
  void fill_random(std::mt19937& random) {
    std::uniform_real_distribution<float> uniform(-1, 1);
    for (int64_t i = 0; i < count(); ++i) set(i, uniform(random));
  }
  void fill(float value) {
    for (int64_t i = 0; i < count(); ++i) set(i, value);
  }
  void upload(const Gpu& gpu) { device_ = gpu.to_device(host_); }
  void download(const Gpu& gpu) { host_ = gpu.to_host(device_); }
  void* on_device() const {
    return static_cast<char*>(device_->mutable_data()) +
           static_cast<size_t>(offset_) * size_of(host_->dtype());
  }
  bool same_bits(const Buffer& other) const {
    return std::memcmp(host_->data(), other.host_->data(), host_->nbytes()) == 0;
  }

 private:
  int64_t offset_;
  Tensor host_;
  Tensor device_;
};

enum class Layout { kRows, kColumns, kPadded, kBothStrides };

struct Case {
  DType dtype = DType::kBF16;
  DType out_dtype = DType::kF32;
  int64_t m = 1;
  int64_t n = 1;
  int64_t k = 1;
  Layout layout = Layout::kRows;
  bool bias = false;
  bool accumulate = false;
  int64_t offset = 0;  // elements from an aligned address
};

std::string to_string(const Case& c) {
  return str_cat(name_of(c.dtype), " -> ", name_of(c.out_dtype), " m ", c.m, " n ", c.n, " k ", c.k,
                 " layout ", static_cast<int>(c.layout), " bias ", c.bias, " accumulate ",
                 c.accumulate, " offset ", c.offset);
}

class Problem {
 public:
  explicit Problem(const Case& c, uint32_t seed = 1)
      : case_(c),
        padding_(c.layout == Layout::kPadded || c.layout == Layout::kBothStrides ? 8 : 0),
        x_(c.dtype, c.m * (c.k + padding_), c.offset),
        w_(c.dtype, w_count(), c.offset),
        bias_(c.dtype, c.n, c.offset),
        out_(c.out_dtype, c.m * (c.n + padding_), c.offset) {
    std::mt19937 random(seed);
    x_.fill_random(random);
    w_.fill_random(random);
    bias_.fill_random(random);
    before_ = out_;
    if (c.accumulate) {
      before_.fill_random(random);
    } else {
      before_.fill(std::numeric_limits<float>::quiet_NaN());
    }
    for (Buffer* b : {&x_, &w_, &bias_}) b->upload(gpu_);
  }

  Matmul args() {
    Matmul a;
    a.dtype = case_.dtype;
    a.m = case_.m;
    a.n = case_.n;
    a.k = case_.k;
    a.x = x_.on_device();
    a.x_stride = case_.k + padding_;
    a.w = {w_.on_device(), row_stride(), col_stride()};
    a.bias = case_.bias ? bias_.on_device() : nullptr;
    a.out = out_.on_device();
    a.out_dtype = case_.out_dtype;
    a.out_stride = case_.n + padding_;
    a.accumulate = case_.accumulate;
    return a;
  }

  void poison() {
    out_ = before_;
    out_.upload(gpu_);
  }
  Buffer run() {
    poison();
    matmul(args(), workspace_, gpu_.stream());
    out_.download(gpu_);
    return out_;
  }
  Buffer downloaded() {
    out_.download(gpu_);
    return out_;
  }

  /// Euclidean, over the whole output; NaN when an element was not written. Infinite when anything
  /// beside it was.
  double error(const Buffer& out) const {
    double difference = 0;
    double norm = 0;
    for (int64_t i = 0; i < case_.m; ++i) {
      for (int64_t j = 0; j < case_.n + padding_; ++j) {
        const int64_t at = i * (case_.n + padding_) + j;
        if (j >= case_.n) {
          const bool same = std::isnan(before_.get(at)) ? std::isnan(out.get(at))
                                                        : out.get(at) == before_.get(at);
          if (!same) return std::numeric_limits<double>::infinity();
          continue;
        }
        const double expected = truth(i, j);
        difference += (out.get(at) - expected) * (out.get(at) - expected);
        norm += expected * expected;
      }
    }
    return std::sqrt(difference / norm);
  }

  const Gpu& gpu() const { return gpu_; }
  Workspace& workspace() { return workspace_; }

 private:
  bool by_columns() const { return case_.layout == Layout::kColumns; }
  int64_t col_stride() const {
    return by_columns() ? case_.n : case_.layout == Layout::kBothStrides ? 2 : 1;
  }
  int64_t row_stride() const { return by_columns() ? 1 : case_.k * col_stride() + padding_; }
  int64_t w_count() const {
    return (case_.n - 1) * row_stride() + (case_.k - 1) * col_stride() + 1;
  }
  double truth(int64_t i, int64_t j) const {
    double sum = 0;
    for (int64_t p = 0; p < case_.k; ++p) {
      sum += x_.get(i * (case_.k + padding_) + p) * w_.get(j * row_stride() + p * col_stride());
    }
    if (case_.bias) sum += bias_.get(j);
    if (case_.accumulate) sum += before_.get(i * (case_.n + padding_) + j);
    return sum;
  }

  Case case_;
  int64_t padding_;
  Buffer x_;
  Buffer w_;
  Buffer bias_;
  Buffer out_;
  Buffer before_{DType::kF32, 0, 0};
  Gpu gpu_;
  Workspace workspace_{Gpu::device(), matmul_workspace_bytes()};
};

double bound(const Case& c) {
  if (c.out_dtype == DType::kBF16) return 4e-3;
  if (c.out_dtype == DType::kF16) return 1e-3;
  return 5e-6;
}

void check(const Case& c) {
  Problem problem(c);
  const Buffer out = problem.run();
  EXPECT_LE(problem.error(out), bound(c)) << to_string(c);
  EXPECT_TRUE(out.same_bits(problem.run())) << to_string(c);
}

std::vector<Case> dtype_cases() {
  std::vector<Case> cases;
  for (const DType dtype : {DType::kBF16, DType::kF16, DType::kF32}) {
    cases.push_back({dtype, DType::kF32});
    if (dtype != DType::kF32) cases.push_back({dtype, dtype});
  }
  return cases;
}

TEST(Matmul, EveryShapeMatchesDoubleLoops) {
  CADRE_REQUIRE_GPU();
  constexpr int64_t kShapes[][3] = {{1, 1, 1},      {1, 64, 64},     {3, 100, 72},
                                    {7, 1, 2048},   {128, 256, 512}, {65, 96, 2048},
                                    {16, 512, 768}, {33, 129, 131}};
  for (Case c : dtype_cases()) {
    for (const auto& shape : kShapes) {
      c.m = shape[0];
      c.n = shape[1];
      c.k = shape[2];
      check(c);
    }
  }
}

TEST(Matmul, EveryLayoutAndAlignmentWithBiasAndSum) {
  CADRE_REQUIRE_GPU();
  for (Case c : dtype_cases()) {
    c.m = 19;
    c.n = 72;
    c.k = 136;
    for (const Layout layout :
         {Layout::kRows, Layout::kColumns, Layout::kPadded, Layout::kBothStrides}) {
      for (const int64_t offset : {0, 1, 4}) {
        for (const bool bias : {false, true}) {
          for (const bool accumulate : {false, true}) {
            if (accumulate && c.out_dtype != DType::kF32) continue;
            c.layout = layout;
            c.offset = offset;
            c.bias = bias;
            c.accumulate = accumulate;
            check(c);
          }
        }
      }
    }
  }
}

// Rows far beyond 2^31 elements from the first: the corners of a product of 10 GB.
TEST(Matmul, LargeOutputsNeedLargeOffsets) {
  CADRE_REQUIRE_GPU();
  constexpr int64_t kRows = 20000;
  constexpr int64_t kColumns = 120000;
  constexpr int64_t kDepth = 8;
  if (Gpu::runtime().memory(0).free_bytes < size_t{12} << 30) GTEST_SKIP() << "needs 12 GiB";
  const Gpu gpu;
  std::mt19937 random(5);
  Buffer x(DType::kBF16, kRows * kDepth, 0);
  Buffer w(DType::kBF16, kColumns * kDepth, 0);
  x.fill_random(random);
  w.fill_random(random);
  x.upload(gpu);
  w.upload(gpu);
  const Tensor out(DType::kF32, {kRows, kColumns}, Gpu::device());
  Workspace workspace(Gpu::device(), matmul_workspace_bytes());
  Matmul args;
  args.m = kRows;
  args.n = kColumns;
  args.k = args.x_stride = kDepth;
  args.x = x.on_device();
  args.w = {w.on_device(), kDepth, 1};
  args.out = out->mutable_data();
  args.out_stride = kColumns;
  matmul(args, workspace, gpu.stream());
  for (const int64_t row : {int64_t{0}, kRows / 2, kRows - 1}) {
    for (const int64_t column : {int64_t{0}, kColumns - 1}) {
      double expected = 0;
      for (int64_t p = 0; p < kDepth; ++p) {
        expected += x.get(row * kDepth + p) * w.get(column * kDepth + p);
      }
      const Tensor value = gpu.to_host(out.view()[row].slice(column, column + 1));
      EXPECT_NEAR(*value->as<float>(), expected, 1e-5) << row << ", " << column;
    }
  }
}

TEST(Matmul, NoRowsNoWork) {
  CADRE_REQUIRE_GPU();
  Problem problem(Case{});
  Matmul args = problem.args();
  args.m = 0;
  args.x = args.out = nullptr;
  EXPECT_NO_THROW(matmul(args, problem.workspace(), problem.gpu().stream()));
}

TEST(Matmul, FirstCallsCanBeRecordedAndReplaysGiveTheSameBits) {
  CADRE_REQUIRE_GPU();
  for (const bool bias : {false, true}) {
    Case c{DType::kBF16, DType::kF32, 5, 344, 248};
    c.bias = bias;
    Problem recorded(c);
    recorded.poison();
    const auto graph = Gpu::runtime().capture(recorded.gpu().stream(), [&] {
      matmul(recorded.args(), recorded.workspace(), recorded.gpu().stream());
    });
    graph->launch(recorded.gpu().stream());
    Buffer replayed = recorded.downloaded();
    EXPECT_LE(recorded.error(replayed), bound(c));
    EXPECT_TRUE(replayed.same_bits(recorded.run()));
  }
}

TEST(Matmul, SaysWhichLibraryServes) {
  const bool found = why_no_cublas_lt().empty();
  EXPECT_EQ(matmul_library().starts_with("cuBLASLt "), found) << matmul_library();
  EXPECT_EQ(matmul_workspace_bytes() > 0, found);
  const char* variable = std::getenv("CADRE_CUBLASLT");
  if (variable != nullptr && std::string(variable) == "off") {
    EXPECT_NE(why_no_cublas_lt().find("CADRE_CUBLASLT is off"), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre::cuda

#include "backends/cpu/kernels/matmul.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/scalars.h"
#include "cadre/error.h"

namespace cadre::cpu {
namespace {

using Bytes = std::vector<unsigned char>;

// Values of a dtype at an odd address, so that every read is unaligned.
class Values {
 public:
  Values(DType dtype, size_t count, uint32_t seed) : dtype_(dtype), bytes_(count * 4 + 1) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal;
    for (size_t i = 0; i < count; ++i) set(i, normal(random));
  }
  void set(size_t i, float value) {
    const size_t size = size_of(dtype_);
    if (dtype_ == DType::kF32) std::memcpy(data() + i * size, &value, size);
    if (dtype_ == DType::kBF16) {
      const BFloat16 v(value);
      std::memcpy(data() + i * size, &v, size);
    }
    if (dtype_ == DType::kF16) {
      const Float16 v(value);
      std::memcpy(data() + i * size, &v, size);
    }
  }
  float get(size_t i) const {
    return read_float(bytes_.data() + 1 + i * size_of(dtype_), element_of(dtype_));
  }
  unsigned char* data() { return bytes_.data() + 1; }

 private:
  DType dtype_;
  Bytes bytes_;
};

float rounded(DType dtype, float value) {
  if (dtype == DType::kBF16) return static_cast<float>(BFloat16(value));
  if (dtype == DType::kF16) return static_cast<float>(Float16(value));
  return value;
}

struct Shape {
  int64_t t, n, k;
};

void product(const MatmulArgs& args, int num_threads) {
  ThreadPool pool(num_threads);
  Workspace workspace(
      {}, matmul_workspace_bytes(args.x.dim(0), args.x.dim(1), args.x.dtype(), num_threads));
  matmul(args, workspace, pool);
  EXPECT_EQ(workspace.used(), 0u);
}

void expect_matches(DType compute, DType stored, DType bias_type, const Shape& s, bool transposed,
                    int64_t step) {
  const auto count = [](int64_t n) { return static_cast<size_t>(n); };
  Values x(compute, count(s.t * s.k), 1), w(stored, count(s.n * s.k * step), 2);
  Values b(bias_type, count(s.n), 3);
  const Dims strides = transposed ? Dims{step, s.n * step} : Dims{s.k * step, step};
  Tensor out(DType::kF32, {s.t, s.n});
  product(
      {TensorView(x.data(), compute, {s.t, s.k}), TensorView(w.data(), stored, {s.n, s.k}, strides),
       TensorView(b.data(), bias_type, {s.n}), out},
      2);
  double error = 0, norm = 0;
  for (int64_t t = 0; t < s.t; ++t) {
    for (int64_t n = 0; n < s.n; ++n) {
      double sum = b.get(count(n));
      for (int64_t k = 0; k < s.k; ++k) {
        sum += double{x.get(count(t * s.k + k))} *
               rounded(compute, w.get(count(n * strides[0] + k * strides[1])));
      }
      error += std::pow(out->as<float>()[t * s.n + n] - sum, 2);
      norm += sum * sum;
    }
  }
  EXPECT_LE(std::sqrt(error / norm), 2e-6)
      << "T, N, K = " << s.t << ", " << s.n << ", " << s.k << "; " << name_of(compute) << " x "
      << name_of(stored) << " transposed " << transposed << " step " << step;
}

constexpr DType kPlain[] = {DType::kF32, DType::kBF16, DType::kF16};

TEST(Matmul, MatchesDoubleForAllDtypesLayoutsAndOddSizes) {
  for (const Shape s : {Shape{1, 1, 1}, Shape{2, 5, 7}, Shape{7, 65, 129}, Shape{13, 130, 300},
                        Shape{3, 200, 1025}, Shape{200, 70, 40}}) {
    for (const DType compute : kPlain) {
      for (const DType stored : kPlain) {
        for (const bool transposed : {false, true}) {
          for (const int64_t step : {1, 2}) {
            expect_matches(compute, stored, DType::kF32, s, transposed, step);
          }
        }
      }
    }
  }
}

TEST(Matmul, ReadsBiasesOfEveryDtype) {
  for (const DType bias : kPlain) {
    expect_matches(DType::kF32, DType::kF32, bias, {3, 70, 20}, false, 1);
  }
}

TEST(Matmul, ARowHasTheSameBitsWhateverTheBatchAndTheThreads) {
  const Shape s{300, 100, 700};
  for (const DType compute : kPlain) {
    Values x(compute, 300 * 700, 1), w(DType::kBF16, 100 * 700, 2);
    const TensorView all(x.data(), compute, {s.t, s.k});
    const TensorView weight(w.data(), DType::kBF16, {s.n, s.k});
    Tensor expected(DType::kF32, {s.t, s.n});
    product({all, weight, {}, expected}, 1);
    for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 64, 193, 300}) {
      for (const int threads : {1, 3}) {
        Tensor out(DType::kF32, {rows, s.n});
        product({all.slice(300 - rows, 300), weight, {}, out}, threads);
        EXPECT_EQ(std::memcmp(out->data(), expected->slice(300 - rows, 300).data(), out->nbytes()),
                  0)
            << rows << " rows, " << threads << " threads, " << name_of(compute);
      }
    }
  }
}

TEST(Matmul, RoundsOnceToTheOutputDtype) {
  for (const DType compute : {DType::kBF16, DType::kF16}) {
    Values x(compute, 4 * 64, 1), w(compute, 70 * 64, 2);
    const MatmulArgs args{
        TensorView(x.data(), compute, {4, 64}), TensorView(w.data(), compute, {70, 64}), {}, {}};
    Tensor wide(DType::kF32, {4, 70}), narrow(compute, {4, 70});
    product({args.x, args.weight, {}, wide}, 1);
    product({args.x, args.weight, {}, narrow}, 1);
    for (int i = 0; i < 4 * 70; ++i) {
      EXPECT_EQ(read_float(narrow->as<uint16_t>() + i, element_of(compute)),
                rounded(compute, wide->as<float>()[i]));
    }
  }
}

TEST(Matmul, KeepsNaNInItsOwnRow) {
  for (const DType compute : kPlain) {
    Values x(compute, 9 * 35, 1), w(compute, 3 * 35, 2);
    for (size_t k = 0; k < 35; ++k) x.set(4 * 35 + k, NAN);  // odd K: row 3 ends where NaN begins
    Tensor out(DType::kF32, {9, 3});
    product(
        {TensorView(x.data(), compute, {9, 35}), TensorView(w.data(), compute, {3, 35}), {}, out},
        1);
    for (int i = 0; i < 27; ++i) EXPECT_EQ(std::isnan(out->as<float>()[i]), i / 3 == 4) << i;
  }
}

TEST(Matmul, WritesNothingForNoRows) {
  Values w(DType::kF32, 6, 1);
  float unused = 0;
  product({TensorView(&unused, DType::kF32, {0, 3}),
           TensorView(w.data(), DType::kF32, {2, 3}),
           {},
           MutableTensorView(&unused, DType::kF32, {0, 2})},
          2);
}

TEST(Matmul, RefusesWhatDoesNotFit) {
  float data[64] = {};
  const auto view = [&](DType dtype, const Dims& shape) {
    return MutableTensorView(data, dtype, shape);
  };
  const auto message = [&](const MatmulArgs& args) -> std::string {
    try {
      product(args, 1);
    } catch (const InvalidArgument& e) {
      return e.what();
    }
    return "";
  };
  const auto f32 = DType::kF32;
  EXPECT_NE(message({view(f32, {2, 3}), view(f32, {4, 5}), {}, view(f32, {2, 4})})
                .find("weight: float32 [4, 5]"),
            std::string::npos);
  EXPECT_NE(message({view(f32, {2, 3}), view(f32, {4, 3}), view(f32, {3}), view(f32, {2, 4})})
                .find("bias [N]"),
            std::string::npos);
  EXPECT_NE(
      message({view(f32, {2, 3}), view(DType::kI32, {4, 3}), {}, view(f32, {2, 4})}).find("int32"),
      std::string::npos);
  EXPECT_NE(message({view(f32, {2, 3}), view(f32, {4, 3}), {}, view(DType::kBF16, {2, 4})})
                .find("out in float32"),
            std::string::npos);
}

}  // namespace
}  // namespace cadre::cpu

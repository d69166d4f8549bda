// Products of quantised weights against float64 that rounds where the recipe rounds, on the
// instruction set in use.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backends/cpu/kernels/matmul.h"
#include "backends/cpu/kernels/scalars.h"
#include "cadre/error.h"
#include "cadre/float16.h"
#include "conformance/guarded_buffer.h"
#include "quant/activations.h"
#include "support/expect_error.h"

namespace cadre::cpu {
namespace {

using test::GuardedBuffer;

struct Format {
  DType values;
  ScaleLayout layout;
  ActivationScheme activations = ActivationScheme::kNone;
};

int64_t blocks(int64_t n, int64_t block) { return block == 0 ? 1 : (n + block - 1) / block; }
size_t count_of(int64_t n) { return static_cast<size_t>(n); }

// A product with random codes; weights and scales end where memory ends.
class Case {
 public:
  Case(const Format& format, DType compute, int64_t t, int64_t n, int64_t k)
      : format_(format),
        compute_(compute),
        t_(t),
        n_(n),
        k_(k),
        row_bytes_(format.values == DType::kI8 ? (k + 1) / 2 : k),
        scale_cols_(blocks(k, format.layout.block_cols)),
        scale_count_(blocks(n, format.layout.block_rows) * scale_cols_),
        x_(count_of(t * k) * size_of(compute)),
        codes_(count_of(n * row_bytes_)),
        scales_(count_of(scale_count_) * size_of(format.layout.dtype)) {
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < t * k; ++i) set_x(i, normal(random_));
    for (int64_t i = 0; i < n * row_bytes_; ++i) {
      uint8_t code;
      do code = static_cast<uint8_t>(random_());
      while ((code & 0x7f) == 0x7f && format.values == DType::kF8E4M3);
      codes_.data()[i] = static_cast<char>(code);
    }
    for (int64_t i = 0; i < scale_count_; ++i) {
      const float scale = 0.01f + 0.001f * static_cast<float>(random_() % 64);
      const auto exponent = static_cast<uint8_t>(120 + random_() % 12);
      char* at = scales_.data() + i * static_cast<int64_t>(size_of(format.layout.dtype));
      if (format.layout.dtype == DType::kF32) {
        std::memcpy(at, &scale, sizeof scale);
      } else {
        *at = static_cast<char>(exponent);
      }
    }
  }

  void set_x(int64_t i, float value) {
    char* at = x_.data() + i * static_cast<int64_t>(size_of(compute_));
    const BFloat16 bf16(value);
    const Float16 f16(value);
    if (compute_ == DType::kF32) std::memcpy(at, &value, 4);
    if (compute_ == DType::kBF16) std::memcpy(at, &bf16, 2);
    if (compute_ == DType::kF16) std::memcpy(at, &f16, 2);
  }
  float x(int64_t i) const {
    return read_float(x_.data() + i * static_cast<int64_t>(size_of(compute_)), element_of_x());
  }

  MatmulArgs args(int64_t begin, int64_t end, const MutableTensorView& out) const {
    MatmulArgs args;
    args.x = TensorView(x_.data(), compute_, {t_, k_}).slice(begin, end);
    args.weight = TensorView(codes_.data(), format_.values, {n_, row_bytes_});
    args.out = out;
    args.scales =
        TensorView(scales_.data(), format_.layout.dtype, {scale_count_ / scale_cols_, scale_cols_});
    args.scale_layout = format_.layout;
    args.activations = format_.activations;
    args.input_scale = kInputScale;
    return args;
  }

  std::vector<float> run(int64_t begin, int64_t end, int num_threads) const {
    ThreadPool pool(num_threads);
    Tensor out(DType::kF32, {end - begin, n_});
    Workspace workspace({}, matmul_workspace_bytes(end - begin, k_, compute_, num_threads));
    matmul(args(begin, end, out), workspace, pool);
    return {out->as<float>(), out->as<float>() + (end - begin) * n_};
  }

  double weight(int64_t n, int64_t k) const {
    const ScaleLayout& layout = format_.layout;
    const auto byte = [&](const GuardedBuffer& from, int64_t i) {
      return static_cast<uint8_t>(from.data()[i]);
    };
    const int64_t at = (layout.block_rows == 0 ? 0 : n / layout.block_rows) * scale_cols_ +
                       (layout.block_cols == 0 ? 0 : k / layout.block_cols);
    float scale;
    if (layout.dtype == DType::kF32) {
      std::memcpy(&scale, scales_.data() + at * 4, 4);
    } else {
      scale = e8m0_to_float(byte(scales_, at));
    }
    if (format_.values == DType::kF8E4M3) {
      return double{scale} * e4m3_to_float(byte(codes_, n * row_bytes_ + k));
    }
    const uint8_t two = byte(codes_, n * row_bytes_ + k / 2);
    return double{scale} * e2m1_to_float(static_cast<uint8_t>(k % 2 == 0 ? two : two >> 4));
  }

  // Row t as it enters the product.
  std::vector<double> activations(int64_t t) const {
    std::vector<float> row(count_of(k_));
    for (int64_t i = 0; i < k_; ++i) row[count_of(i)] = x(t * k_ + i);
    std::vector<double> result(row.begin(), row.end());
    if (format_.activations == ActivationScheme::kNone) return result;
    const int64_t group = format_.values == DType::kI8 ? kFp4ActivationGroup : kActivationGroup;
    std::vector<uint8_t> codes(row.size());
    std::vector<float> scales(count_of(blocks(k_, group)), kInputScale);
    if (format_.activations == ActivationScheme::kStatic) {
      quantize_activations(row.data(), k_, kInputScale, codes.data());
    } else {
      quantize_activations(row.data(), k_, group, codes.data(), scales.data());
    }
    for (int64_t i = 0; i < k_; ++i) {
      result[count_of(i)] = double{scales[count_of(i / group)]} * e4m3_to_float(codes[count_of(i)]);
    }
    return result;
  }

  double error(const std::vector<float>& out) const {
    double error = 0, norm = 0;
    std::vector<double> w(count_of(k_));
    std::vector<std::vector<double>> rows;
    for (int64_t t = 0; t < t_; ++t) rows.push_back(activations(t));
    for (int64_t n = 0; n < n_; ++n) {
      for (int64_t i = 0; i < k_; ++i) w[count_of(i)] = weight(n, i);
      for (int64_t t = 0; t < t_; ++t) {
        double sum = 0;
        for (int64_t i = 0; i < k_; ++i) sum += w[count_of(i)] * rows[count_of(t)][count_of(i)];
        error += std::pow(out[count_of(t * n_ + n)] - sum, 2);
        norm += sum * sum;
      }
    }
    return std::sqrt(error / norm);
  }

 private:
  static constexpr float kInputScale = 0.02f;
  Element element_of_x() const {
    return compute_ == DType::kF32    ? Element::kF32
           : compute_ == DType::kBF16 ? Element::kBF16
                                      : Element::kF16;
  }

  Format format_;
  DType compute_;
  int64_t t_, n_, k_, row_bytes_, scale_cols_, scale_count_;
  std::mt19937 random_{11};
  GuardedBuffer x_, codes_, scales_;
};

std::vector<Format> formats() {
  std::vector<Format> all;
  const DType fp8 = DType::kF8E4M3, f32 = DType::kF32, e8m0 = DType::kF8E8M0;
  for (const ActivationScheme scheme :
       {ActivationScheme::kNone, ActivationScheme::kDynamic, ActivationScheme::kStatic}) {
    for (const ScaleLayout& layout : {ScaleLayout{f32, 128, 128},
                                      {e8m0, 128, 128},
                                      {f32, 96, 96},
                                      {f32, 1, 128},
                                      {f32, 0, 0},
                                      {f32, 64, 32},
                                      {f32, 5, 7},
                                      {e8m0, 3, 50},
                                      {f32, 16, 256}}) {
      all.push_back({fp8, layout, scheme});
    }
  }
  all.push_back({fp8, {e8m0, 1, 32}});
  all.push_back({DType::kI8, {e8m0, 1, 32}});
  all.push_back({DType::kI8, {e8m0, 1, 32}, ActivationScheme::kDynamic});
  return all;
}

std::string describe(const Format& f) {
  return std::string(name_of(f.values)) + " scales " + std::string(name_of(f.layout.dtype)) + " " +
         std::to_string(f.layout.block_rows) + " x " + std::to_string(f.layout.block_cols) +
         " activations " + std::to_string(static_cast<int>(f.activations));
}

constexpr DType kCompute[] = {DType::kF32, DType::kBF16, DType::kF16};

TEST(QuantizedMatmul, MatchesDoubleForEveryFormatAndSize) {
  struct Shape {
    int64_t t, n, k;
  };
  for (const Format& format : formats()) {
    for (const Shape s : {Shape{1, 1, 1},
                          {2, 64, 64},
                          {3, 5, 7},
                          {7, 96, 160},
                          {13, 130, 321},
                          {1, 192, 576},
                          {40, 65, 129},
                          {2, 100, 2200},
                          {200, 70, 40}}) {
      for (const DType compute : kCompute) {
        const Case c(format, compute, s.t, s.n, s.k);
        EXPECT_LE(c.error(c.run(0, s.t, 2)), 2e-6)
            << describe(format) << " " << name_of(compute) << " T, N, K = " << s.t << ", " << s.n
            << ", " << s.k;
      }
    }
  }
}

TEST(QuantizedMatmul, ARowHasTheSameBitsWhateverTheBatchAndTheThreads) {
  for (const Format& format : formats()) {
    for (const DType compute : {DType::kF32, DType::kBF16}) {
      const Case c(format, compute, 200, 70, 333);
      const std::vector<float> all = c.run(0, 200, 1);
      for (const int64_t rows : {1, 2, 3, 4, 5, 6, 7, 12, 13, 24, 193}) {
        const std::vector<float> some = c.run(200 - rows, 200, rows % 2 == 0 ? 3 : 1);
        EXPECT_EQ(std::memcmp(some.data(), all.data() + (200 - rows) * 70, some.size() * 4), 0)
            << describe(format) << " " << name_of(compute) << " rows " << rows;
      }
    }
  }
}

TEST(QuantizedMatmul, ManyRowsPassThroughBoundedMemory) {
  const Case c({DType::kF8E4M3, {DType::kF32, 128, 128}, ActivationScheme::kDynamic}, DType::kBF16,
               40, 3, 131072);
  const std::vector<float> all = c.run(0, 40, 2);
  EXPECT_LE(c.error(all), 2e-6);
  EXPECT_LT(matmul_workspace_bytes(1 << 20, 4096, DType::kF32, 1), size_t{8} << 20);
}

TEST(QuantizedMatmul, KeepsNaNInItsOwnRow) {
  for (const Format& format : formats()) {
    for (const float special : {NAN, std::numeric_limits<float>::infinity()}) {
      for (const DType compute : kCompute) {
        Case c(format, compute, 9, 3, 35);
        c.set_x(4 * 35 + 34, special);
        const std::vector<float> out = c.run(0, 9, 1);
        for (int64_t i = 0; i < 27; ++i) {
          if (i / 3 == 4) continue;
          EXPECT_TRUE(std::isfinite(out[count_of(i)])) << describe(format);
        }
      }
    }
  }
}

TEST(QuantizedMatmul, SaysWhatDoesNotFit) {
  const Case c({DType::kF8E4M3, {DType::kF32, 128, 128}}, DType::kF32, 2, 130, 129);
  Tensor out(DType::kF32, {2, 130});
  const auto attempt = [&](const auto& change) {
    return [&, change] {
      MatmulArgs args = c.args(0, 2, out);
      change(args);
      ThreadPool pool(1);
      Workspace workspace({}, matmul_workspace_bytes(2, 129, DType::kF32, 1));
      matmul(args, workspace, pool);
    };
  };
  test::expect_error<InvalidArgument>(
      attempt([](MatmulArgs& a) { a.scale_layout.block_cols = 64; }),
      {"matmul", "block of 128 x 64", "scales"});
  test::expect_error<InvalidArgument>(
      attempt([](MatmulArgs& a) { a.scale_layout.dtype = DType::kBF16; }),
      {"matmul", "float32 or float8_e8m0 scales"});
  test::expect_error<InvalidArgument>(attempt([](MatmulArgs& a) {
                                        a.activations = ActivationScheme::kStatic;
                                        a.input_scale = 0;
                                      }),
                                      {"matmul", "positive input scale"});
}

}  // namespace
}  // namespace cadre::cpu

// Products against double loops on the host: few rows (our own kernels) and more.
#include <cmath>

#include "backends/cuda/dense/ops_fixture.h"

namespace cadre::cuda {
namespace {

using test::to_doubles;

class GpuLinear : public GpuOpsTest {
 protected:
  static std::vector<double> reference(const TensorView& x, const TensorView& weight,
                                       const TensorView& bias) {
    const auto a = to_doubles(x);
    const auto w = to_doubles(weight);
    const auto rows = static_cast<size_t>(x.dim(0));
    const auto n = static_cast<size_t>(weight.dim(0));
    const auto k = static_cast<size_t>(x.dim(1));
    std::vector<double> result(rows * n);
    const std::vector<double> b = bias ? to_doubles(bias) : std::vector<double>(n, 0);
    for (size_t i = 0; i < rows; ++i) {
      for (size_t j = 0; j < n; ++j) {
        double sum = b[j];
        for (size_t l = 0; l < k; ++l) sum += a[i * k + l] * w[j * k + l];
        result[i * n + j] = sum;
      }
    }
    return result;
  }
  static double limit(DType out, DType dtype) {
    return std::max(bound(out), dtype == DType::kF32 ? 1e-6 : 2e-6);
  }
};

struct Size {
  int64_t rows, n, k;
};

TEST_F(GpuLinear, EveryNumberOfRowsWithAndWithoutBias) {
  for (const DType dtype : kComputeDtypes) {
    for (const Size& s : {Size{1, 9, 130},
                          {1, 512, 2048},
                          {2, 40, 776},
                          {3, 17, 31},
                          {5, 8, 4096},
                          {8, 130, 1024},
                          {9, 33, 520},
                          {16, 24, 2304},
                          {17, 50, 264},
                          {31, 7, 7},
                          {32, 100, 768},
                          {33, 129, 320},
                          {64, 65, 200},
                          {130, 96, 1032}}) {
      const Tensor x = random(dtype, {s.rows, s.k});
      const Tensor weight = random(dtype, {s.n, s.k});
      const Tensor bias = random(dtype, {s.n});
      const Tensor gpu_x = to_gpu(x.view());
      const Tensor gpu_weight = to_gpu(weight.view());
      const Tensor gpu_bias = to_gpu(bias.view());
      for (const bool has_bias : {false, true}) {
        const TensorView b = has_bias ? TensorView(bias.view()) : TensorView();
        const auto expected = reference(x.view(), weight.view(), b);
        for (const DType out_dtype : {dtype, DType::kF32}) {
          const Tensor out = poisoned(out_dtype, {s.rows, s.n});
          const LinearWeights weights{gpu_weight.view(),
                                      has_bias ? TensorView(gpu_bias.view()) : TensorView()};
          ops_->linear(gpu_x.view(), weights, out, *workspace_, stream_);
          const double error = test::relative_error(values(out.view()), expected);
          EXPECT_LE(error, limit(out_dtype, dtype))
              << name_of(dtype) << " " << s.rows << " " << s.n << " " << s.k;
          const auto once = bits(out.view());
          poison(out);
          ops_->linear(gpu_x.view(), weights, out, *workspace_, stream_);
          EXPECT_EQ(bits(out.view()), once);
        }
      }
    }
  }
}

TEST_F(GpuLinear, UnalignedBasesAndStrides) {
  for (const DType dtype : {DType::kBF16, DType::kF32}) {
    for (const int64_t rows : {1, 7, 20}) {
      const int64_t k = 256;
      const int64_t n = 30;
      const Tensor x = random(dtype, {rows * (k + 1) + 1});
      const Tensor weight = random(dtype, {n * (k + 3) + 1});
      const Tensor gpu_x = to_gpu(x.view());
      const Tensor gpu_weight = to_gpu(weight.view());
      const auto view = [&](const Tensor& t, int64_t count, int64_t stride, Device device) {
        return TensorView(static_cast<const std::byte*>(t->data()) + size_of(dtype), dtype,
                          {count, k}, {stride, 1}, device);
      };
      const Tensor out = poisoned(DType::kF32, {rows, n});
      ops_->linear(view(gpu_x, rows, k + 1, kGpu), {view(gpu_weight, n, k + 3, kGpu), {}}, out,
                   *workspace_, stream_);
      expect_near(out.view(), reference(view(x, rows, k + 1, {}), view(weight, n, k + 3, {}), {}),
                  2e-6);
    }
  }
}

TEST_F(GpuLinear, AGroupSharesItsRows) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t rows : {1, 6, 12, 30, 50}) {
      const int64_t k = 512;
      const int64_t sizes[] = {70, 8, 9, 33, 24};
      const Tensor x = random(dtype, {rows, k});
      std::vector<Tensor> weights, biases, gpu, outs;
      std::vector<LinearWeights> linear;
      std::vector<MutableTensorView> views;
      for (const int64_t n : sizes) {
        weights.push_back(random(dtype, {n, k}));
        gpu.push_back(to_gpu(weights.back().view()));
        linear.push_back({gpu.back().view(), {}});
        outs.push_back(poisoned(n % 2 == 0 ? dtype : DType::kF32, {rows, n}));
        views.push_back(outs.back());
      }
      std::vector<const LinearWeights*> pointers;
      for (const LinearWeights& l : linear) pointers.push_back(&l);
      ops_->linear_group(to_gpu(x.view()).view(), pointers, views, *workspace_, stream_);
      for (size_t i = 0; i < outs.size(); ++i) {
        expect_near(outs[i].view(), reference(x.view(), weights[i].view(), {}),
                    limit(outs[i]->dtype(), dtype));
      }
    }
  }
}

TEST_F(GpuLinear, AddsToTheResidual) {
  for (const DType dtype : kComputeDtypes) {
    for (const int64_t rows : {1, 4, 15, 32, 70}) {
      const Tensor x = random(dtype, {rows, 1000});
      const Tensor weight = random(dtype, {90, 1000});
      const Tensor bias = random(dtype, {90});
      const Tensor y = random(DType::kF32, {rows, 90});
      const Tensor gpu = to_gpu(y.view());
      const Tensor gpu_weight = to_gpu(weight.view());
      const Tensor gpu_bias = to_gpu(bias.view());
      ops_->linear_add(to_gpu(x.view()).view(), {gpu_weight.view(), gpu_bias.view()}, gpu,
                       *workspace_, stream_);
      std::vector<double> expected = reference(x.view(), weight.view(), bias.view());
      const auto before = to_doubles(y.view());
      for (size_t i = 0; i < expected.size(); ++i) expected[i] += before[i];
      expect_near(gpu.view(), expected, 2e-6);
    }
  }
}

TEST_F(GpuLinear, ARowOfNaNStaysAlone) {
  for (const int64_t rows : {3, 20}) {
    const Tensor x = random(DType::kBF16, {rows, 300});
    for (int64_t i = 0; i < 300; ++i) set(x, 300 + i, NAN);
    const Tensor weight = random(DType::kBF16, {40, 300});
    const Tensor out = poisoned(DType::kF32, {rows, 40});
    ops_->linear(to_gpu(x.view()).view(), {to_gpu(weight.view()).view(), {}}, out, *workspace_,
                 stream_);
    const auto got = values(out.view());
    for (size_t i = 0; i < got.size(); ++i) EXPECT_EQ(std::isnan(got[i]), i / 40 == 1) << i;
  }
}

TEST_F(GpuLinear, NoRowsAndNoColumns) {
  const Tensor weight = to_gpu(random(DType::kBF16, {8, 64}).view());
  const Tensor none(DType::kBF16, {0, 64}, kGpu);
  const Tensor out(DType::kF32, {0, 8}, kGpu);
  ops_->linear(none.view(), {weight.view(), {}}, out, *workspace_, stream_);
  runtime_->synchronize(stream_);
}

}  // namespace
}  // namespace cadre::cuda

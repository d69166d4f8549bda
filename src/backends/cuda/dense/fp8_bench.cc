// Times of products with FP8 weights (blocks of 128 x 128, dynamic activations), bf16 ones and
// cuBLASLt's e4m3 product beside them, from replayed graphs over rotating weights; the two ways of
// few and of many rows each on its own where either may win. Built by its own target: ninja
// cuda_fp8_bench.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <numeric>
#include <optional>
#include <string_view>
#include <thread>

#include "backends/cuda/dense/bench_fixture.h"
#include "backends/cuda/dense/quantized_linear.h"
#include "backends/cuda/device/check.h"
#include "backends/cuda/kernels/lt_fp8.h"
#include "dense/ceilings.h"
#include "quant/float8.h"

namespace {

using namespace cadre;
using namespace cadre::cuda;

struct Shape {
  const char* name;
  std::vector<int64_t> n;  // of weights that share x
  int64_t k;
  bool add;  // to float32
};

constexpr int64_t kManyRows = 512;

// After large products clocks are low for a while.
void rest() { std::this_thread::sleep_for(std::chrono::milliseconds(60)); }

double read_ceiling(Bench& bench) {
  const Tensor memory = bench.random(DType::kBF16, {256 << 20});
  double best = 0;
  for (int i = 0; i < 3; ++i) {
    const Ceilings& ceilings = ceilings_of(DeviceType::kCuda);
    for (size_t way = 0; way < ceilings.ways_of_reading().size(); ++way) {
      best = std::max(best, ceilings.read_bandwidth(memory.view(), way, bench.stream()));
    }
  }
  return best;
}

class ShapeBench {
 public:
  ShapeBench(Bench& bench, const Shape& shape, double read)
      : bench_(bench), shape_(shape), read_(read) {
    total_ = std::accumulate(shape.n.begin(), shape.n.end(), int64_t{0});
    sets_ = static_cast<int>(std::clamp(200e6 / static_cast<double>(total_ * shape.k), 2.0, 64.0));
    for (int s = 0; s < sets_; ++s) {
      for (const int64_t n : shape.n) {
        codes_.push_back(random_codes(n, shape.k));
        scales_.push_back(
            bench.random(DType::kF32, {(n + 127) / 128, (shape.k + 127) / 128}, 0.01f));
        plain_.push_back(bench.random(DType::kBF16, {n, shape.k}, 0.02f));
        LinearWeights w;
        w.weight = codes_.back().view();
        w.scales = scales_.back().view();
        w.scale_layout = {DType::kF32, 128, 128};
        w.activations = ActivationScheme::kDynamic;
        fp8_.push_back(w);
        LinearWeights p;
        p.weight = plain_.back().view();
        bf16_.push_back(p);
      }
    }
  }

  void run(int64_t rows) {
    rows_ = rows;
    x_ = bench_.random(DType::kBF16, {rows, shape_.k});
    outs_.clear();
    views_.clear();
    for (const int64_t n : shape_.n) {
      outs_.push_back(bench_.random(shape_.add ? DType::kF32 : DType::kBF16, {rows, n}));
      views_.push_back(outs_.back());
    }
    const int copies = rows > kManyRows ? 8 : 2 * sets_;
    const double flops = 2.0 * static_cast<double>(rows * total_ * shape_.k);
    const double floor = static_cast<double>(total_ * shape_.k) / read_ * 1e6;
    if (rows > kManyRows) rest();
    const double bf16 = bench_.us(copies, [&](int i) { ops(bf16_, i); });
    if (rows > kManyRows) rest();
    const double fp8 = bench_.us(copies, [&](int i) { ops(fp8_, i); });
    std::printf("%-14s M=%-5ld bf16 %8.2f us | fp8 %8.2f us, x floor %5.2f, %6.0f TFLOP/s",
                shape_.name, static_cast<long>(rows), bf16, fp8, fp8 / floor, flops / fp8 * 1e-6);
    if (rows <= kManyRows) {
      std::printf(" | rows %8.2f", bench_.us(copies, [&](int i) {
        const Workspace::Scope scope(bench_.workspace());
        CodesOfX codes(x_view(), bench_.workspace(), bench_.stream());
        fp8_linear_rows(codes, x_.view(), set(fp8_, i), views_, shape_.add, bench_.stream());
      }));
    }
    if (rows > kManyRows) rest();
    const double gemm = bench_.us(copies, [&](int i) {
      const Workspace::Scope scope(bench_.workspace());
      CodesOfX codes(x_view(), bench_.workspace(), bench_.stream());
      gemms(codes, i);
    });
    std::printf(" | gemm %8.2f", gemm);
    if (rows > kManyRows) {
      rest();
      const double quantised = bench_.us(copies, [&](int) {
        const Workspace::Scope scope(bench_.workspace());
        CodesOfX codes(x_view(), bench_.workspace(), bench_.stream());
        HopperFp8Gemm product;
        codes.set(product, 1);
      });
      const double alone = gemm - quantised;
      const double lt = library(copies, true);
      std::printf(
          ", products %8.2f (%5.0f TFLOP/s) | cuBLASLt %8.2f (%5.0f), exact sums %8.2f: %4.2f",
          alone, flops / alone * 1e-6, lt, flops / lt * 1e-6, library(copies, false), lt / alone);
    }
    std::printf("\n");
  }

 private:
  Tensor random_codes(int64_t n, int64_t k) {
    if (!pool_) {
      constexpr int64_t kCount = 1 << 20;
      const Tensor host(DType::kU8, {kCount});
      std::mt19937 engine(5);
      std::normal_distribution<float> normal(0, 112);
      for (int64_t i = 0; i < kCount; ++i) host->as<uint8_t>()[i] = float_to_e4m3(normal(engine));
      pool_ = Tensor(DType::kU8, {kCount}, kGpu);
      copy_tensor(host.view(), pool_, bench_.stream());
      synchronize(bench_.stream());
    }
    const Tensor tensor(DType::kF8E4M3, {n, k}, kGpu);
    DeviceRuntime& runtime = device_runtime(kGpu);
    const auto bytes = static_cast<size_t>(n * k);
    const size_t piece = pool_->nbytes() / 2;
    auto* to = static_cast<std::byte*>(tensor->mutable_data());
    for (size_t done = 0; done < bytes; done += piece) {
      const size_t from = 4096 * (++pieces_ % 97);
      runtime.copy(to + done, static_cast<const std::byte*>(pool_->data()) + from,
                   std::min(piece, bytes - done), bench_.stream());
    }
    synchronize(bench_.stream());
    return tensor;
  }

  const TensorView& x_view() {
    x_of_codes_ = x_.view();
    return x_of_codes_;
  }
  std::vector<const LinearWeights*> set(const std::vector<LinearWeights>& all, int i) const {
    std::vector<const LinearWeights*> result;
    for (size_t w = 0; w < shape_.n.size(); ++w) {
      result.push_back(&all[static_cast<size_t>(i % sets_) * shape_.n.size() + w]);
    }
    return result;
  }
  void ops(const std::vector<LinearWeights>& all, int i) {
    const auto weights = set(all, i);
    if (shape_.add) {
      bench_.ops().linear_add(x_.view(), *weights[0], views_[0], bench_.workspace(),
                              bench_.stream());
    } else {
      bench_.ops().linear_group(x_.view(), weights, views_, bench_.workspace(), bench_.stream());
    }
  }
  void gemms(CodesOfX& codes, int i) {
    fp8_linear_gemms(codes, x_of_codes_, set(fp8_, i), views_, shape_.add, bench_.workspace(),
                     bench_.stream());
  }
  double library(int copies, bool fast) {
    rest();
    constexpr size_t kSpace = size_t{64} << 20;
    const Workspace::Scope scope(bench_.workspace());
    const Tensor a = random_codes(rows_, shape_.k);
    const Tensor out(DType::kBF16, {rows_, *std::max_element(shape_.n.begin(), shape_.n.end())},
                     kGpu);
    void* space = bench_.workspace().allocate(kSpace);
    std::vector<LtFp8> products;
    for (const int64_t n : shape_.n) {
      products.emplace_back(rows_, n, shape_.k, space, kSpace, fast);
      if (!products.back().ready()) return std::nan("");
    }
    return bench_.us(copies, [&](int i) {
      const auto weights = set(fp8_, i);
      for (size_t w = 0; w < products.size(); ++w) {
        products[w].run(a->data(), weights[w]->weight.data(), out->mutable_data(),
                        stream_of(bench_.stream()));
      }
    });
  }

  Bench& bench_;
  Shape shape_;
  double read_;
  int64_t total_ = 0;
  int sets_ = 0;
  int64_t rows_ = 0;
  Tensor pool_, x_;
  size_t pieces_ = 0;
  TensorView x_of_codes_;
  std::vector<Tensor> codes_, scales_, plain_, outs_;
  std::vector<MutableTensorView> views_;
  std::vector<LinearWeights> fp8_, bf16_;
};

}  // namespace

// Argument: "few" for few rows alone.
int main(int argc, char** argv) {
  const bool few_alone = argc > 1 && std::string_view(argv[1]) == "few";
  Bench bench;
  const double read = read_ceiling(bench);
  std::printf("read ceiling %.2f TB/s\n", read * 1e-12);
  const Shape shapes[] = {{"q,k,v", {4096, 512, 512}, 2048, false},
                          {"o", {2048}, 4096, true},
                          {"q", {4096}, 2048, false},
                          {"k", {512}, 2048, false},
                          {"gate,up 7168", {2048, 2048}, 7168, false},
                          {"18432 x 7168", {18432}, 7168, false},
                          {"7168 x 16384", {7168}, 16384, true},
                          {"square", {8192}, 8192, false}};
  std::vector<std::unique_ptr<ShapeBench>> benches;
  for (const Shape& shape : shapes) {
    benches.push_back(std::make_unique<ShapeBench>(bench, shape, read));
    for (const int64_t rows : {1, 4, 8, 16, 24, 32, 64, 256}) benches.back()->run(rows);
  }
  for (const auto& b : benches) {
    if (few_alone) break;
    for (const int64_t rows : {1024, 8192}) b->run(rows);
  }
  std::printf("read ceiling %.2f TB/s\n", (rest(), read_ceiling(bench)) * 1e-12);
  return 0;
}

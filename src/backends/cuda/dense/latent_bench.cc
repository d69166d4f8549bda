// Times of latent attention and what goes with it at the sizes of DeepSeek-V3, from replayed graphs
// over rotating caches and weights. Built by its own target: ninja cuda_latent_bench.
#include <cstdio>
#include <tuple>

#include "backends/cuda/dense/bench_fixture.h"

namespace {

using namespace cadre;
using namespace cadre::cuda;

constexpr int64_t kRank = 512;
constexpr int64_t kRope = 64;
constexpr int64_t kNope = 128;
constexpr int64_t kValue = 128;

/// Elements [first, first + count) of every head.
MutableTensorView part(const MutableTensorView& x, int64_t first, int64_t count) {
  auto* data =
      static_cast<std::byte*>(x.mutable_data()) + static_cast<size_t>(first) * size_of(x.dtype());
  return {data, x.dtype(), {x.dim(0), x.dim(1), count}, x.strides(), x.device()};
}

void bench_attention(Bench& bench, int64_t heads) {
  for (const auto& [sequences, each, past] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 1023},
                                              {1, 1, 4095},
                                              {1, 1, 16383},
                                              {8, 1, 4095},
                                              {64, 1, 4095},
                                              {8, 1, 16383},
                                              {1, 1024, 0},
                                              {1, 4096, 0},
                                              {1, 1024, 15360}}) {
    const int64_t rows = sequences * each;
    const Step step(bench, sequences, each, past);
    const Tensor q_latent = bench.random(DType::kBF16, {rows, heads, kRank}, 0.3f);
    const Tensor q = bench.random(DType::kBF16, {rows, heads, kNope + kRope}, 0.3f);
    const Tensor out(DType::kBF16, q_latent->shape(), kGpu);
    const double bytes = static_cast<double>(sequences * (past + each) * (kRank + kRope) * 2);
    const int sets = each > 1 ? 1 : static_cast<int>(std::clamp(150e6 / bytes, 1.0, 24.0));
    std::vector<Tensor> caches;
    for (int i = 0; i < sets; ++i) {
      caches.push_back(bench.random(DType::kBF16, {sequences, 1, past + each + 64, kRank + kRope}));
    }
    const double us = bench.us(std::max(sets, 3), [&](int i) {
      bench.ops().latent_attention(
          {q_latent.view(), part(q, kNope, kRope), caches[static_cast<size_t>(i % sets)].view(),
           step.tokens(), 0.05f, out},
          bench.workspace(), bench.stream());
    });
    const double pairs = static_cast<double>(rows) *
                         (static_cast<double>(past) + (static_cast<double>(each) + 1) / 2);
    std::printf(
        "latent attention heads=%-3ld n=%-3ld T=%-5ld past=%-6ld %9.2f us  %7.1f GB/s of the cache "
        " %6.1f TFLOP/s\n",
        static_cast<long>(heads), static_cast<long>(sequences), static_cast<long>(each),
        static_cast<long>(past), us, bytes / us * 1e-3,
        pairs * 2 * static_cast<double>(heads * (2 * kRank + kRope)) / us * 1e-6);
  }
}

void bench_heads(Bench& bench) {
  constexpr int64_t kHeads = 128;
  constexpr int64_t kHeadRows = kNope + kValue;
  constexpr int kSets = 6;  // 32 MiB each
  std::vector<Tensor> weights;
  for (int i = 0; i < kSets; ++i) {
    weights.push_back(bench.random(DType::kBF16, {kHeads, kHeadRows, kRank}, 0.02f));
  }
  const auto weight = [&](int set, bool across) {
    const Tensor& w = weights[static_cast<size_t>(set)];
    const auto* data = static_cast<const std::byte*>(w->data());
    const int64_t stride = kHeadRows * kRank;
    if (across)
      return TensorView(data, DType::kBF16, {kHeads, kRank, kNope}, {stride, 1, kRank}, kGpu);
    return TensorView(data + kNope * kRank * 2, DType::kBF16, {kHeads, kValue, kRank},
                      {stride, kRank, 1}, kGpu);
  };
  for (const int64_t tokens : {1, 8, 64, 512, 1024}) {
    const Tensor q = bench.random(DType::kBF16, {tokens, kHeads, kNope + kRope});
    const Tensor latent = bench.random(DType::kBF16, {tokens, kHeads, kRank});
    const Tensor out(DType::kBF16, {tokens, kHeads, kValue}, kGpu);
    for (const bool across : {true, false}) {
      const double us = bench.us(2 * kSets, [&](int i) {
        bench.ops().linear_heads(across ? part(q, 0, kNope) : latent.view(),
                                 weight(i % kSets, across), across ? latent : out,
                                 bench.workspace(), bench.stream());
      });
      const double flops = 2.0 * static_cast<double>(tokens * kHeads * kNope * kRank);
      std::printf("linear_heads %s T=%-5ld %9.2f us  %7.1f GB/s of the weights  %6.1f TFLOP/s\n",
                  across ? "into the latent space" : "out of it            ",
                  static_cast<long>(tokens), us, 16.777216e6 / us * 1e-3, flops / us * 1e-6);
    }
  }
}

}  // namespace

int main() {
  Bench bench;
  bench_attention(bench, 128);
  bench_attention(bench, 16);
  bench_heads(bench);
  return 0;
}

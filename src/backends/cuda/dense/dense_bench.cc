// Times of the dense operations at the sizes of Qwen3-30B-A3B, from replayed graphs over rotating
// weights. Built by its own target: ninja cuda_dense_bench.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <numeric>
#include <string_view>

#include "backends/cuda/dense/bench_fixture.h"

namespace {

using namespace cadre;
using namespace cadre::cuda;

struct Group {
  const char* name;
  std::vector<int64_t> n;
  int64_t k;
  bool add;
  bool f32_out;
};

void bench_linear(Bench& bench, double read_bytes_per_s, DType dtype) {
  const Group groups[] = {{"qkv", {4096, 512, 512}, 2048, false, false},
                          {"o", {2048}, 4096, true, true},
                          {"router", {128}, 2048, false, true},
                          {"gate_up", {5632, 5632}, 2048, false, true},
                          {"head", {151936}, 2048, false, true}};
  for (const Group& group : groups) {
    const int64_t total = std::accumulate(group.n.begin(), group.n.end(), int64_t{0});
    const double bytes = static_cast<double>(total * group.k) * static_cast<double>(size_of(dtype));
    const int sets = static_cast<int>(std::clamp(200e6 / bytes, 2.0, 64.0));
    std::vector<Tensor> weights;
    std::vector<std::vector<LinearWeights>> linear(static_cast<size_t>(sets));
    for (int s = 0; s < sets; ++s) {
      for (const int64_t n : group.n) {
        weights.push_back(bench.random(dtype, {n, group.k}, 0.02f));
        linear[static_cast<size_t>(s)].push_back({weights.back().view(), {}});
      }
    }
    for (const int64_t rows : {1, 8, 16, 32, 64}) {
      const Tensor x = bench.random(dtype, {rows, group.k});
      std::vector<Tensor> outs;
      std::vector<MutableTensorView> views;
      for (const int64_t n : group.n) {
        outs.push_back(bench.random(group.f32_out ? DType::kF32 : dtype, {rows, n}));
        views.push_back(outs.back());
      }
      const double us = bench.us(2 * sets, [&](int i) {
        const auto& set = linear[static_cast<size_t>(i % sets)];
        std::vector<const LinearWeights*> pointers;
        for (const LinearWeights& w : set) pointers.push_back(&w);
        if (group.add) {
          bench.ops().linear_add(x.view(), set[0], views[0], bench.workspace(), bench.stream());
        } else {
          bench.ops().linear_group(x.view(), pointers, views, bench.workspace(), bench.stream());
        }
      });
      std::printf("linear %s %-8s T=%-3ld %8.2f us  %5.1f %% of the read ceiling\n",
                  std::string(name_of(dtype)).c_str(), group.name, static_cast<long>(rows), us,
                  100 * bytes / (us * 1e-6) / read_bytes_per_s);
    }
  }
}

void bench_small(Bench& bench) {
  for (const int64_t rows : {1, 64, 4096}) {
    const Tensor residual = bench.random(DType::kF32, {rows, 2048});
    const Tensor weight = bench.random(DType::kBF16, {2048});
    const Tensor x = bench.random(DType::kBF16, {rows, 2048});
    const Tensor out = bench.random(DType::kBF16, {rows, 2048});
    const auto run = [&](const char* name, const std::function<void()>& call) {
      std::printf("%-16s T=%-5ld %8.2f us\n", name, static_cast<long>(rows),
                  bench.us(40, [&](int) { call(); }));
    };
    run("rms_norm",
        [&] { bench.ops().rms_norm(residual.view(), weight.view(), 1e-6f, out, bench.stream()); });
    run("add", [&] { bench.ops().add(residual, x.view(), bench.stream()); });
    const Tensor q = bench.random(DType::kBF16, {rows, 32, 128});
    const Tensor k = bench.random(DType::kBF16, {rows, 4, 128});
    const Tensor v = bench.random(DType::kBF16, {rows, 4, 128});
    const Tensor norm = bench.random(DType::kBF16, {128});
    const Tensor angles = bench.random(DType::kF32, {rows, 64});
    const Tensor keys(DType::kBF16, {1, 4, 4096, 128}, kGpu);
    const Tensor values(DType::kBF16, {1, 4, 4096, 128}, kGpu);
    std::vector<int32_t> positions(static_cast<size_t>(rows));
    std::iota(positions.begin(), positions.end(), 0);
    const Tensor place = bench.integers(positions, {rows});
    const Tensor slots = bench.integers(std::vector<int32_t>(static_cast<size_t>(rows), 0), {rows});
    StepTokens tokens;
    tokens.positions = place.view();
    tokens.slots = slots.view();
    run("finish_qkv", [&] {
      bench.ops().finish_qkv({q,
                              k,
                              v,
                              QkNorm::kPerHead,
                              norm.view(),
                              norm.view(),
                              1e-6f,
                              {},
                              angles.view(),
                              angles.view(),
                              tokens,
                              keys,
                              values},
                             bench.stream());
    });
    const Tensor gate = bench.random(DType::kF32, {rows, 5632});
    const Tensor hidden = bench.random(DType::kBF16, {rows, 5632});
    run("gated_activation", [&] {
      bench.ops().gated_activation(gate.view(), gate.view(), Activation::kSilu, hidden,
                                   bench.stream());
    });
  }
  for (const auto& [rows, experts, k] : {std::tuple<int64_t, int64_t, int64_t>{1, 128, 8},
                                         {64, 128, 8},
                                         {4096, 128, 8},
                                         {16384, 128, 8},
                                         {16384, 60, 4},
                                         {1, 256, 8},
                                         {16384, 256, 8},
                                         {16384, 512, 10},
                                         {4096, 1024, 8}}) {
    const Tensor logits = bench.random(DType::kF32, {rows, experts}, 2);
    const Tensor ids(DType::kI32, {rows, k}, kGpu);
    const Tensor weights(DType::kF32, {rows, k}, kGpu);
    const RouterOptions options{.normalize = true};
    const double us = bench.us(20, [&](int) {
      bench.ops().route(logits.view(), {}, options, ids, weights, bench.workspace(),
                        bench.stream());
    });
    std::printf("route T=%-6ld E=%-5ld k=%-3ld %8.2f us\n", static_cast<long>(rows),
                static_cast<long>(experts), static_cast<long>(k), us);
  }
  for (const int64_t rows : {1, 8, 64}) {
    const Tensor logits = bench.random(DType::kF32, {rows, 151936}, 3);
    const Tensor ids(DType::kI32, {rows}, kGpu);
    const Tensor uniform =
        bench.integers(std::vector<int32_t>(static_cast<size_t>(2 * rows), 0x3fd00000), {2 * rows});
    SampleArgs args;
    args.logits = logits.view();
    args.ids = ids;
    args.uniform = TensorView(uniform->data(), DType::kF64, {rows}, kGpu);
    const auto time = [&](const char* name) {
      const double us =
          bench.us(10, [&](int) { bench.ops().sample(args, bench.workspace(), bench.stream()); });
      std::printf("sample %-14s n=%-3ld %8.2f us\n", name, static_cast<long>(rows), us);
    };
    time("greedy");
    args.temperature = 0.8f;
    time("temperature");
    args.top_k = 50;
    args.top_p = 0.95f;
    time("top-k, top-p");
  }
}

void bench_attention(Bench& bench) {
  constexpr int64_t kHeads = 32;
  constexpr int64_t kKvHeads = 4;
  constexpr int64_t kDim = 128;
  for (const auto& [sequences, each, past] : {std::tuple<int64_t, int64_t, int64_t>{1, 1, 128},
                                              {1, 1, 1023},
                                              {1, 1, 4095},
                                              {1, 1, 32767},
                                              {8, 1, 1023},
                                              {8, 1, 4095},
                                              {64, 1, 1023},
                                              {64, 1, 4095},
                                              {1, 16, 4080},
                                              {1, 128, 0},
                                              {1, 512, 0},
                                              {1, 1024, 0},
                                              {1, 4096, 0},
                                              {4, 1024, 0},
                                              {1, 16384, 0},
                                              {1, 1024, 15360}}) {
    const int64_t rows = sequences * each;
    const Step step(bench, sequences, each, past);
    const int64_t max_tokens = past + each + 64;
    const Tensor q = bench.random(DType::kBF16, {rows, kHeads, kDim});
    const Tensor out(DType::kBF16, {rows, kHeads, kDim}, kGpu);
    const double bytes = static_cast<double>(sequences * kKvHeads * (past + each) * kDim * 4);
    const int sets = each > 1 ? 1 : static_cast<int>(std::clamp(150e6 / bytes, 1.0, 24.0));
    std::vector<Tensor> keys, values;
    for (int i = 0; i < sets; ++i) {
      keys.push_back(bench.random(DType::kBF16, {sequences, kKvHeads, max_tokens, kDim}));
      values.push_back(bench.random(DType::kBF16, {sequences, kKvHeads, max_tokens, kDim}));
    }
    const double us = bench.us(std::max(sets, 3), [&](int i) {
      const auto set = static_cast<size_t>(i % sets);
      bench.ops().attention(
          {q.view(), keys[set].view(), values[set].view(), step.tokens(), 0.0883883f, 0, out},
          bench.workspace(), bench.stream());
    });
    const double pairs = static_cast<double>(rows) *
                         (static_cast<double>(past) + (static_cast<double>(each) + 1) / 2);
    std::printf(
        "attention n=%-3ld T=%-6ld past=%-6ld %9.2f us  %7.1f GB/s of the cache  %6.1f TFLOP/s\n",
        static_cast<long>(sequences), static_cast<long>(each), static_cast<long>(past), us,
        bytes / us * 1e-3, pairs * 4 * kHeads * kDim / us * 1e-6);
  }
}

// The dense part of one layer of a decode step: what runs around the experts.
void bench_layer(Bench& bench, double read_bytes_per_s) {
  constexpr int64_t kHidden = 2048;
  constexpr int kLayers = 12;
  struct Layer {
    Tensor q, k, v, o, router, norm, head_norm, keys, values;
  };
  for (const int64_t rows : {1, 8, 32, 64}) {
    std::vector<Layer> layers;
    for (int i = 0; i < kLayers; ++i) {
      layers.push_back({bench.random(DType::kBF16, {4096, kHidden}, 0.02f),
                        bench.random(DType::kBF16, {512, kHidden}, 0.02f),
                        bench.random(DType::kBF16, {512, kHidden}, 0.02f),
                        bench.random(DType::kBF16, {kHidden, 4096}, 0.02f),
                        bench.random(DType::kBF16, {128, kHidden}, 0.02f),
                        bench.random(DType::kBF16, {kHidden}), bench.random(DType::kBF16, {128}),
                        bench.random(DType::kBF16, {rows, 4, 1024, 128}),
                        bench.random(DType::kBF16, {rows, 4, 1024, 128})});
    }
    const Step step(bench, rows, 1, 500);
    const Tensor residual = bench.random(DType::kF32, {rows, kHidden});
    const Tensor x(DType::kBF16, {rows, kHidden}, kGpu);
    const Tensor q(DType::kBF16, {rows, 32, 128}, kGpu);
    const Tensor k(DType::kBF16, {rows, 4, 128}, kGpu);
    const Tensor v(DType::kBF16, {rows, 4, 128}, kGpu);
    const Tensor mixed(DType::kBF16, {rows, 32, 128}, kGpu);
    const Tensor ids(DType::kI32, {rows, 8}, kGpu);
    const Tensor weights(DType::kF32, {rows, 8}, kGpu);
    const Tensor angles = bench.random(DType::kF32, {rows, 64});
    DenseOps& ops = bench.ops();
    const auto run = [&](int i, int parts) {
      const Layer& l = layers[static_cast<size_t>(i)];
      const Stream& s = bench.stream();
      const LinearWeights wq{l.q.view(), {}}, wk{l.k.view(), {}}, wv{l.v.view(), {}};
      const LinearWeights* const all[] = {&wq, &wk, &wv};
      const MutableTensorView outs[] = {q->reshape({rows, 4096}), k->reshape({rows, 512}),
                                        v->reshape({rows, 512})};
      if (parts & 1) ops.rms_norm(residual.view(), l.norm.view(), 1e-6f, x, s);
      if (parts & 2) ops.linear_group(x.view(), all, outs, bench.workspace(), s);
      const StepTokens tokens = step.tokens();
      const QkvArgs qkv{q,
                        k,
                        v,
                        QkNorm::kPerHead,
                        l.head_norm.view(),
                        l.head_norm.view(),
                        1e-6f,
                        {},
                        angles.view(),
                        angles.view(),
                        tokens,
                        l.keys,
                        l.values};
      const AttentionArgs attention{q.view(), l.keys.view(), l.values.view(), tokens, 0.0883883f,
                                    0,        mixed};
      if (parts & 4) ops.finish_and_attend(qkv, attention, bench.workspace(), s);
      if (parts & 8) {
        ops.linear_add(mixed->reshape({rows, 4096}), {l.o.view(), {}}, residual, bench.workspace(),
                       s);
      }
      if (parts & 16) {
        ops.norm_and_route(
            {residual.view(), l.norm.view(), 1e-6f, x, {l.router.view(), {}}, {}, {}, ids, weights},
            bench.workspace(), s);
      }
    };
    const double floor = 38.3e6 / read_bytes_per_s * 1e6;
    for (const int parts : {31, 30, 29, 27, 23, 15, 10}) {
      const double us = bench.us(kLayers, [&](int i) { run(i, parts); });
      std::printf("layer T=%-3ld parts %3d %8.2f us, weights alone %5.2f us\n",
                  static_cast<long>(rows), parts, us, floor);
    }
  }
}

}  // namespace

// Arguments: what to time (linear, floats, small, attention, layer), all when none.
int main(int argc, char** argv) {
  const auto wants = [&](std::string_view what) {
    return argc < 2 || std::find(argv + 1, argv + argc, what) != argv + argc;
  };
  Bench bench;
  const double read =
      argc > 1 && std::atof(argv[argc - 1]) > 0 ? std::atof(argv[argc - 1]) : 4.45e12;
  if (wants("linear")) {
    bench_linear(bench, read, DType::kBF16);
  }
  if (wants("floats")) bench_linear(bench, read, DType::kF32);
  if (wants("small")) bench_small(bench);
  if (wants("attention")) bench_attention(bench);
  if (wants("layer")) bench_layer(bench, read);
  return 0;
}

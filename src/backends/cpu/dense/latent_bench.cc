// Times of latent attention and what goes with it at the sizes of DeepSeek-V3, one token of one
// sequence, beside the ceilings of the same run. Built by its own target: ninja cpu_latent_bench.
// Argument: number of threads.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <random>
#include <vector>

#include "cadre/float16.h"
#include "cadre/thread_pool.h"
#include "dense/ceilings.h"
#include "dense/dense_ops.h"

namespace {

using namespace cadre;

constexpr int64_t kHeads = 128;
constexpr int64_t kRank = 512;
constexpr int64_t kRope = 64;
constexpr int64_t kHeadDim = 128;  // of keys that do not rotate, and of values

Tensor random(const Dims& shape) {
  static std::mt19937 engine(3);
  std::normal_distribution<float> normal(0, 0.3f);
  Tensor tensor(DType::kBF16, shape);
  for (int64_t i = 0; i < tensor->numel(); ++i) {
    tensor->as<BFloat16>()[i] = BFloat16(i < 1 << 20 ? normal(engine) : 0.0f);
  }
  for (int64_t i = 1 << 20; i < tensor->numel(); ++i) {
    tensor->as<BFloat16>()[i] = tensor->as<BFloat16>()[i - (1 << 20)];
  }
  return tensor;
}

class Bench {
 public:
  explicit Bench(int threads)
      : threads_(threads),
        stream_(Stream::cpu(threads_)),
        workspace_({}, size_t{64} << 20),
        other_(random({64 << 20})) {}

  /// Microseconds, median of 21 calls, memory beyond the caches read before each.
  double us(const std::function<void()>& call) {
    std::vector<double> times;
    for (int i = 0; i < 24; ++i) {
      const double read = ceilings().read_bandwidth(other_.view(), 0, stream_);
      if (i < 3) {
        call();
        continue;
      }
      reads_.push_back(read);
      const auto begin = std::chrono::steady_clock::now();
      call();
      times.push_back(
          std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - begin)
              .count());
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }
  double read_bandwidth() {
    std::sort(reads_.begin(), reads_.end());
    return reads_[reads_.size() / 2];
  }
  double peak_flops() { return ceilings().peak_flops(DType::kF32, stream_); }
  DenseOps& ops() { return dense_ops(DeviceType::kCpu); }
  Workspace& workspace() { return workspace_; }
  const Stream& stream() const { return stream_; }

 private:
  static const Ceilings& ceilings() { return ceilings_of(DeviceType::kCpu); }

  ThreadPool threads_;
  Stream stream_;
  Workspace workspace_;
  Tensor other_;
  std::vector<double> reads_;
};

void report(Bench& bench, const char* what, int64_t context, double us, double bytes,
            double flops) {
  std::printf(
      "%-22s context %-6ld %9.1f us  %5.1f %% of the read ceiling (%.1f GB/s)  %5.1f %% of "
      "the float32 ceiling (%.0f GFLOP/s)\n",
      what, static_cast<long>(context), us, 100 * bytes / (us * 1e-6) / bench.read_bandwidth(),
      bench.read_bandwidth() * 1e-9, 100 * flops / (us * 1e-6) / bench.peak_flops(),
      bench.peak_flops() * 1e-9);
}

void bench_attention(Bench& bench, int64_t context) {
  const Tensor q_latent = random({1, kHeads, kRank});
  const Tensor q_rope = random({1, kHeads, kRope});
  const Tensor cache = random({1, 1, context, kRank + kRope});
  const Tensor out(DType::kBF16, {1, kHeads, kRank});
  const std::vector<SequenceSpan> spans = {{0, 0, 1, context - 1}};
  const double us = bench.us([&] {
    bench.ops().latent_attention(
        {q_latent.view(), q_rope.view(), cache.view(), {spans}, 0.05f, out}, bench.workspace(),
        bench.stream());
  });
  report(bench, "latent attention", context, us, static_cast<double>(context * (kRank + kRope) * 2),
         2.0 * static_cast<double>(context * kHeads * (2 * kRank + kRope)));
}

void bench_heads(Bench& bench) {
  const Tensor weights = random({kHeads, 2 * kHeadDim, kRank});
  const Tensor q = random({1, kHeads, kHeadDim});
  const Tensor latent = random({1, kHeads, kRank});
  const Tensor out(DType::kBF16, {1, kHeads, kHeadDim});
  const int64_t stride = 2 * kHeadDim * kRank;
  const auto* data = weights->as<BFloat16>();
  const TensorView keys(data, DType::kBF16, {kHeads, kRank, kHeadDim}, {stride, 1, kRank});
  const TensorView values(data + kHeadDim * kRank, DType::kBF16, {kHeads, kHeadDim, kRank},
                          {stride, kRank, 1});
  const double bytes = static_cast<double>(kHeads * kHeadDim * kRank * 2);
  report(bench, "into the latent space", 0, bench.us([&] {
    bench.ops().linear_heads(q.view(), keys, latent, bench.workspace(), bench.stream());
  }),
         bytes, bytes);
  report(bench, "out of it", 0, bench.us([&] {
    bench.ops().linear_heads(latent.view(), values, out, bench.workspace(), bench.stream());
  }),
         bytes, bytes);
}

}  // namespace

int main(int argc, char** argv) {
  Bench bench(argc > 1 ? std::max(1, std::atoi(argv[1])) : 2);
  for (const int64_t context : {1024, 4096, 16384}) bench_attention(bench, context);
  bench_heads(bench);
  return 0;
}

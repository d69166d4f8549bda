// Times one experts layer on the CPU beside the ceilings of the same run: what two threads read
// from memory, and what the product kernel does on a panel that stays in L1.
//
//   experts_bench [backend] [qwen1.5|qwen3] [num_threads] [tokens...]
//
// Two layers take turns and every call brings another routing, so weights come from memory, not
// from cache. The median of the calls is printed.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "cadre/experts.h"
#include "cadre/float16.h"
#include "cadre/thread_pool.h"

namespace {

using namespace cadre;  // NOLINT(google-build-using-namespace): a program of one file

double seconds() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

template <typename F>
double median_seconds(int repeats, F f) {
  std::vector<double> times;
  for (int i = 0; i < repeats; ++i) {
    const double start = seconds();
    f(i);
    times.push_back(seconds() - start);
  }
  std::sort(times.begin(), times.end());
  return times[times.size() / 2];
}

struct Layer {
  Tensor gate_up, down;
  std::shared_ptr<const ExpertsWeights> weights;

  Layer(const ExpertsConfig& c, uint32_t seed)
      : gate_up(DType::kBF16, {c.num_experts, 2 * c.intermediate_size, c.hidden_size}),
        down(DType::kBF16, {c.num_experts, c.hidden_size, c.intermediate_size}) {
    fill(gate_up, seed);
    fill(down, seed + 1);
    weights = std::make_shared<ExpertsWeights>(
        make_experts_weights(c, FusedExperts{gate_up.view(), down.view(), {}, {}}));
  }

  // A block of random values, repeated: the arithmetic does not depend on the values.
  static void fill(const Tensor& t, uint32_t seed) {
    std::mt19937 random(seed);
    std::normal_distribution<float> normal(0, 0.02f);
    std::vector<BFloat16> block(1 << 20);
    for (BFloat16& v : block) v = BFloat16(normal(random));
    auto* to = static_cast<char*>(t->mutable_data());
    const size_t block_bytes = block.size() * sizeof(BFloat16);
    for (size_t at = 0; at < t->nbytes(); at += block_bytes) {
      std::memcpy(to + at, block.data(), std::min(block_bytes, t->nbytes() - at));
    }
  }
};

// GB/s of all threads reading `bytes` once.
double read_bandwidth(const Tensor& memory, ThreadPool& pool) {
  static std::atomic<uint64_t> sink;  // keeps the sums from being optimised away
  const auto* words = memory->as<uint16_t>();
  const int64_t lines = memory->numel() / 32;
  const double time = median_seconds(5, [&](int) {
    pool.parallel_ranges(lines, 4096, [&](int64_t begin, int64_t end, int) {
      uint64_t sums[16] = {};  // independent, so that the additions do not limit the reading
      const auto* at = reinterpret_cast<const uint64_t*>(words) + begin * 8;
      for (int64_t i = 0; i + 16 <= (end - begin) * 8; i += 16) {
        for (int j = 0; j < 16; ++j) sums[j] += at[i + j];
      }
      for (const uint64_t sum : sums) sink.fetch_add(sum, std::memory_order_relaxed);
    });
  });
  return static_cast<double>(lines * 64) / time / 1e9;
}

// GFLOP/s of the product kernel on one hot panel, all threads.
double tile_peak(const cpu::KernelTable& kernels, ThreadPool& pool) {
  constexpr int kRows = 48, kRepeats = 2000;
  const double time = median_seconds(5, [&](int) {
    pool.run([&](int) {
      std::vector<float> panel(cpu::kPanelBytes / 4), acc(kRows * cpu::kPanelColumns);
      std::vector<float> x(kRows * cpu::kChunk);
      const void* rows[kRows];
      for (int r = 0; r < kRows; ++r) rows[r] = x.data() + r * cpu::kChunk;
      for (int i = 0; i < kRepeats; ++i) {
        kernels.multiply(
            {rows, 0, kRows, cpu::kChunk, panel.data(), acc.data(), false, nullptr, 0});
      }
    });
  });
  return 2.0 * kRows * kRepeats * cpu::kChunk * cpu::kPanelColumns * pool.num_threads() / time /
         1e9;
}

struct Call {
  Tensor x, ids, weights, out;
  Call(const ExpertsConfig& c, int64_t tokens)
      : x(DType::kBF16, {tokens, c.hidden_size}),
        ids(DType::kI32, {tokens, c.top_k}),
        weights(DType::kF32, {tokens, c.top_k}),
        out(DType::kBF16, {tokens, c.hidden_size}) {
    Layer::fill(x, 7);
    std::fill_n(weights->as<float>(), weights->numel(), 1.0f / static_cast<float>(c.top_k));
  }
  // Returns the number of experts hit.
  int64_t route(const ExpertsConfig& c, std::mt19937& random) {
    std::vector<int32_t> all(static_cast<size_t>(c.num_experts));
    std::vector<char> hit(all.size());
    for (int64_t t = 0; t < ids->dim(0); ++t) {
      for (size_t e = 0; e < all.size(); ++e) all[e] = static_cast<int32_t>(e);
      for (int64_t s = 0; s < c.top_k; ++s) {
        std::swap(all[static_cast<size_t>(s)],
                  all[static_cast<size_t>(s) + random() % (all.size() - static_cast<size_t>(s))]);
        ids->as<int32_t>()[t * c.top_k + s] = all[static_cast<size_t>(s)];
        hit[static_cast<size_t>(all[static_cast<size_t>(s)])] = 1;
      }
    }
    return std::count(hit.begin(), hit.end(), 1);
  }
};

void bench(const std::string& name, const std::string& shape, ThreadPool& pool,
           const std::vector<int64_t>& token_counts) {
  ExpertsQuery query;
  if (shape == "qwen1.5") {
    query.config = {.num_experts = 60, .hidden_size = 2048, .intermediate_size = 1408, .top_k = 4};
  } else {
    query.config = {.num_experts = 128, .hidden_size = 2048, .intermediate_size = 768, .top_k = 8};
  }
  const ExpertsConfig& c = query.config;
  ExpertsBackend& backend = find_backend(name, DeviceType::kCpu);
  const Layer layers[] = {Layer(c, 1), Layer(c, 3)};
  const std::unique_ptr<PreparedExperts> prepared[] = {backend.prepare(query, layers[0].weights),
                                                       backend.prepare(query, layers[1].weights)};
  std::printf("%s on %s, %d threads, isa %s\n", name.c_str(), shape.c_str(), pool.num_threads(),
              std::string(cpu::name_of(cpu::active_isa())).c_str());
  for (const int64_t tokens : token_counts) {
    Call call(c, tokens);
    Workspace workspace({}, backend.workspace_bytes(query, tokens, pool.num_threads()));
    std::mt19937 random(static_cast<uint32_t>(tokens));
    const double ceiling = read_bandwidth(layers[0].gate_up, pool);
    std::vector<double> times;
    double bytes = 0;
    const int repeats = tokens >= 1024 ? 7 : tokens >= 256 ? 11 : tokens >= 32 ? 21 : 61;
    for (int i = 0; i < repeats + 1; ++i) {
      const int64_t active = call.route(c, random);
      const double start = seconds();
      backend.forward(*prepared[i % 2], {call.x, call.ids, call.weights, call.out}, workspace,
                      Stream::cpu(pool));
      if (i == 0) continue;  // warm-up
      times.push_back(seconds() - start);
      bytes += static_cast<double>(active * 6 * c.hidden_size * c.intermediate_size) / repeats;
    }
    std::sort(times.begin(), times.end());
    const double time = times[times.size() / 2];
    const double flops =
        6.0 * static_cast<double>(tokens * c.top_k * c.hidden_size * c.intermediate_size);
    std::printf("T %5ld  %8.3f ms  %6.1f GFLOP/s  %5.1f GB/s = %3.0f %% of %.1f read\n",
                static_cast<long>(tokens), time * 1e3, flops / time / 1e9, bytes / time / 1e9,
                100 * bytes / time / 1e9 / ceiling, ceiling);
  }
}

}  // namespace

int main(int argc, char** argv) {
  const std::string name = argc > 1 ? argv[1] : "grouped_mm";
  const std::string shape = argc > 2 ? argv[2] : "qwen1.5";
  ThreadPool pool(argc > 3 ? std::atoi(argv[3]) : 2);
  std::vector<int64_t> tokens;
  for (int i = 4; i < argc; ++i) tokens.push_back(std::atoi(argv[i]));
  if (tokens.empty()) tokens = {1, 4, 32, 256, 1024};
  for (const cpu::Isa isa : cpu::kAllIsas) {
    if (!cpu::is_available(isa)) continue;
    std::printf("hot tile, %s: %.0f GFLOP/s\n", std::string(cpu::name_of(isa)).c_str(),
                tile_peak(cpu::kernels_for(isa, DType::kBF16), pool));
  }
  bench(name, shape, pool, tokens);
}

#include "backends/cpu/kernels/ceilings.h"

#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/peak.h"
#include "backends/cpu/kernels/read_ways.h"
#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre::cpu {
namespace {

constexpr double kPeakSeconds = 2e-3;     // long beside a loop, short beside a change of the clock
constexpr int64_t kPageWords = 4096 / 8;  // threads share no page
std::atomic<uint64_t> sink;               // what was read must seem to be used

double now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

// Products of one thread until then.
double products_until(double end, PeakLoop loop) {
  double products = 0;
  while (now() < end) products += loop();
  return products;
}

std::vector<ReadWay> all_read_ways() {
  const ReadWays narrow = read_ways_128();
  std::vector<ReadWay> all(narrow.ways, narrow.ways + narrow.count);
#if defined(__x86_64__)
  if (is_available(Isa::kAvx512)) {
    const ReadWays wide = read_ways_512();
    all.insert(all.end(), wide.ways, wide.ways + wide.count);
  }
#endif
  return all;
}

const std::vector<ReadWay>& read_ways() {
  static const std::vector<ReadWay> kAll = all_read_ways();
  return kAll;
}

class CpuCeilings final : public Ceilings {
 public:
  std::string processor() const override {
    std::ifstream file("/proc/cpuinfo");
    for (std::string line; std::getline(file, line);) {
      if (line.rfind("model name", 0) != 0) continue;
      const size_t colon = line.find(": ");
      if (colon != std::string::npos) return line.substr(colon + 2);
    }
    return "unknown CPU";
  }

  std::vector<std::string> ways_of_reading() const override {
    std::vector<std::string> names;
    for (const ReadWay& way : read_ways()) names.emplace_back(way.name);
    return names;
  }

  double read_bandwidth(const TensorView& memory, size_t way, const Stream& stream) const override {
    CADRE_ASSERT(way < read_ways().size());
    const auto read = read_ways()[way].read;
    const auto words = static_cast<int64_t>(memory.nbytes() / sizeof(uint64_t));
    if (!memory.is_contiguous() || words == 0 || memory.device() != Device{}) {
      throw InvalidArgument(str_cat("read_bandwidth: expected contiguous CPU memory, got ",
                                    describe("memory", memory)));
    }
    CADRE_ASSERT(stream.threads != nullptr);
    const auto* first = static_cast<const uint64_t*>(memory.data());
    const double start = now();
    stream.threads->parallel_ranges(words, kPageWords, [&](int64_t begin, int64_t end, int) {
      sink.fetch_xor(read(first + begin, end - begin), std::memory_order_relaxed);
    });
    return static_cast<double>(words) * sizeof(uint64_t) / (now() - start);
  }

  double peak_flops(DType compute_dtype, const Stream& stream) const override {
    CADRE_ASSERT(stream.threads != nullptr);
    const PeakLoop loop = peak_loop(active_isa(), compute_dtype);
    std::vector<double> products(static_cast<size_t>(stream.threads->num_threads()));
    stream.threads->run([&](int) { loop(); });  // threads, clocks and units wake up
    // One span of time for all: threads that share a core do not count it twice.
    const double start = now();
    stream.threads->run([&](int thread) {
      products[static_cast<size_t>(thread)] = products_until(start + kPeakSeconds, loop);
    });
    return 2 * std::accumulate(products.begin(), products.end(), 0.0) / (now() - start);
  }
};

}  // namespace

const Ceilings& ceilings() {
  static const CpuCeilings kCeilings;
  return kCeilings;
}

}  // namespace cadre::cpu

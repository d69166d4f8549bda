#include "backends/cpu/kernels/ceilings.h"

#include <atomic>
#include <chrono>
#include <fstream>
#include <numeric>
#include <vector>

#include "backends/cpu/kernels/isa.h"
#include "backends/cpu/kernels/peak.h"
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

// Operations per second of one thread.
double rate_of(PeakLoop loop) {
  loop();  // clocks and units wake up
  double products = 0;
  double elapsed = 0;
  const double start = now();
  do {
    products += loop();
    elapsed = now() - start;
  } while (elapsed < kPeakSeconds);
  return 2 * products / elapsed;
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

  double read_bandwidth(const TensorView& memory, const Stream& stream) const override {
    const auto words = static_cast<int64_t>(memory.nbytes() / sizeof(uint64_t));
    if (!memory.is_contiguous() || words == 0 || memory.device() != Device{}) {
      throw InvalidArgument(str_cat("read_bandwidth: expected contiguous CPU memory, got ",
                                    describe("memory", memory)));
    }
    CADRE_ASSERT(stream.threads != nullptr);
    const auto* first = static_cast<const uint64_t*>(memory.data());
    const double start = now();
    stream.threads->parallel_ranges(words, kPageWords, [&](int64_t begin, int64_t end, int) {
      sink.fetch_xor(read_words(first + begin, end - begin), std::memory_order_relaxed);
    });
    return static_cast<double>(words) * sizeof(uint64_t) / (now() - start);
  }

  double peak_flops(DType compute_dtype, const Stream& stream) const override {
    CADRE_ASSERT(stream.threads != nullptr);
    const PeakLoop loop = peak_loop(active_isa(), compute_dtype);
    std::vector<double> rates(static_cast<size_t>(stream.threads->num_threads()));
    stream.threads->run([&](int thread) { rates[static_cast<size_t>(thread)] = rate_of(loop); });
    return std::accumulate(rates.begin(), rates.end(), 0.0);
  }
};

}  // namespace

const Ceilings& ceilings() {
  static const CpuCeilings kCeilings;
  return kCeilings;
}

}  // namespace cadre::cpu

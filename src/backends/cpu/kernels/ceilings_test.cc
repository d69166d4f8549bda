#include "backends/cpu/kernels/ceilings.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "backends/cpu/kernels/peak.h"
#include "backends/cpu/kernels/read_ways.h"
#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "core/device_runtime.h"

namespace cadre::cpu {
namespace {

TEST(Peak, EveryLoopDoesTheProductsItIsBuiltFrom) {
  // Lanes x chains x steps of each instruction, by hand.
  const auto expected = [](Isa isa, bool bf16) {
    if (isa == Isa::kAmx && bf16) return 16.0 * 16 * 32 * 6 * 512;
    if (isa == Isa::kAvx512Bf16 && bf16) return 32.0 * 16 * 8192;
    if (isa >= Isa::kAvx512) return 16.0 * 16 * 8192;
    if (isa == Isa::kAvx2) return 8.0 * 12 * 8192;
    return 4.0 * 12 * 8192;
  };
  for (const Isa isa : kAllIsas) {
    if (!is_available(isa)) continue;
    for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
      SCOPED_TRACE(std::string(name_of(isa)) + " " + std::string(name_of(dtype)));
      EXPECT_EQ(peak_loop(isa, dtype)(), expected(isa, dtype == DType::kBF16));
    }
  }
  EXPECT_THROW(peak_loop(Isa::kPortable, DType::kI32), InvalidArgument);
}

TEST(ReadWays, MissNoWord) {
  // Groups of 8 streams take 65536 words. The first word of all lies at an odd place.
  std::mt19937_64 random(1);
  std::vector<uint64_t> words(2 * 65536 + 100);
  for (uint64_t& word : words) word = random();
  std::vector<ReadWays> all = {read_ways_128()};
  if (is_available(Isa::kAvx512)) all.push_back(read_ways_512());
  for (const ReadWays& ways : all) {
    ASSERT_GT(ways.count, 1);
    for (int w = 0; w < ways.count; ++w) {
      for (const size_t count :
           {size_t{0}, size_t{1}, size_t{1000}, size_t{65536}, size_t{131099}}) {
        uint64_t expected = 0;
        for (size_t i = 0; i < count; ++i) expected ^= words[1 + i];
        EXPECT_EQ(ways.ways[w].read(words.data() + 1, static_cast<int64_t>(count)), expected)
            << ways.ways[w].name << " " << count;
      }
    }
  }
}

TEST(Ceilings, AreFiniteRatesWithAnyNumberOfThreads) {
  const Tensor memory(DType::kU8, {1 << 20});
  std::fill_n(static_cast<char*>(memory->mutable_data()), memory->nbytes(), '\1');
  for (const int threads : {1, 3}) {
    ThreadPool pool(threads);
    const Stream stream = Stream::cpu(pool);
    const std::vector<std::string> ways = ceilings().ways_of_reading();
    ASSERT_FALSE(ways.empty());
    for (size_t way = 0; way < ways.size(); ++way) {
      EXPECT_GT(ceilings().read_bandwidth(memory, way, stream), 0) << ways[way];
    }
    EXPECT_EQ(std::set<std::string>(ways.begin(), ways.end()).size(), ways.size());
    for (const DType dtype : {DType::kF32, DType::kBF16}) {
      const double peak = ceilings().peak_flops(dtype, stream);
      EXPECT_TRUE(std::isfinite(peak) && peak > 0);
    }
  }
  EXPECT_NE(ceilings().processor(), "");
}

// Rates of threads that take turns on a core do not add up. A wide margin: others may disturb the
// run with few threads.
TEST(Ceilings, MoreThreadsThanCoresMultiplyNoFaster) {
  ThreadPool cores;
  ThreadPool many(std::min(ThreadPool::kMaxThreads, 64 * cores.num_threads()));
  double peak = 0;
  for (int i = 0; i < 10; ++i) {
    peak = std::max(peak, ceilings().peak_flops(DType::kF32, Stream::cpu(cores)));
  }
  EXPECT_LT(ceilings().peak_flops(DType::kF32, Stream::cpu(many)), 4 * peak);
}

TEST(Ceilings, RefuseWhatTheyCannotRead) {
  ThreadPool pool(1);
  const Tensor memory(DType::kU8, {64, 64});
  const TensorView column(memory->data(), DType::kU8, {64, 32}, {64, 1});
  EXPECT_THROW(ceilings().read_bandwidth(column, 0, Stream::cpu(pool)), InvalidArgument);
  EXPECT_THROW(ceilings().read_bandwidth({}, 0, Stream::cpu(pool)), InvalidArgument);
  EXPECT_THROW(ceilings().peak_flops(DType::kI32, Stream::cpu(pool)), InvalidArgument);
}

TEST(Ceilings, AreFoundByDevice) {
  EXPECT_EQ(&ceilings_of(DeviceType::kCpu), &ceilings());
  if (find_device_runtime(DeviceType::kCuda) != nullptr) GTEST_SKIP() << "a build with CUDA";
  try {
    ceilings_of(DeviceType::kCuda);
    ADD_FAILURE();
  } catch (const Unsupported& e) {
    EXPECT_NE(std::string(e.what()).find("cuda"), std::string::npos);
    EXPECT_NE(std::string(e.what()).find("available: cpu"), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre::cpu

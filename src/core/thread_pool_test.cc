#include "cadre/thread_pool.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <fstream>
#include <memory>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "cadre/error.h"

namespace cadre {
namespace {

// How often each index was handed out. One atomic each: any number of threads may count.
class Visits {
 public:
  explicit Visits(int64_t count) : counts_(static_cast<size_t>(count)) {}
  void add(int64_t i) { counts_.at(static_cast<size_t>(i)).fetch_add(1); }
  bool all_are(int expected) const {
    for (const auto& count : counts_) {
      if (count.load() != expected) return false;
    }
    return true;
  }

 private:
  std::vector<std::atomic<int>> counts_;
};

class ThreadPoolOf : public ::testing::TestWithParam<int> {
 protected:
  ThreadPool pool_{GetParam()};
};
INSTANTIATE_TEST_SUITE_P(Threads, ThreadPoolOf, ::testing::Values(1, 2, 3, 8, 17));

TEST_P(ThreadPoolOf, RunCallsEachThreadOnceAndTheCallerIsThreadZero) {
  Visits visits(GetParam());
  std::thread::id zero;
  std::vector<std::thread::id> ids(static_cast<size_t>(GetParam()));
  pool_.run([&](int thread) {
    visits.add(thread);
    ids[static_cast<size_t>(thread)] = std::this_thread::get_id();
  });
  EXPECT_TRUE(visits.all_are(1));
  EXPECT_EQ(ids[0], std::this_thread::get_id());
  EXPECT_EQ(std::set<std::thread::id>(ids.begin(), ids.end()).size(), ids.size());
}

TEST_P(ThreadPoolOf, ParallelForCoversEveryIndexOnce) {
  for (const int64_t count : {0, 1, 2, 7, 100, 1000}) {
    Visits visits(count);
    std::atomic<bool> in_range{true};
    pool_.parallel_for(count, [&](int64_t i, int thread) {
      visits.add(i);
      if (thread < 0 || thread >= GetParam()) in_range = false;
    });
    EXPECT_TRUE(visits.all_are(1)) << count;
    EXPECT_TRUE(in_range);
  }
}

TEST_P(ThreadPoolOf, ParallelForHandsOutAscendingIndices) {
  std::vector<std::vector<int64_t>> seen(static_cast<size_t>(GetParam()));
  pool_.parallel_for(
      500, [&](int64_t i, int thread) { seen[static_cast<size_t>(thread)].push_back(i); });
  for (const auto& indices : seen) EXPECT_TRUE(std::is_sorted(indices.begin(), indices.end()));
}

TEST_P(ThreadPoolOf, ParallelRangesCoverEveryIndexOnceInMultiplesOfTheGrain) {
  for (const int64_t count : {0, 1, 5, 16, 17, 64, 1000}) {
    for (const int64_t grain : {1, 4, 16, 5000}) {
      Visits visits(count);
      Visits ranges_of_thread(GetParam());
      std::atomic<bool> is_good{true};
      pool_.parallel_ranges(count, grain, [&](int64_t begin, int64_t end, int thread) {
        ranges_of_thread.add(thread);
        if (begin >= end || begin % grain != 0 || (end != count && end % grain != 0))
          is_good = false;
        for (int64_t i = begin; i < end; ++i) visits.add(i);
      });
      EXPECT_TRUE(visits.all_are(1)) << count << " by " << grain;
      EXPECT_TRUE(is_good) << count << " by " << grain;
    }
  }
}

TEST_P(ThreadPoolOf, NegativeCountsDoNothing) {
  pool_.parallel_for(-1, [](int64_t, int) { FAIL(); });
  pool_.parallel_ranges(-1, 4, [](int64_t, int64_t, int) { FAIL(); });
}

TEST_P(ThreadPoolOf, NestedCallsRunInline) {
  constexpr int64_t kOuter = 20;
  constexpr int64_t kInner = 30;
  Visits visits(kOuter * kInner);
  pool_.parallel_for(kOuter, [&](int64_t i, int) {
    const auto self = std::this_thread::get_id();
    pool_.parallel_for(kInner, [&](int64_t j, int) {
      if (std::this_thread::get_id() == self) visits.add(i * kInner + j);
    });
  });
  EXPECT_TRUE(visits.all_are(1));
}

TEST_P(ThreadPoolOf, NestedCallsInsideASingleItemJobRunInlineToo) {
  Visits visits(GetParam());
  pool_.parallel_for(1, [&](int64_t, int) { pool_.run([&](int thread) { visits.add(thread); }); });
  EXPECT_TRUE(visits.all_are(1));
  pool_.parallel_ranges(3, 8, [&](int64_t begin, int64_t end, int thread) {
    EXPECT_EQ(end - begin, 3);
    EXPECT_EQ(thread, 0);
    pool_.parallel_for(1, [](int64_t, int) {});
  });
}

TEST_P(ThreadPoolOf, AnExceptionOfAnyThreadReachesTheCallerAndThePoolLivesOn) {
  for (int thrower = 0; thrower < GetParam(); ++thrower) {
    try {
      pool_.run([&](int thread) {
        if (thread == thrower) throw std::runtime_error("from " + std::to_string(thread));
      });
      ADD_FAILURE() << "nothing thrown by " << thrower;
    } catch (const std::runtime_error& error) {
      EXPECT_EQ(error.what(), "from " + std::to_string(thrower));
    }
  }
  Visits visits(50);
  pool_.parallel_for(50, [&](int64_t i, int) { visits.add(i); });
  EXPECT_TRUE(visits.all_are(1));
}

TEST_P(ThreadPoolOf, WhenAllThreadsThrowOneExceptionArrives) {
  EXPECT_THROW(pool_.run([](int) { throw InvalidArgument("no"); }), InvalidArgument);
  EXPECT_THROW(pool_.parallel_for(1, [](int64_t, int) { throw InvalidArgument("no"); }),
               InvalidArgument);
  EXPECT_NO_THROW(pool_.run([](int) {}));
}

TEST_P(ThreadPoolOf, ManyJobsInARowSeeEachOthersWrites) {
  int64_t plain = 0;  // not atomic: each job must see what the last one wrote
  std::atomic<int64_t> sum{0};
  for (int job = 0; job < 2000; ++job) {
    pool_.run([&](int thread) {
      sum.fetch_add(1, std::memory_order_relaxed);
      if (thread == job % GetParam()) ++plain;
    });
  }
  EXPECT_EQ(plain, 2000);
  EXPECT_EQ(sum.load(), 2000 * GetParam());
}

TEST_P(ThreadPoolOf, WorkersThatWentToSleepWakeUp) {
  for (int i = 0; i < 5; ++i) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    Visits visits(GetParam());
    pool_.run([&](int thread) {
      std::this_thread::sleep_for(std::chrono::microseconds(200 * thread));  // the caller waits
      visits.add(thread);
    });
    EXPECT_TRUE(visits.all_are(1));
  }
}

TEST(ThreadPool, SmallJobsCallNoMoreThreadsThanTheyHaveIndices) {
  ThreadPool pool(4);
  std::atomic<int64_t> sum{0};
  for (int64_t job = 1; job <= 2000; ++job) {
    pool.parallel_for(2, [&](int64_t i, int thread) {
      EXPECT_LT(thread, 2);
      sum += i + 1;
    });
  }
  EXPECT_EQ(sum, 2000 * 3);
}

TEST(ThreadPool, NestedCallsKeepTheThreadsNumber) {
  ThreadPool pool(3);
  pool.run([&](int outer) {
    pool.parallel_for(5, [&](int64_t, int inner) { EXPECT_EQ(inner, outer); });
    pool.parallel_for(1, [&](int64_t, int inner) { EXPECT_EQ(inner, outer); });
    pool.parallel_ranges(7, 2, [&](int64_t, int64_t, int inner) { EXPECT_EQ(inner, outer); });
  });
}

TEST(ThreadPool, CallersFromSeveralThreadsTakeTurns) {
  ThreadPool pool(3);
  int64_t plain = 0;  // guarded by taking turns
  std::vector<std::thread> callers;
  for (int c = 0; c < 4; ++c) {
    callers.emplace_back([&] {
      for (int i = 0; i < 100; ++i) {
        pool.run([&](int thread) {
          if (thread == 0) ++plain;
        });
        pool.parallel_for(1, [&](int64_t, int) { ++plain; });
      }
    });
  }
  for (std::thread& caller : callers) caller.join();
  EXPECT_EQ(plain, 800);
}

TEST(ThreadPool, TwoPoolsWorkInsideEachOther) {
  ThreadPool outer(2);
  ThreadPool inner(3);
  Visits visits(3);
  outer.run([&](int thread) {
    if (thread == 1) inner.run([&](int i) { visits.add(i); });
  });
  EXPECT_TRUE(visits.all_are(1));
}

TEST(ThreadPool, IsDestroyedWhileWorkersSpinOrSleep) {
  for (int i = 0; i < 50; ++i) {
    ThreadPool pool(4);
    if (i % 3 != 0) pool.run([](int) {});
    if (i % 5 == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}

TEST(ThreadPool, ImpossibleSizesAreRefused) {
  EXPECT_THROW(ThreadPool(-1), InvalidArgument);
  try {
    ThreadPool pool(ThreadPool::kMaxThreads + 1);
    FAIL();
  } catch (const InvalidArgument& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("1025"), message.npos) << message;
    EXPECT_NE(message.find("1024"), message.npos) << message;
  }
}

TEST(ThreadPool, ZeroMeansTheDefault) {
  EXPECT_GE(default_num_threads(), 1);
  EXPECT_LE(default_num_threads(), ThreadPool::kMaxThreads);
  EXPECT_EQ(ThreadPool(0).num_threads(), default_num_threads());
  EXPECT_EQ(ThreadPool(5).num_threads(), 5);
}

TEST(ThreadPool, AGrainOfZeroIsAnInternalError) {
  ThreadPool pool(2);
  EXPECT_THROW(pool.parallel_ranges(8, 0, [](int64_t, int64_t, int) {}), std::logic_error);
}

int64_t address_space_in_use() {
  std::ifstream file("/proc/self/statm");
  int64_t pages = 0;
  file >> pages;
  return pages * sysconf(_SC_PAGESIZE);
}

// Ends the process: 0 when the pool says that it could not start all its threads.
[[noreturn]] void start_too_many_threads() {
  const auto room = static_cast<rlim_t>(address_space_in_use()) + (256u << 20);
  const rlimit limit{room, room};  // enough for some stacks of 8 MiB
  setrlimit(RLIMIT_AS, &limit);
  try {
    const ThreadPool pool(ThreadPool::kMaxThreads);
  } catch (const DeviceError& error) {
    std::fputs(error.what(), stderr);
    std::_Exit(0);
  }
  std::_Exit(1);
}

TEST(ThreadPool, AThreadThatCannotStartIsADeviceErrorAndTheOthersEnd) {
  if (address_space_in_use() > int64_t{1} << 40) GTEST_SKIP() << "a sanitizer needs the space";
  EXPECT_EXIT(start_too_many_threads(), ::testing::ExitedWithCode(0),
              "could start only .* of 1024");
}

TEST(ThreadPool, RunsCoverEveryIndexOnceInAscendingPieces) {
  for (const int threads : {1, 2, 3, 8}) {
    ThreadPool pool(threads);
    for (const int64_t count : {0, 1, 2, 7, 64, 1000}) {
      std::vector<std::atomic<int>> hits(static_cast<size_t>(count));
      std::atomic<int64_t> first_length{0};
      pool.parallel_runs(count, [&](int64_t begin, int64_t end, int thread) {
        EXPECT_LT(begin, end);
        EXPECT_LT(thread, threads);
        if (begin == 0) first_length = end;
        for (int64_t i = begin; i < end; ++i) ++hits[static_cast<size_t>(i)];
      });
      for (const auto& hit : hits) EXPECT_EQ(hit, 1);
      EXPECT_EQ(first_length, count == 0 ? 0 : std::max<int64_t>(1, count / (2 * threads)));
    }
  }
}

}  // namespace
}  // namespace cadre

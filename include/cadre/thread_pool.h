// A small pool of persistent threads. The caller is thread 0 and works too; the others spin a
// little, then sleep.
#pragma once

#include <cstdint>
#include <memory>

#include "cadre/function_ref.h"

namespace cadre {

/// Physical cores this process may use: the affinity mask, capped by the cgroup's CPU quota. At
/// least 1.
int default_num_threads();

class ThreadPool {
 public:
  /// 0 means default_num_threads(). Throws InvalidArgument when negative or above kMaxThreads.
  explicit ThreadPool(int num_threads = 0);
  ~ThreadPool();
  ThreadPool(const ThreadPool&) = delete;
  ThreadPool& operator=(const ThreadPool&) = delete;

  int num_threads() const;

  /// Calls fn(thread) once on every thread, thread in [0, num_threads), and returns when all are
  /// done. The first exception is rethrown here. Calls from several threads take turns; a call from
  /// inside a task runs all indices inline. A task may use another pool, but from inside that one's
  /// tasks there is no way back: the first pool would wait for itself.
  void run(FunctionRef<void(int thread)> fn);

  /// Calls fn(i, thread) for every i in [0, count); indices are handed out one by one in ascending
  /// order to the threads that are there: one that the system keeps waiting delays nobody. Wakes no
  /// more threads than there are indices. `thread` is unique among the calls that run at a time.
  void parallel_for(int64_t count, FunctionRef<void(int64_t i, int thread)> fn);

  /// parallel_for over at most num_threads() contiguous ranges that make up [0, count), each but
  /// the last a multiple of `grain` long: fn(begin, end, thread).
  void parallel_ranges(int64_t count, int64_t grain,
                       FunctionRef<void(int64_t begin, int64_t end, int thread)> fn);

  /// Every i in [0, count) in runs of consecutive ones: fn(begin, end, thread). Runs are handed out
  /// in ascending order, long ones first, so that a thread mostly goes on where it was and all end
  /// together.
  void parallel_runs(int64_t count, FunctionRef<void(int64_t begin, int64_t end, int thread)> fn);

  static constexpr int kMaxThreads = 1024;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cadre

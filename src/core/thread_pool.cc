// One job at a time. The caller opens the gate for a job and knocks at the workers it can use; they
// spin on their own number for a while and then sleep on it (std::atomic::wait, a futex on Linux).
// Whoever comes in takes tasks until there are none. The caller then shuts the gate and waits only
// for those inside, so a worker that the system has not woken yet delays nobody. A fork and join of
// spinning threads costs well under a microsecond, which a decode step with two joins per layer
// needs.
#include "cadre/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <deque>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// Long enough to bridge the gap between two kernels of a layer, short enough not to burn a core
// that has nothing to do.
constexpr auto kSpinTime = std::chrono::microseconds(50);

void pause_cpu() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#endif
}

// Returns once `value` differs from `old`.
template <typename T>
void wait_for_change(const std::atomic<T>& value, T old) {
  const auto start = std::chrono::steady_clock::now();
  while (value.load(std::memory_order_acquire) == old) {
    for (int i = 0; i < 64 && value.load(std::memory_order_relaxed) == old; ++i) pause_cpu();
    if (std::chrono::steady_clock::now() - start > kSpinTime) {
      value.wait(old, std::memory_order_acquire);
      return;
    }
  }
}

// Distinct sets of sibling threads among the CPUs of the affinity mask: two hyper-threads count
// once.
int physical_cores_allowed() {
  cpu_set_t mask;
  CPU_ZERO(&mask);
  if (sched_getaffinity(0, sizeof(mask), &mask) != 0)
    return static_cast<int>(std::thread::hardware_concurrency());
  std::set<std::string> cores;
  int unknown = 0;
  for (int cpu = 0; cpu < CPU_SETSIZE; ++cpu) {
    if (!CPU_ISSET(cpu, &mask)) continue;
    std::ifstream file(
        str_cat("/sys/devices/system/cpu/cpu", cpu, "/topology/thread_siblings_list"));
    std::string siblings;
    if (file >> siblings) {
      cores.insert(siblings);
    } else {
      ++unknown;
    }
  }
  return static_cast<int>(cores.size()) + unknown;
}

constexpr double kNoQuota = ThreadPool::kMaxThreads;

// Cores of one "quota period" pair of numbers; a quota that is no positive number is none.
double cores_of(double quota, double period) {
  return quota > 0 && period > 0 ? quota / period : kNoQuota;
}

// Version 2: the quota of our group and of every group above it.
double cgroup_v2_cores() {
  std::ifstream groups("/proc/self/cgroup");  // "0::/user.slice/..." among other lines
  std::filesystem::path group = "/";
  for (std::string line; std::getline(groups, line);) {
    if (line.starts_with("0::/")) group = line.substr(3);
  }
  double cores = kNoQuota;
  while (true) {
    std::ifstream file("/sys/fs/cgroup" + (group / "cpu.max").string());
    double quota = 0;
    double period = 0;
    if (file >> quota >> period) cores = std::min(cores, cores_of(quota, period));  // not for "max"
    if (!group.has_relative_path()) return cores;
    group = group.parent_path();
  }
}

double cgroup_v1_cores() {
  std::ifstream quota_file("/sys/fs/cgroup/cpu/cpu.cfs_quota_us");
  std::ifstream period_file("/sys/fs/cgroup/cpu/cpu.cfs_period_us");
  double quota = 0;
  double period = 0;
  return quota_file >> quota && period_file >> period ? cores_of(quota, period) : kNoQuota;
}

}  // namespace

int default_num_threads() {
  const double quota = std::min(cgroup_v1_cores(), cgroup_v2_cores());
  return std::clamp(std::min(physical_cores_allowed(), static_cast<int>(quota)), 1,
                    ThreadPool::kMaxThreads);
}

struct ThreadPool::State {
  struct alignas(64) Worker {
    std::atomic<uint32_t> knock{0};  // number of the last job that wants this worker
    std::thread thread;
  };

  std::deque<Worker> workers;
  std::mutex callers;  // one job at a time
  uint32_t last_job = 0;
  // Upper half: number of the job whose gate is open, 0 = shut. Lower half: workers inside.
  std::atomic<uint64_t> gate{0};
  std::atomic<uint32_t> finished{0};  // workers that have run the current job
  std::atomic<bool> stop{false};
  const FunctionRef<void(int)>* job = nullptr;
  std::mutex error_mutex;
  std::exception_ptr error;

  static thread_local const State* inside;  // the pool whose task this thread runs
  static thread_local int inside_as;        // and as which of its threads

  // Marks this thread as inside a task of the pool.
  class Inside {
   public:
    Inside(const State* state, int thread)
        : outer_(std::exchange(inside, state)), outer_as_(std::exchange(inside_as, thread)) {}
    ~Inside() {
      inside = outer_;
      inside_as = outer_as_;
    }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    const State* outer_;
    int outer_as_;
  };

  void call(const FunctionRef<void(int)>& fn, int thread) {
    const Inside here(this, thread);
    try {
      fn(thread);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  // A job too small to wake anybody for: on the caller alone, in turn with the other callers.
  void call_alone(FunctionRef<void(int thread)> fn) {
    if (inside == this) return fn(inside_as);
    const std::lock_guard lock(callers);
    const Inside here(this, 0);
    fn(0);
  }

  // Runs fn on the caller and on up to `helpers` workers; with `all`, on every one of them.
  void fork_join(const FunctionRef<void(int)>& fn, size_t helpers, bool all) {
    const std::lock_guard lock(callers);
    error = nullptr;
    job = &fn;
    finished.store(0, std::memory_order_relaxed);
    if (++last_job == 0) last_job = 1;
    gate.store(uint64_t{last_job} << 32, std::memory_order_release);
    for (size_t i = 0; i < helpers; ++i) {
      workers[i].knock.store(last_job, std::memory_order_release);
      workers[i].knock.notify_one();
    }
    call(fn, 0);
    if (all) {
      for (uint32_t n; (n = finished.load(std::memory_order_acquire)) < helpers;) {
        wait_for_change(finished, n);
      }
    }
    gate.fetch_and(kInside, std::memory_order_acq_rel);
    for (uint64_t left; (left = gate.load(std::memory_order_acquire)) != 0;) {
      wait_for_change(gate, left);
    }
    if (error) std::rethrow_exception(std::exchange(error, nullptr));
  }

  // False when the job's gate is shut already.
  bool enter(uint32_t number) {
    uint64_t state = gate.load(std::memory_order_acquire);
    while (state >> 32 == number) {
      if (gate.compare_exchange_weak(state, state + 1, std::memory_order_acq_rel)) return true;
    }
    return false;
  }

  void leave() {
    finished.fetch_add(1, std::memory_order_acq_rel);
    finished.notify_one();
    gate.fetch_sub(1, std::memory_order_acq_rel);
    gate.notify_one();
  }

  void work(Worker& self, int thread) {
    uint32_t seen = 0;
    while (true) {
      wait_for_change(self.knock, seen);
      seen = self.knock.load(std::memory_order_acquire);
      if (stop.load(std::memory_order_acquire)) return;
      if (!enter(seen)) continue;
      call(*job, thread);
      leave();
    }
  }

  void stop_workers() {
    stop.store(true, std::memory_order_release);
    for (Worker& worker : workers) {
      worker.knock.fetch_add(1, std::memory_order_release);
      worker.knock.notify_one();
    }
    for (Worker& worker : workers) {
      if (worker.thread.joinable()) worker.thread.join();
    }
  }

  static constexpr uint64_t kInside = 0xffffffffu;
};

thread_local const ThreadPool::State* ThreadPool::State::inside = nullptr;
thread_local int ThreadPool::State::inside_as = 0;

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw InvalidArgument(str_cat("threads: expected 1 to ", kMaxThreads,
                                  " (0 = as many as there are cores), got ", num_threads));
  }
  if (num_threads == 0) num_threads = default_num_threads();
  try {
    for (int i = 1; i < num_threads; ++i) {
      State::Worker& worker = state_->workers.emplace_back();
      worker.thread = std::thread([state = state_.get(), &worker, i] { state->work(worker, i); });
    }
  } catch (const std::system_error& error) {
    const size_t started = state_->workers.size();
    state_->stop_workers();
    throw DeviceError(str_cat("threads: could start only ", started, " of ", num_threads, ": ",
                              error.code().message(),
                              "; use fewer threads or raise the limit on processes and memory"));
  }
}

ThreadPool::~ThreadPool() { state_->stop_workers(); }

int ThreadPool::num_threads() const { return static_cast<int>(state_->workers.size()) + 1; }

void ThreadPool::run(FunctionRef<void(int)> fn) {
  State& state = *state_;
  if (State::inside == &state) {  // nested: the other threads are busy with the outer task
    for (int i = 0; i < num_threads(); ++i) fn(i);
    return;
  }
  state.fork_join(fn, state.workers.size(), true);
}

void ThreadPool::parallel_for(int64_t count, FunctionRef<void(int64_t, int)> fn) {
  if (count <= 0) return;
  if (count == 1) return state_->call_alone([&](int thread) { fn(0, thread); });
  State& state = *state_;
  std::atomic<int64_t> next{0};
  const auto take_tasks = [&](int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(i, thread);
  };
  if (State::inside == &state) return take_tasks(State::inside_as);
  const auto helpers = std::min(state.workers.size(), static_cast<size_t>(count - 1));
  state.fork_join(take_tasks, helpers, false);
}

void ThreadPool::parallel_ranges(int64_t count, int64_t grain,
                                 FunctionRef<void(int64_t, int64_t, int)> fn) {
  CADRE_ASSERT(grain > 0);
  if (count <= 0) return;
  const int64_t units = (count - 1) / grain + 1;
  const int64_t parts = std::min<int64_t>(num_threads(), units);
  const int64_t share = (units + parts - 1) / parts * grain;
  parallel_for((count - 1) / share + 1, [&](int64_t part, int thread) {
    const int64_t begin = share * part;
    fn(begin, std::min(count, begin + share), thread);
  });
}

void ThreadPool::parallel_runs(int64_t count, FunctionRef<void(int64_t, int64_t, int)> fn) {
  if (count <= 0) return;
  std::atomic<int64_t> next{0};
  const auto take_run = [&](int thread) {
    int64_t begin = next.load(std::memory_order_relaxed);
    int64_t end = 0;
    do {
      if (begin >= count) return false;
      end = begin + std::max<int64_t>(1, (count - begin) / (2 * num_threads()));
    } while (!next.compare_exchange_weak(begin, end, std::memory_order_relaxed));
    fn(begin, end, thread);
    return true;
  };
  parallel_for(std::min<int64_t>(num_threads(), count), [&](int64_t, int thread) {
    while (take_run(thread)) {
    }
  });
}

}  // namespace cadre

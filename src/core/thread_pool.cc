// One job at a time: the caller publishes it by raising a generation number, workers spin on that
// number for a while and then sleep on it (std::atomic::wait, a futex on Linux). A fork and join of
// spinning threads costs well under a microsecond, which a decode step with two joins per layer
// needs.
#include "cadre/thread_pool.h"

#include <sched.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <exception>
#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

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
void wait_for_change(const std::atomic<uint32_t>& value, uint32_t old) {
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
  std::vector<std::thread> workers;
  std::mutex callers;  // one job at a time
  std::atomic<uint32_t> generation{0};
  std::atomic<uint32_t> unfinished{0};  // workers still in the job
  std::atomic<bool> stop{false};
  const FunctionRef<void(int)>* job = nullptr;
  std::mutex error_mutex;
  std::exception_ptr error;

  static thread_local const State* inside;  // the pool whose task this thread runs

  // Marks this thread as inside a task of the pool.
  class Inside {
   public:
    explicit Inside(const State* state) : outer_(std::exchange(inside, state)) {}
    ~Inside() { inside = outer_; }
    Inside(const Inside&) = delete;
    Inside& operator=(const Inside&) = delete;

   private:
    const State* outer_;
  };

  void call(const FunctionRef<void(int)>& fn, int thread) {
    const Inside here(this);
    try {
      fn(thread);
    } catch (...) {
      const std::lock_guard lock(error_mutex);
      if (!error) error = std::current_exception();
    }
  }

  // A job too small to wake anybody for: on the caller alone, in turn with the other callers.
  void call_alone(FunctionRef<void()> fn) {
    if (inside == this) return fn();
    const std::lock_guard lock(callers);
    const Inside here(this);
    fn();
  }

  void stop_workers() {
    stop = true;
    generation.fetch_add(1, std::memory_order_release);
    generation.notify_all();
    for (std::thread& worker : workers) worker.join();
  }

  void work(int thread) {
    uint32_t seen = 0;
    while (true) {
      wait_for_change(generation, seen);
      ++seen;
      if (stop.load(std::memory_order_acquire)) return;
      call(*job, thread);
      if (unfinished.fetch_sub(1, std::memory_order_acq_rel) == 1) unfinished.notify_one();
    }
  }
};

thread_local const ThreadPool::State* ThreadPool::State::inside = nullptr;

ThreadPool::ThreadPool(int num_threads) : state_(std::make_unique<State>()) {
  if (num_threads < 0 || num_threads > kMaxThreads) {
    throw InvalidArgument(str_cat("threads: expected 1 to ", kMaxThreads,
                                  " (0 = as many as there are cores), got ", num_threads));
  }
  if (num_threads == 0) num_threads = default_num_threads();
  state_->workers.reserve(static_cast<size_t>(num_threads - 1));
  try {
    for (int i = 1; i < num_threads; ++i) {
      state_->workers.emplace_back([state = state_.get(), i] { state->work(i); });
    }
  } catch (const std::system_error& error) {
    const size_t started = state_->workers.size() + 1;
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
  const std::lock_guard lock(state.callers);
  state.error = nullptr;
  if (!state.workers.empty()) {
    state.job = &fn;
    state.unfinished.store(static_cast<uint32_t>(state.workers.size()), std::memory_order_relaxed);
    state.generation.fetch_add(1, std::memory_order_release);
    state.generation.notify_all();
  }
  state.call(fn, 0);
  for (uint32_t left; (left = state.unfinished.load(std::memory_order_acquire)) != 0;) {
    wait_for_change(state.unfinished, left);
  }
  if (state.error) std::rethrow_exception(std::exchange(state.error, nullptr));
}

void ThreadPool::parallel_for(int64_t count, FunctionRef<void(int64_t, int)> fn) {
  if (count <= 0) return;
  if (count == 1) return state_->call_alone([&] { fn(0, 0); });
  std::atomic<int64_t> next{0};
  run([&](int thread) {
    for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) fn(i, thread);
  });
}

void ThreadPool::parallel_ranges(int64_t count, int64_t grain,
                                 FunctionRef<void(int64_t, int64_t, int)> fn) {
  CADRE_ASSERT(grain > 0);
  if (count <= 0) return;
  if (count <= grain) return state_->call_alone([&] { fn(0, count, 0); });
  const int64_t threads = num_threads();
  const int64_t units = (count - 1) / grain + 1;
  const int64_t share = (units + threads - 1) / threads * grain;
  run([&](int thread) {
    const int64_t begin = share * thread;
    const int64_t end = std::min(count, begin + share);
    if (begin < end) fn(begin, end, thread);
  });
}

}  // namespace cadre

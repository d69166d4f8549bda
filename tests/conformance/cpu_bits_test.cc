// On the CPU the same token gives the same bits whatever the batch, the threads and the backend;
// and a forward takes no memory from the heap.
#include <gtest/gtest.h>

#include <cstring>

#include "cadre/thread_pool.h"
#include "conformance/checker.h"
#include "support/allocation_counter.h"

namespace cadre::test {
namespace {

constexpr DType kDTypes[] = {DType::kF32, DType::kBF16, DType::kF16};

// Sizes off every tile and chunk edge; 300 tokens, so that experts see blocks of many sizes.
CaseParams params_for(DType dtype) {
  CaseParams p;
  p.num_tokens = 300;
  p.config.num_experts = 5;
  p.config.top_k = 3;
  p.config.hidden_size = 150;
  p.config.intermediate_size = 139;
  p.config.has_bias = true;
  p.compute_dtype = dtype;
  p.routing = Routing::kSentinels;
  p.output_f32 = true;
  return p;
}

bool same_bits(const std::vector<double>& a, const double* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(double)) == 0;
}

TEST(CpuBits, ATokenHasTheSameBitsInEveryBatch) {
  ThreadPool pool(1);
  for (const DType dtype : kDTypes) {
    ExpertsCase c(params_for(dtype));
    for (const BackendEntry& entry : runnable_backends()) {
      const auto all =
          run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), Stream::cpu(pool));
      for (const int64_t batch : {1, 2, 7, 64, 300}) {
        for (int64_t begin = 0; begin + batch <= 300; begin += std::max<int64_t>(batch, 37)) {
          const auto some = run_backend(*entry.backend, c.query(), c.weights(),
                                        c.slice(begin, begin + batch), Stream::cpu(pool));
          EXPECT_TRUE(same_bits(some, all.data() + begin * 150))
              << entry.name << " " << name_of(dtype) << " batch " << batch << " from " << begin;
        }
      }
    }
  }
}

TEST(CpuBits, BackendsAndThreadCountsGiveTheSameBits) {
  for (const DType dtype : kDTypes) {
    ExpertsCase c(params_for(dtype));
    ThreadPool one(1);
    const auto expected = run_backend(find_backend("eager", DeviceType::kCpu), c.query(),
                                      c.weights(), c.tokens(), Stream::cpu(one));
    for (const int threads : {1, 2, 7, 16}) {  // 16: more threads than experts
      ThreadPool pool(threads);
      for (const char* name : {"eager", "batched_mm", "grouped_mm"}) {
        const auto out = run_backend(find_backend(name, DeviceType::kCpu), c.query(), c.weights(),
                                     c.tokens(), Stream::cpu(pool));
        EXPECT_TRUE(same_bits(out, expected.data())) << name << ", " << threads << " threads";
      }
    }
  }
}

// More pairs than the result memory holds columns for, and more tokens than one chunk takes.
TEST(CpuBits, LargeCallsInChunksGiveTheSameBits) {
  struct Size {
    int64_t tokens, hidden, intermediate;
  };
  ThreadPool pool(2);
  for (const Size size : {Size{9000, 200, 4}, Size{70000, 2, 3}}) {
    CaseParams p = params_for(DType::kBF16);
    p.num_tokens = size.tokens;
    p.config.top_k = 8;
    p.config.num_experts = 9;
    p.config.hidden_size = size.hidden;
    p.config.intermediate_size = size.intermediate;
    ExpertsCase c(p);
    ExpertsBackend& backend = find_backend("grouped_mm", DeviceType::kCpu);
    const auto all = run_backend(backend, c.query(), c.weights(), c.tokens(), Stream::cpu(pool));
    for (const int64_t begin : {int64_t{0}, size.tokens / 2, size.tokens - 50}) {
      const auto some = run_backend(backend, c.query(), c.weights(), c.slice(begin, begin + 50),
                                    Stream::cpu(pool));
      EXPECT_TRUE(same_bits(some, all.data() + begin * size.hidden))
          << size.tokens << ", " << begin;
    }
  }
}

TEST(CpuBits, AForwardTakesNoMemoryFromTheHeap) {
  ThreadPool pool(2);
  for (const DType dtype : kDTypes) {
    ExpertsCase c(params_for(dtype));
    const RoutedTokens tokens = c.tokens();
    for (const BackendEntry& entry : runnable_backends()) {
      const auto prepared = entry.backend->prepare(c.query(), c.weights());
      Workspace workspace({}, entry.backend->workspace_bytes(c.query(), 300, 2));
      entry.backend->forward(*prepared, tokens, workspace, Stream::cpu(pool));
      const AllocationCounter counter;
      entry.backend->forward(*prepared, tokens, workspace, Stream::cpu(pool));
      const int64_t count = counter.count();
      EXPECT_EQ(count, 0) << entry.name << " " << name_of(dtype);
      EXPECT_EQ(workspace.used(), 0u);
    }
  }
}

TEST(CpuBits, TheWorkspaceIsAskedForExactly) {
  ThreadPool pool(3);
  for (const BackendEntry& entry : runnable_backends()) {
    for (const int64_t tokens : {1, 5, 300}) {
      CaseParams p = params_for(DType::kBF16);
      p.num_tokens = tokens;
      ExpertsCase c(p);
      const auto prepared = entry.backend->prepare(c.query(), c.weights());
      const size_t bytes = entry.backend->workspace_bytes(c.query(), tokens, 3);
      Workspace enough({}, bytes);
      EXPECT_NO_THROW(entry.backend->forward(*prepared, c.tokens(), enough, Stream::cpu(pool)));
      if (entry.name != "eager" && entry.name != "batched_mm" && entry.name != "grouped_mm") {
        continue;  // exactness is a promise of ours, not of every backend
      }
      Workspace less({}, bytes - Workspace::kAlignment);
      EXPECT_THROW(entry.backend->forward(*prepared, c.tokens(), less, Stream::cpu(pool)),
                   std::logic_error)
          << entry.name;
    }
  }
}

}  // namespace
}  // namespace cadre::test

// Quantised experts on the CPU: a token has the same bits whatever the batch, the threads and the
// backend; a forward takes no memory from the heap, and the workspace it asked for is enough.
#include <gtest/gtest.h>

#include <cstring>

#include "cadre/error.h"
#include "cadre/thread_pool.h"
#include "conformance/checker.h"
#include "support/allocation_counter.h"

namespace cadre::test {
namespace {

struct Format {
  StorageFormat format;
  ScaleLayout layout;
  ActivationScheme activations;
};
const Format kFormats[] = {
    {StorageFormat::kFp8Block, {DType::kF32, 128, 128}, ActivationScheme::kDynamic},
    {StorageFormat::kFp8Block, {DType::kF8E8M0, 96, 64}, ActivationScheme::kDynamic},
    {StorageFormat::kFp8Tensor, {DType::kF32, 0, 0}, ActivationScheme::kDynamic},
    {StorageFormat::kMxFp8, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone},
    {StorageFormat::kFp4, {DType::kF8E8M0, 1, 32}, ActivationScheme::kNone}};

constexpr int64_t kTokens = 120;

CaseParams params_for(const Format& format, DType dtype) {
  CaseParams p;
  p.num_tokens = kTokens;
  p.config = {.num_experts = 5, .hidden_size = 198, .intermediate_size = 139, .top_k = 3};
  p.config.has_bias = true;
  p.compute_dtype = dtype;
  p.routing = Routing::kSentinels;
  p.output_f32 = true;
  p.quantized = format.format;
  p.scale_layout = format.layout;
  p.activations = format.activations;
  return p;
}

// body(case, backend entry) for each format, compute dtype and backend that serves it.
template <typename Body>
void for_each_backend(Body body) {
  for (const Format& format : kFormats) {
    for (const DType dtype : {DType::kF32, DType::kBF16, DType::kF16}) {
      const ExpertsCase c(params_for(format, dtype));
      for (const BackendEntry& entry : runnable_backends()) {
        if (!entry.backend->supports(c.query())) continue;
        SCOPED_TRACE(entry.name + " " + describe(c.params()));
        body(c, entry);
      }
    }
  }
}

bool same_bits(const std::vector<double>& a, const double* b) {
  return std::memcmp(a.data(), b, a.size() * sizeof(double)) == 0;
}

TEST(CpuQuantized, ATokenHasTheSameBitsInEveryBatchAndWithEveryNumberOfThreads) {
  ThreadPool one(1), three(3), more(7);  // 7: more threads than experts
  for_each_backend([&](const ExpertsCase& c, const BackendEntry& entry) {
    const auto all =
        run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), Stream::cpu(one));
    for (ThreadPool* pool : {&three, &more}) {
      EXPECT_TRUE(same_bits(
          run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), Stream::cpu(*pool)),
          all.data()))
          << pool->num_threads() << " threads";
    }
    for (const int64_t batch : {1, 2, 7, 64}) {
      for (int64_t begin = 0; begin + batch <= kTokens; begin += std::max<int64_t>(batch, 23)) {
        const auto some = run_backend(*entry.backend, c.query(), c.weights(),
                                      c.slice(begin, begin + batch), Stream::cpu(one));
        EXPECT_TRUE(same_bits(some, all.data() + begin * c.params().config.hidden_size))
            << "batch " << batch << " from " << begin;
      }
    }
  });
}

TEST(CpuQuantized, BackendsOfOneArithmeticGiveTheSameBits) {
  ThreadPool pool(2);
  for_each_backend([&](const ExpertsCase& c, const BackendEntry& entry) {
    if (entry.name != "batched_mm" && entry.name != "eager") return;
    const auto expected = run_backend(find_backend("grouped_mm", DeviceType::kCpu), c.query(),
                                      c.weights(), c.tokens(), Stream::cpu(pool));
    EXPECT_TRUE(same_bits(
        run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), Stream::cpu(pool)),
        expected.data()));
  });
}

TEST(CpuQuantized, AForwardTakesNoMemoryFromTheHeap) {
  ThreadPool pool(2);
  for_each_backend([&](const ExpertsCase& c, const BackendEntry& entry) {
    const RoutedTokens tokens = c.tokens();
    const auto prepared = entry.backend->prepare(c.query(), c.weights());
    Workspace workspace({}, entry.backend->workspace_bytes(c.query(), kTokens, 2));
    entry.backend->forward(*prepared, tokens, workspace, Stream::cpu(pool));
    const AllocationCounter counter;
    entry.backend->forward(*prepared, tokens, workspace, Stream::cpu(pool));
    EXPECT_EQ(counter.count(), 0);
    EXPECT_EQ(workspace.used(), 0u);
  });
}

// A packed form, where there is one for the format, changes no bit.
TEST(CpuQuantized, ThePackedFormGivesTheSameBits) {
  ThreadPool pool(2);
  for_each_backend([&](const ExpertsCase& c, const BackendEntry& entry) {
    auto packed = std::make_shared<ExpertsWeights>(*c.weights());
    try {
      prepack(c.params().config, *packed, pool);
    } catch (const Unsupported&) {
      return;  // read in place
    }
    const auto in_place =
        run_backend(*entry.backend, c.query(), c.weights(), c.tokens(), Stream::cpu(pool));
    EXPECT_TRUE(
        same_bits(run_backend(*entry.backend, c.query(), packed, c.tokens(), Stream::cpu(pool)),
                  in_place.data()));
  });
}

}  // namespace
}  // namespace cadre::test

// Sampling on the GPU against the host's Sampler: the same token where the rules leave no choice,
// the host's probabilities where they do.
#include <cmath>
#include <limits>

#include "backends/cuda/dense/ops_fixture.h"
#include "cadre/generation.h"

namespace cadre::cuda {
namespace {

class GpuSample : public GpuOpsTest {
 protected:
  std::vector<int32_t> sample(const TensorView& logits, const SamplingOptions& options,
                              const std::vector<double>& uniform = {},
                              const TensorView& history = {},
                              const std::vector<int32_t>& lengths = {}) {
    const int64_t rows = logits.dim(0);
    const Tensor gpu_logits = to_gpu(logits);
    const Tensor gpu_uniform = to_gpu(vector_tensor(DType::kF64, uniform).view());
    const Tensor gpu_history = history ? to_gpu(history) : Tensor();
    const Tensor gpu_lengths = to_gpu(vector_tensor(DType::kI32, lengths).view());
    const Tensor ids = poisoned(DType::kI32, {rows});
    SampleArgs args;
    args.logits = gpu_logits.view();
    args.temperature = options.temperature;
    args.top_k = options.top_k;
    args.top_p = options.top_p;
    args.min_p = options.min_p;
    args.repetition_penalty = options.repetition_penalty;
    if (history) args.history = gpu_history.view();
    args.history_lengths = gpu_lengths.view();
    args.uniform = gpu_uniform.view();
    args.ids = ids;
    Workspace exact(kGpu, ops_->sample_workspace_bytes(rows, logits.dim(1)));
    ops_->sample(args, exact, stream_);
    const Tensor host = to_host(ids.view());
    return {host->as<int32_t>(), host->as<int32_t>() + rows};
  }

  // The id that the host's probabilities give for a uniform number, and how far that number is from
  // the next id.
  static std::pair<int32_t, double> expected(const TensorView& row, const SamplingOptions& options,
                                             double uniform,
                                             const std::vector<TokenId>& history = {}) {
    std::vector<float> logits(row.as<float>(), row.as<float>() + row.numel());
    Sampler sampler(options);
    double sum = 0;
    for (const auto& [id, p] : sampler.probabilities(logits, history)) {
      sum += p;
      if (uniform < sum) return {id, std::min(sum - uniform, uniform - (sum - p))};
    }
    return {-2, 0};
  }
};

// What a draw leaves for the step after it.
TEST_F(GpuSample, TheNextStepBeginsWithWhatWasDrawn) {
  constexpr int64_t kVocab = 5000;
  const Tensor all = random(DType::kF32, {3, kVocab});
  std::fill_n(all->as<float>() + kVocab, kVocab, NAN);  // the second row gives no token
  const Tensor uniform = to_gpu(vector_tensor<double>(DType::kF64, {0.5, 0.5, 0.5}).view());
  const std::vector<SequenceSpan> sequences = {{4, 0, 1, 7}, {0, 1, 1, 8}, {2, 2, 1, 0}};
  for (const int64_t rows : {2, 3}) {
    for (const float temperature : {0.0f, 1.0f}) {
      const auto n = static_cast<size_t>(rows);
      const GpuTokens tokens = gpu_tokens({sequences.begin(), sequences.begin() + rows}, stream_);
      const Tensor logits = to_gpu(all->slice(0, rows));
      const Tensor ids = poisoned(DType::kI32, {rows});
      const Tensor token_ids = poisoned(DType::kI32, {rows});
      const auto host = runtime_->allocate_pinned(2 * n * sizeof(int32_t));
      auto* drawn = static_cast<int32_t*>(host.get());
      std::fill_n(drawn, 2 * n, -2);
      SampleArgs args;
      args.logits = logits.view();
      args.temperature = temperature;
      args.uniform = uniform->slice(0, rows);
      args.ids = ids;
      args.next = {token_ids, tokens.positions, tokens.spans, drawn};
      ops_->sample(args, *workspace_, stream_);
      const std::vector<double> id = values(ids.view());
      EXPECT_EQ(id[1], -1);
      std::vector<double> next_ids, positions, spans, on_host(2 * n, -2);
      for (size_t i = 0; i < n; ++i) {
        const SequenceSpan& s = sequences[i];
        next_ids.push_back(std::max(id[i], 0.0));
        positions.push_back(static_cast<double>(s.past + 1));
        for (const int64_t x : {s.slot, s.first_row, s.num_tokens, s.past + 1}) {
          spans.push_back(static_cast<double>(x));
        }
        on_host[static_cast<size_t>(s.past % 2) * n + i] = id[i];
      }
      EXPECT_EQ(values(token_ids.view()), next_ids);
      EXPECT_EQ(values(tokens.positions.view()), positions);
      EXPECT_EQ(values(tokens.spans.view()), spans);
      EXPECT_EQ(std::vector<double>(drawn, drawn + 2 * n), on_host);
    }
  }
}

TEST_F(GpuSample, GreedyTakesTheLargestAndOfEqualsTheFirst) {
  for (const int64_t vocab : {1, 5, 4096, 4097, 151936}) {
    const Tensor logits = random(DType::kF32, {5, vocab});
    std::vector<int32_t> best(5, 0);
    for (int64_t r = 0; r < 5; ++r) {
      float* row = logits->as<float>() + r * vocab;
      if (vocab > 4 && r == 1) row[2] = row[vocab - 1] = 50;
      if (vocab > 4 && r == 2) row[0] = NAN, row[3] = -0.0f;
      if (vocab > 4 && r == 3) row[vocab - 2] = std::numeric_limits<float>::infinity();
      if (r == 4) std::fill_n(row, vocab, -std::numeric_limits<float>::infinity());
      Sampler sampler({});
      std::vector<float> copy(row, row + vocab);
      best[static_cast<size_t>(r)] = sampler.next(copy, {});
    }
    EXPECT_EQ(sample(logits.view(), {}), best);
    for (int64_t r = 0; r < 4; ++r) {  // few rows take another kernel
      EXPECT_EQ(sample(logits->slice(r, r + 2), {}),
                std::vector<int32_t>(best.begin() + r, best.begin() + r + 2));
    }
  }
}

TEST_F(GpuSample, ARowOfNaNGivesNoToken) {
  const Tensor logits = random(DType::kF32, {3, 100});
  for (int64_t i = 0; i < 100; ++i) set(logits, 100 + i, NAN);
  for (const float temperature : {0.0f, 1.0f}) {
    const auto ids = sample(logits.view(), {.temperature = temperature}, {0.5, 0.5, 0.5});
    EXPECT_EQ(ids[1], -1);
    EXPECT_TRUE(ids[0] >= 0 && ids[0] < 100 && ids[2] >= 0 && ids[2] < 100);
    EXPECT_EQ(sample(logits->slice(1, 2), {.temperature = temperature}, {0.5}),
              std::vector<int32_t>{-1});
  }
}

TEST_F(GpuSample, DrawsWhatTheHostsProbabilitiesGive) {
  std::uniform_real_distribution<double> uniform(0, 1);
  const SamplingOptions cases[] = {
      {.temperature = 1},
      {.temperature = 0.7f, .top_k = 20},
      {.temperature = 1.3f, .top_p = 0.8f},
      {.temperature = 1, .min_p = 0.05f},
      {.temperature = 0.9f, .top_k = 50, .top_p = 0.95f, .min_p = 0.01f},
      {.temperature = 1, .top_p = 0},
      {.temperature = 1, .top_k = 1},
      {.temperature = 1e-30f},
      {.temperature = 1, .top_k = 7, .repetition_penalty = 1.7f},
      {.temperature = 0, .repetition_penalty = 3.0f},
  };
  for (const int64_t vocab : {3, 1000, 50257}) {
    for (const SamplingOptions& options : cases) {
      constexpr int64_t kRows = 16;
      const Tensor logits = random(DType::kF32, {kRows, vocab}, 3);
      // Equal values, so that cuts fall among them.
      for (int64_t i = 0; i < logits->numel(); i += 2) {
        set(logits, i, std::round(logits->as<float>()[i]));
      }
      for (int64_t i = 5; i < logits->numel(); i += 1001) set(logits, i, NAN);
      std::vector<double> numbers(kRows);
      for (double& u : numbers) u = uniform(random_);
      const std::vector<int32_t> lengths(kRows, 9);
      Tensor history(DType::kI32, {kRows, 10});
      for (int64_t i = 0; i < 10 * kRows; ++i) {
        history->as<int32_t>()[i] = static_cast<int32_t>(random_() % static_cast<uint64_t>(vocab));
      }
      const auto got = sample(logits.view(), options, numbers, history.view(), lengths);
      for (int64_t r = 0; r < kRows; ++r) {
        const int32_t* ids = history->as<int32_t>() + r * 10;
        const auto [id, margin] =
            expected(logits.view()[r], options, numbers[static_cast<size_t>(r)],
                     std::vector<TokenId>(ids, ids + 9));
        if (margin > 1e-8) {
          ASSERT_EQ(got[static_cast<size_t>(r)], id)
              << "vocab " << vocab << " case " << &options - cases << " row " << r;
        }
      }
    }
  }
}

TEST_F(GpuSample, TheCpuSendsToSampler) {
  Workspace none;
  EXPECT_THROW(dense_ops(DeviceType::kCpu).sample({}, none, {}), std::logic_error);
  EXPECT_EQ(dense_ops(DeviceType::kCpu).sample_workspace_bytes(1, 10), 0u);
}

}  // namespace
}  // namespace cadre::cuda

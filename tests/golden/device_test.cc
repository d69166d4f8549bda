// What models on a GPU do beyond giving the right numbers: recorded decode steps, the decode
// stage's backend, logits on either side, switching, faults.
#include <gtest/gtest.h>

#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "cadre/generation.h"
#include "cadre/model.h"
#include "golden/model_runs.h"
#include "support/compare.h"
#include "support/test_device.h"

namespace cadre::test {
namespace {

class DeviceModel : public testing::Test {
 protected:
  void SetUp() override {
    if (!on_gpu()) GTEST_SKIP() << "about GPUs";
    CADRE_SKIP_WITHOUT_DEVICE();
  }

  static LoadOptions options() { return {.device = test_device(), .dtype = DType::kBF16}; }
  static std::unique_ptr<Model> load(const LoadOptions& options) {
    return Model::from_pretrained(fixture("qwen3_moe").string(), options);
  }
  static const std::vector<TokenId>& prompt() {
    static const std::vector<TokenId> ids = {5, 9, 2, 7, 11, 3};
    return ids;
  }
  static std::vector<std::vector<TokenId>> one_prompt() { return {prompt()}; }
  static std::vector<std::vector<TokenId>> continuations(Model& model, int64_t batch) {
    const std::vector<std::vector<TokenId>> prompts(static_cast<size_t>(batch), prompt());
    return generate(model, prompts, {.max_new_tokens = 24, .ignore_eos = true}).token_ids;
  }
};

// Logits of `steps` decode steps after the prompt, each step with another token.
std::vector<float> decode_logits(Model& model, const std::vector<TokenId>& prompt, int steps) {
  const int64_t vocab = model.info().vocab_size;
  const auto cache = model.new_cache(1, static_cast<int64_t>(prompt.size()) + steps);
  std::vector<float> all;
  std::vector<float> logits(static_cast<size_t>(vocab));
  const MutableTensorView view(logits.data(), DType::kF32, {1, vocab});
  const int64_t count = static_cast<int64_t>(prompt.size());
  model.forward({prompt, {&count, 1}}, *cache, view);
  for (int step = 0; step < steps; ++step) {
    const TokenId id = (7 * step + 1) % static_cast<TokenId>(vocab);
    const int64_t one = 1;
    model.forward({{&id, 1}, {&one, 1}}, *cache, view);
    all.insert(all.end(), logits.begin(), logits.end());
  }
  return all;
}

TEST_F(DeviceModel, ReplayedStepsEqualLaunchedOnes) {
  for (const char* backend : {"batched_mm", "grouped_mm"}) {
    LoadOptions with = options();
    with.experts_implementation = backend;
    with.decode_experts = {DecodeExperts::kOff};
    LoadOptions without = with;
    without.graphs = false;
    const auto replayed = load(with);
    const auto launched = load(without);
    const std::vector<float> first = decode_logits(*replayed, prompt(), 100);
    EXPECT_EQ(first, decode_logits(*launched, prompt(), 100)) << backend;
    EXPECT_EQ(first, decode_logits(*replayed, prompt(), 100)) << backend << ", again";
  }
}

TEST_F(DeviceModel, BatchesOfManySizesReplay) {
  LoadOptions without = options();
  without.graphs = false;
  const auto replayed = load(options());
  const auto launched = load(without);
  for (const int64_t batch : {1, 3, 8, 1, 3}) {
    EXPECT_EQ(continuations(*replayed, batch), continuations(*launched, batch)) << batch;
  }
}

// A model with graphs begins with a step while the host looks at the tokens of the one before.
TEST_F(DeviceModel, StepsBegunAheadChangeNothing) {
  LoadOptions without = options();
  without.graphs = false;
  const auto ahead = load(options());
  const auto plain = load(without);
  const std::vector<std::vector<TokenId>> prompts = {{5, 9, 2}, {7, 11, 3, 1, 4}, {8}};
  for (const float temperature : {0.0f, 1.0f}) {
    GenerationOptions generation{.max_new_tokens = 40, .ignore_eos = true};
    generation.sampling.temperature = temperature;
    generation.sampling.seed = 11;
    const auto all = generate(*plain, prompts, generation).token_ids;
    EXPECT_EQ(generate(*ahead, prompts, generation).token_ids, all) << temperature;
    // Sequences that end one after the other, at tokens that nobody knew before.
    generation.ignore_eos = false;
    generation.eos_token_ids = {all[0][7], all[1][15], all[2][11]};
    const GenerationResult stopped = generate(*ahead, prompts, generation);
    const GenerationResult expected = generate(*plain, prompts, generation);
    EXPECT_EQ(stopped.token_ids, expected.token_ids) << temperature;
    EXPECT_EQ(stopped.finish_reasons, expected.finish_reasons) << temperature;
    // Ended by the caller: no token comes after that.
    int calls = 0;
    const auto stop = [&](int64_t, TokenId) { return ++calls < 10; };
    const auto one = generate(*ahead, {prompts.data(), 1}, {.max_new_tokens = 40}, stop);
    EXPECT_EQ(calls, static_cast<int>(one.token_ids[0].size()));
  }
}

// Whatever is asked for after a step that said another one follows, it gets what it asked for.
TEST_F(DeviceModel, AStepBegunInVainIsForgotten) {
  const auto model = load(options());
  LoadOptions without = options();
  without.graphs = false;
  const auto plain = load(without);
  const int64_t one = 1;
  const auto start = [&](Model& m, KvCache& cache, int steps) {
    const auto count = static_cast<int64_t>(prompt().size());
    TokenId next = 0;
    m.forward_and_sample({prompt(), {&count, 1}}, cache, {}, {&next, 1});
    for (int i = 0; i < steps; ++i) {
      m.forward_and_sample({{&next, 1}, {&one, 1}}, cache, {.options = {}, .goes_on = true},
                           {&next, 1});
    }
    return next;
  };
  const auto step = [&](Model& m, KvCache& cache, TokenId id) {
    TokenId next = 0;
    m.forward_and_sample({{&id, 1}, {&one, 1}}, cache, {}, {&next, 1});
    return next;
  };
  const auto follow = [&](Model& m) {
    std::vector<TokenId> got;
    const auto cache = m.new_cache(1, 64);
    const TokenId next = start(m, *cache, 4);
    got.push_back(step(m, *cache, next));
    got.push_back(start(m, *cache, 4));
    got.push_back(step(m, *cache, 17));  // another token
    start(m, *cache, 3);
    cache->truncate(0, cache->length(0) - 2);
    got.push_back(step(m, *cache, 3));
    start(m, *cache, 3);
    const auto other = m.new_cache(1, 64);
    got.push_back(start(m, *other, 2));
    m.set_experts_implementation("grouped_mm");
    got.push_back(step(m, *other, 5));
    m.set_experts_implementation("batched_mm");
    start(m, *other, 3);
    m.reserve(8192);
    got.push_back(step(m, *other, 6));
    start(m, *other, 3);
    for (const float logit : decode_logits(m, prompt(), 3)) {
      got.push_back(static_cast<TokenId>(logit * 1000));
    }
    return got;
  };
  EXPECT_EQ(follow(*model), follow(*plain));
  auto cache = model->new_cache(1, 11);  // full after this
  const TokenId last = start(*model, *cache, 5);
  cache.reset();
  cache = model->new_cache(1, 11);
  EXPECT_EQ(start(*model, *cache, 5), last);
  EXPECT_THROW(step(*model, *cache, last), InvalidArgument);
  auto doomed = load(options());
  cache = doomed->new_cache(1, 64);
  start(*doomed, *cache, 3);
  doomed.reset();
}

TEST_F(DeviceModel, SmallStepsOfGroupedMmTakeBatchedMm) {
  LoadOptions at_four = options();
  at_four.experts_implementation = "grouped_mm";
  at_four.decode_experts = {4};
  const auto model = load(at_four);
  EXPECT_EQ(model->experts_of_step(4).at(""), "batched_mm");
  EXPECT_EQ(model->experts_of_step(5).at(""), "grouped_mm");
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");
  const GenerationResult result =
      generate(*model, one_prompt(), {.max_new_tokens = 4, .ignore_eos = true});
  EXPECT_EQ(result.prefill_experts, "grouped_mm");
  EXPECT_EQ(result.decode_experts, "batched_mm");
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");

  LoadOptions off = options();
  off.experts_implementation = "grouped_mm";
  off.decode_experts = {DecodeExperts::kOff};
  EXPECT_EQ(generate(*load(off), one_prompt(), {.max_new_tokens = 2}).decode_experts, "grouped_mm");
  LoadOptions eager = options();
  eager.experts_implementation = "eager";
  EXPECT_EQ(generate(*load(eager), one_prompt(), {.max_new_tokens = 2}).decode_experts, "eager");
}

TEST_F(DeviceModel, TheDecodeStageIsOverAfterAnError) {
  LoadOptions grouped = options();
  grouped.experts_implementation = "grouped_mm";
  const auto model = load(grouped);
  const auto stop = [](int64_t, TokenId) -> bool { throw std::runtime_error("stop"); };
  EXPECT_THROW(generate(*model, one_prompt(), {.max_new_tokens = 8}, stop), std::runtime_error);
  EXPECT_EQ(model->get_experts_implementation().at(""), "grouped_mm");
  EXPECT_EQ(model->experts_of_step(100000).at(""), "grouped_mm");
}

TEST_F(DeviceModel, LogitsMayLieOnEitherSide) {
  const auto model = load(options());
  const int64_t vocab = model->info().vocab_size;
  const auto count = static_cast<int64_t>(prompt().size());
  const Tensor device(DType::kF32, {count, vocab}, test_device());
  const auto cache = model->new_cache(1, count);
  model->forward({prompt(), {&count, 1}, LogitsRows::kAll}, *cache, device);
  std::vector<float> copy(static_cast<size_t>(count * vocab));
  DeviceRuntime& runtime = device_runtime(test_device());
  const auto stream = runtime.make_stream(test_device().index, nullptr);
  runtime.copy(copy.data(), device->data(), copy.size() * sizeof(float), stream->get());
  runtime.synchronize(stream->get());
  EXPECT_EQ(copy, all_logits(*model, prompt(), 1));
}

TEST_F(DeviceModel, SwitchingBackAndForthKeepsResults) {
  const auto model = load(options());
  std::vector<std::vector<float>> first;
  for (int round = 0; round < 3; ++round) {
    size_t i = 0;
    for (const char* backend : {"grouped_mm", "eager", "batched_mm"}) {
      model->set_experts_implementation(backend);
      const std::vector<float> logits = decode_logits(*model, prompt(), 6);
      if (round == 0) {
        first.push_back(logits);
      } else {
        EXPECT_EQ(logits, first[i]) << backend;
      }
      ++i;
    }
  }
}

// The draw on the device is the draw of the host's Sampler for the same numbers.
TEST_F(DeviceModel, DrawsWhatTheHostDraws) {
  LoadOptions float32 = options();
  float32.dtype = DType::kF32;
  const auto model = load(float32);
  const int64_t vocab = model->info().vocab_size;
  const std::vector<int64_t> counts = {static_cast<int64_t>(prompt().size())};
  std::vector<float> logits(static_cast<size_t>(vocab));
  const MutableTensorView view(logits.data(), DType::kF32, {1, vocab});
  for (const SamplingOptions& sampling :
       {SamplingOptions{},
        {.temperature = 1.0f},
        {.temperature = 0.7f, .top_k = 20},
        {.temperature = 1.3f, .top_p = 0.8f},
        {.temperature = 1.0f, .min_p = 0.01f},
        {.temperature = 0.9f, .top_k = 50, .top_p = 0.9f, .min_p = 0.001f}}) {
    Sampler host(sampling);
    Sampler numbers(sampling);
    for (int draw = 0; draw < 20; ++draw) {
      auto cache = model->new_cache(1, counts[0]);
      model->forward({prompt(), counts}, *cache, view);
      const double uniform = sampling.temperature == 0.0f ? 0 : numbers.uniform();
      cache = model->new_cache(1, counts[0]);
      TokenId next = -2;
      model->forward_and_sample({prompt(), counts}, *cache, {sampling, {&uniform, 1}}, {&next, 1});
      EXPECT_EQ(next, host.next(logits, prompt()));
    }
  }
}

TEST_F(DeviceModel, MemoryIsReported) {
  const auto model = load(options());
  model->reserve(64);
  const MemoryReport memory = model->memory();
  EXPECT_EQ(memory.mapped_bytes, 0u);
  EXPECT_GT(memory.weights_bytes, 0u);
  EXPECT_GT(memory.workspace_bytes, 0u);
  EXPECT_EQ(memory.added_bytes, 0u) << "backends read parameters in place";
}

template <typename E>
std::string message_of(const LoadOptions& options) {
  try {
    Model::from_pretrained(fixture("qwen3_moe").string(), options);
  } catch (const E& error) {
    return error.what();
  }
  ADD_FAILURE() << "nothing was thrown";
  return {};
}

TEST_F(DeviceModel, RefusalsSayWhy) {
  LoadOptions packed = options();
  packed.prepack = Prepack::kOn;
  EXPECT_NE(message_of<Unsupported>(packed).find("CPU"), std::string::npos);
  LoadOptions far = options();
  far.device.index = 99;
  EXPECT_NE(message_of<DeviceError>(far).find("cuda:99"), std::string::npos);
}

TEST_F(DeviceModel, ACacheThatDoesNotFitIsRefused) {
  const auto model = load(options());
  try {
    model->new_cache(int64_t{1} << 32, model->info().max_position_embeddings);
    FAIL();
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("keys and values"), std::string::npos);
    EXPECT_NE(std::string(error.what()).find(to_string(options().device)), std::string::npos);
  }
}

}  // namespace
}  // namespace cadre::test

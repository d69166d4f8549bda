// The loop around a model, on a model whose answers can be foretold: the next token is the sum of
// all tokens so far modulo the vocabulary; then the bundled model against Transformers.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <numeric>

#include "cadre/error.h"
#include "cadre/generation.h"

namespace cadre {
namespace {

using Prompts = std::vector<std::vector<TokenId>>;

constexpr int64_t kVocab = 11;

struct Call {
  std::vector<TokenId> ids;
  std::vector<int64_t> counts;
};

class SumCache : public KvCache {
 public:
  SumCache(int64_t sequences, int64_t max_tokens)
      : tokens(static_cast<size_t>(sequences)), max_tokens_(max_tokens) {}
  int64_t num_sequences() const override { return static_cast<int64_t>(tokens.size()); }
  int64_t max_tokens() const override { return max_tokens_; }
  int64_t length(int64_t sequence) const override {
    return static_cast<int64_t>(tokens[static_cast<size_t>(sequence)].size());
  }
  size_t bytes() const override { return 0; }
  void truncate(int64_t sequence, int64_t length) override {
    const bool goes_far = length != 0 && this->length(sequence) - length > 1;
    if (keeps_latest_only && goes_far) throw Unsupported("truncate");
    tokens[static_cast<size_t>(sequence)].resize(static_cast<size_t>(length));
  }
  Prompts tokens;
  bool keeps_latest_only = false;

 private:
  int64_t max_tokens_;
};

class SumModel : public Model {
 public:
  explicit SumModel(int64_t context = 100) {
    info_.vocab_size = kVocab;
    info_.max_position_embeddings = context;
    info_.path = "sum-model";
  }
  const ModelInfo& info() const override { return info_; }
  MemoryReport memory() const override { return {}; }
  std::unique_ptr<KvCache> new_cache(int64_t sequences, int64_t max_tokens) override {
    cache_tokens.push_back(max_tokens);
    auto cache = std::make_unique<SumCache>(sequences, max_tokens);
    cache->keeps_latest_only = keeps_latest_only;
    return cache;
  }
  void reserve(int64_t /*max_tokens*/) override {}
  void forward(const ForwardInput& input, KvCache& cache, MutableTensorView logits,
               const MoeHooks* /*hooks*/) override {
    calls.push_back({{input.token_ids.begin(), input.token_ids.end()},
                     {input.num_tokens.begin(), input.num_tokens.end()}});
    auto& tokens = static_cast<SumCache&>(cache).tokens;
    const TokenId* next = input.token_ids.data();
    for (size_t i = 0; i < input.num_tokens.size(); ++i) {
      if (input.num_tokens[i] == 0) continue;
      tokens[i].insert(tokens[i].end(), next, next + input.num_tokens[i]);
      next += input.num_tokens[i];
      ASSERT_LE(static_cast<int64_t>(tokens[i].size()), cache.max_tokens());
      float* row = logits.as<float>() + static_cast<int64_t>(i) * kVocab;
      std::fill(row, row + kVocab, 0.5f);
      if (calls.size() >= nan_from_call) {
        std::fill(row, row + kVocab, std::numeric_limits<float>::quiet_NaN());
        continue;
      }
      row[std::accumulate(tokens[i].begin(), tokens[i].end(), 0) % kVocab] = 1.0f;
    }
    EXPECT_EQ(next, input.token_ids.data() + input.token_ids.size());
  }
  ExpertsImplementation get_experts_implementation() const override { return implementation; }
  void set_experts_implementation(const ExpertsImplementation& map) override {
    implementation = map;
  }
  void set_experts_implementation(std::string_view name) override {
    implementation = {{"", std::string(name)}};
  }
  ExpertsQuery experts_query(std::string_view /*sub_config*/) const override { return {}; }

  void set_eos(std::vector<TokenId> ids) { info_.eos_token_ids = std::move(ids); }

  std::vector<Call> calls;
  bool keeps_latest_only = false;
  size_t nan_from_call = 1000;
  std::vector<int64_t> cache_tokens;
  ExpertsImplementation implementation = {{"", "eager"}};

 private:
  ModelInfo info_;
};

std::vector<TokenId> foretold(std::vector<TokenId> ids, int count) {
  const auto begin = ids.size();
  for (int i = 0; i < count; ++i) {
    ids.push_back(std::accumulate(ids.begin(), ids.end(), 0) % kVocab);
  }
  return {ids.begin() + static_cast<std::ptrdiff_t>(begin), ids.end()};
}

GenerationOptions up_to(int64_t max_new_tokens) {
  GenerationOptions options;
  options.max_new_tokens = max_new_tokens;
  return options;
}

TEST(Generate, ContinuesRaggedPromptsInOnePrefillAndOneTokenASteps) {
  SumModel model;
  const Prompts prompts = {{1, 2, 3}, {4}, {5, 6}};
  const auto result = generate(model, prompts, up_to(4));
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(result.token_ids[i], foretold(prompts[i], 4));
    EXPECT_EQ(result.finish_reasons[i], FinishReason::kLength);
  }
  ASSERT_EQ(model.calls.size(), 4u);
  EXPECT_EQ(model.calls[0].counts, (std::vector<int64_t>{3, 1, 2}));
  EXPECT_EQ(model.calls[1].counts, (std::vector<int64_t>{1, 1, 1}));
  EXPECT_EQ(model.cache_tokens, std::vector<int64_t>{7});
  EXPECT_EQ(result.prompt_tokens, 6);
  EXPECT_EQ(result.decode_tokens, 9);
  EXPECT_GE(result.prefill_seconds, 0);
  EXPECT_GE(result.decode_seconds, 0);
}

TEST(Generate, StopsEachSequenceAtAnyEosAndSkipsItFromThenOn) {
  SumModel model;
  const Prompts prompts = {{1, 2}, {4, 6}};  // 3 6 1 ..., 10 9 7 3 ...
  auto options = up_to(4);
  options.eos_token_ids = {0, 6};
  const auto result = generate(model, prompts, options);
  EXPECT_EQ(result.token_ids[0], (std::vector<TokenId>{3, 6}));
  EXPECT_EQ(result.finish_reasons[0], FinishReason::kEos);
  EXPECT_EQ(result.token_ids[1], foretold({4, 6}, 4));
  EXPECT_EQ(result.finish_reasons[1], FinishReason::kLength);
  ASSERT_EQ(model.calls.size(), 4u);
  EXPECT_EQ(model.calls[2].counts, (std::vector<int64_t>{0, 1}));
  EXPECT_EQ(result.decode_tokens, 1 + 3);
}

TEST(Generate, WithoutAListTheModelsOwnEosStops) {
  SumModel model;
  model.set_eos({6});
  const auto result = generate(model, Prompts{{1, 2}}, up_to(5));
  EXPECT_EQ(result.token_ids[0], (std::vector<TokenId>{3, 6}));
  EXPECT_EQ(result.finish_reasons[0], FinishReason::kEos);
}

TEST(Generate, IgnoreEosRunsOn) {
  SumModel model;
  auto options = up_to(5);
  options.eos_token_ids = {3};
  options.ignore_eos = true;
  const auto result = generate(model, Prompts{{1, 2}}, options);
  EXPECT_EQ(result.token_ids[0], foretold({1, 2}, 5));
}

TEST(Generate, CallbackSeesEveryTokenAndStopsItsSequence) {
  SumModel model;
  std::vector<std::vector<TokenId>> seen(2);
  const auto callback = [&](int64_t sequence, TokenId id) {
    seen[static_cast<size_t>(sequence)].push_back(id);
    return !(sequence == 1 && seen[1].size() == 2);
  };
  const auto result = generate(model, Prompts{{1, 2}, {4, 5}}, up_to(4), callback);
  EXPECT_EQ(seen, result.token_ids);
  EXPECT_EQ(result.token_ids[0].size(), 4u);
  EXPECT_EQ(result.token_ids[1].size(), 2u);
  EXPECT_EQ(result.finish_reasons[1], FinishReason::kStopped);
}

TEST(Generate, EosWinsOverTheCallback) {
  SumModel model;
  auto options = up_to(4);
  options.eos_token_ids = {3};
  const auto result =
      generate(model, Prompts{{1, 2}}, options, [](int64_t, TokenId) { return false; });
  EXPECT_EQ(result.finish_reasons[0], FinishReason::kEos);
}

TEST(Generate, EndsAtTheContextWithACacheOfThatSize) {
  SumModel model(6);
  const auto result = generate(model, Prompts{{1, 2, 3, 4}, {1}, {1, 1, 1, 1, 1, 1}}, up_to(50));
  EXPECT_EQ(result.token_ids[0], foretold({1, 2, 3, 4}, 2));
  EXPECT_EQ(result.token_ids[1], foretold({1}, 5));
  EXPECT_TRUE(result.token_ids[2].empty());
  for (const auto reason : result.finish_reasons) EXPECT_EQ(reason, FinishReason::kLength);
  EXPECT_EQ(model.cache_tokens, std::vector<int64_t>{6});
}

TEST(Generate, NothingToDoRunsNothing) {
  SumModel model;
  EXPECT_TRUE(generate(model, Prompts{}, up_to(3)).token_ids.empty());
  const auto result = generate(model, Prompts{{1}}, up_to(0));
  EXPECT_TRUE(result.token_ids[0].empty());
  EXPECT_EQ(result.finish_reasons[0], FinishReason::kLength);
  EXPECT_TRUE(model.calls.empty());
}

TEST(Generate, NamesTheBackendOfEachStage) {
  SumModel model;
  auto result = generate(model, Prompts{{1}}, up_to(2));
  EXPECT_EQ(result.prefill_experts, "eager");
  EXPECT_EQ(result.decode_experts, "eager");
  model.implementation = {{"", ""}, {"text_config", "grouped_mm"}, {"vision_config", "eager"}};
  result = generate(model, Prompts{{1}}, up_to(2));
  EXPECT_EQ(result.prefill_experts, "text_config=grouped_mm, vision_config=eager");
}

TEST(Generate, SequencesDrawFromStreamsOfTheirOwn) {
  SumModel model;
  auto options = up_to(40);
  options.sampling.temperature = 100.0f;
  options.sampling.seed = 3;
  const Prompts prompts = {{1, 2}, {1, 2}};
  const auto first = generate(model, prompts, options);
  EXPECT_NE(first.token_ids[0], first.token_ids[1]);
  EXPECT_EQ(generate(model, prompts, options).token_ids, first.token_ids);
}

TEST(Generate, RepetitionPenaltyCountsThePrompt) {
  SumModel model;
  auto options = up_to(1);
  // 0 + 1 + 2 + 8 asks for 0, which occurs: its 1 falls to 0.25, below the 0.5 of what does not.
  const Prompts prompts = {{0, 1, 2, 8}};
  EXPECT_EQ(generate(model, prompts, options).token_ids[0][0], 0);
  options.sampling.repetition_penalty = 4.0f;
  EXPECT_EQ(generate(model, prompts, options).token_ids[0][0], 3);
}

// As on a GPU: gives tokens in place of logits, the same that Sampler would draw from them.
class DrawingModel : public SumModel {
 public:
  bool can_sample() const override { return true; }
  void forward_and_sample(const ForwardInput& input, KvCache& cache, const SampleRequest& request,
                          std::span<TokenId> next) override {
    ++num_draws;
    expect_promised(input, request);
    const auto rows = static_cast<int64_t>(input.num_tokens.size());
    std::vector<float> logits(input.num_tokens.size() * kVocab);
    SumModel::forward(input, cache, {logits.data(), DType::kF32, {rows, kVocab}}, nullptr);
    for (size_t i = 0; i < input.num_tokens.size(); ++i) {
      if (input.num_tokens[i] == 0) continue;
      const std::span<float> row(logits.data() + i * kVocab, kVocab);
      if (std::isnan(row[0])) {
        next[i] = -1;
      } else if (request.options.temperature == 0.0f) {
        next[i] = static_cast<TokenId>(std::max_element(row.begin(), row.end()) - row.begin());
      } else {
        next[i] = drawn(row, request.options, request.uniform[i]);
      }
    }
    goes_on_ = request.goes_on;
    num_goes_on += goes_on_;
    promised_counts_.assign(input.num_tokens.begin(), input.num_tokens.end());
    promised_ids_.assign(next.begin(), next.end());
    promised_uniform_.assign(request.next_uniform.begin(), request.next_uniform.end());
  }

  int num_draws = 0;
  int num_goes_on = 0;   // calls that another one was said to follow
  int num_followed = 0;  // that it did

 private:
  // A call with as many sequences as were running before is the one that was announced.
  void expect_promised(const ForwardInput& input, const SampleRequest& request) {
    std::vector<int64_t> expected;
    for (const int64_t count : promised_counts_) expected.push_back(std::min<int64_t>(count, 1));
    if (!goes_on_ || !std::equal(expected.begin(), expected.end(), input.num_tokens.begin())) {
      return;
    }
    ++num_followed;
    size_t token = 0;
    for (size_t i = 0; i < expected.size(); ++i) {
      if (expected[i] == 0) continue;
      EXPECT_EQ(input.token_ids[token++], promised_ids_[i]);
      if (promised_uniform_.empty()) continue;
      EXPECT_EQ(request.uniform[i], promised_uniform_[i]);
    }
  }

  static TokenId drawn(std::span<float> logits, const SamplingOptions& options, double uniform) {
    double sum = 0;
    for (const auto& [id, probability] : Sampler(options).probabilities(logits, {})) {
      sum += probability;
      if (uniform < sum) return id;
    }
    return kVocab - 1;
  }

  bool goes_on_ = false;
  std::vector<int64_t> promised_counts_;
  std::vector<TokenId> promised_ids_;
  std::vector<double> promised_uniform_;
};

TEST(Generate, AModelThatDrawsGetsTheNumbersOfEachSequence) {
  for (const float temperature : {0.0f, 1.0f, 100.0f}) {
    auto options = up_to(30);
    options.sampling.temperature = temperature;
    options.sampling.seed = 5;
    const Prompts prompts = {{1, 2}, {7}, {3, 3, 3}};
    SumModel model;
    model.set_eos({0});
    DrawingModel drawing;
    drawing.set_eos({0});
    EXPECT_EQ(generate(drawing, prompts, options).token_ids,
              generate(model, prompts, options).token_ids)
        << temperature;
    EXPECT_EQ(drawing.num_draws, static_cast<int>(drawing.calls.size()));
    EXPECT_GT(drawing.num_followed, 0) << temperature;
  }
}

TEST(Generate, AModelThatDrawsIsToldWhichStepsFollow) {
  auto options = up_to(5);
  options.ignore_eos = true;
  DrawingModel model;
  generate(model, Prompts{{1, 2}, {7}}, options);
  EXPECT_EQ(model.num_draws, 5);
  EXPECT_EQ(model.num_goes_on, 4) << "all but the last";
  EXPECT_EQ(model.num_followed, 4);
}

TEST(Generate, ARepetitionPenaltyIsDrawnFromLogits) {
  DrawingModel model;
  auto options = up_to(1);
  options.sampling.repetition_penalty = 4.0f;
  EXPECT_EQ(generate(model, Prompts{{0, 1, 2, 8}}, options).token_ids[0][0], 3);
  EXPECT_EQ(model.num_draws, 0);
}

TEST(Generate, ADrawFromNothingButNanBlamesTheModel) {
  DrawingModel model;
  model.nan_from_call = 1;
  EXPECT_THROW(generate(model, Prompts{{1}}, up_to(2)), CheckpointError);
}

TEST(Generate, ModelsThatGiveLogitsRefuseToDraw) {
  SumModel model;
  const auto cache = model.new_cache(1, 4);
  const std::vector<TokenId> ids = {1};
  const std::vector<int64_t> counts = {1};
  TokenId next = 0;
  EXPECT_FALSE(model.can_sample());
  EXPECT_THROW(model.forward_and_sample({ids, counts}, *cache, {}, {&next, 1}), Unsupported);
}

std::string refusal(const Prompts& prompts, const GenerationOptions& options) {
  SumModel model(4);
  try {
    generate(model, prompts, options);
  } catch (const InvalidArgument& error) {
    EXPECT_TRUE(model.calls.empty());
    return error.what();
  }
  return "accepted";
}

TEST(Generate, LogitsThatAreAllNanBlameTheModelByItsPath) {
  SumModel model;
  model.nan_from_call = 2;
  for (const float temperature : {0.0f, 1.0f}) {
    model.calls.clear();
    auto options = up_to(4);
    options.sampling.temperature = temperature;
    try {
      generate(model, Prompts{{1}, {2}}, options);
      ADD_FAILURE() << "no error";
    } catch (const CheckpointError& error) {
      for (const char* part :
           {"generate", "sequence 0", "11 are NaN", "weights", "config.json", "sum-model", "fetch"})
        EXPECT_NE(std::string(error.what()).find(part), std::string::npos) << error.what();
    }
    EXPECT_EQ(model.calls.size(), 2u);
  }
}

TEST(Generate, RefusesBadPromptsAndOptionsByName) {
  const auto expect = [](const std::string& message, std::initializer_list<const char*> parts) {
    for (const char* part : parts) EXPECT_NE(message.find(part), std::string::npos) << message;
  };
  expect(refusal({{1}, {}}, up_to(1)), {"generate", "prompt 1 is empty"});
  expect(refusal({{1, 1, 1, 1, 1}}, up_to(1)), {"has 5 tokens", "sum-model holds 4", "shorten"});
  expect(refusal({{1, 11}}, up_to(1)), {"prompt 0", "token 1 has id 11", "0 to 10"});
  expect(refusal({{-1}}, up_to(1)), {"has id -1"});
  expect(refusal({{1}}, up_to(-1)), {"max_new_tokens", "-1"});
  auto options = up_to(1);
  options.sampling.top_p = 7;
  expect(refusal({{1}}, options), {"top_p"});
}

std::vector<size_t> sizes_of(const std::vector<Call>& calls) {
  std::vector<size_t> sizes;
  for (const Call& call : calls) sizes.push_back(call.ids.size());
  return sizes;
}

TEST(GenerationSession, RunsOnlyWhatIsNewAndGivesTheSameTokens) {
  SumModel model;
  GenerationSession session(model);
  std::vector<TokenId> conversation = {1, 2, 3};
  auto result = session.generate(conversation, up_to(3));
  EXPECT_EQ(result.token_ids[0], foretold(conversation, 3));
  EXPECT_EQ(result.reused_tokens, 0);
  EXPECT_EQ(session.cached_tokens(), 5);  // the last token drawn was not run

  // The next turn begins with all that was said.
  conversation.insert(conversation.end(), result.token_ids[0].begin(), result.token_ids[0].end());
  conversation.insert(conversation.end(), {4, 5});
  model.calls.clear();
  result = session.generate(conversation, up_to(2));
  EXPECT_EQ(result.token_ids[0], foretold(conversation, 2));
  EXPECT_EQ(result.prompt_tokens, 8);
  EXPECT_EQ(result.reused_tokens, 5);
  EXPECT_EQ(sizes_of(model.calls), (std::vector<size_t>{3, 1}));
}

TEST(GenerationSession, ForgetsWhatDiffersAndRunsTheLastTokenInAnyCase) {
  SumModel model;
  GenerationSession session(model);
  session.generate({1, 2, 3, 4, 5}, up_to(1));
  const auto generate = [&](const std::vector<TokenId>& prompt) {
    model.calls.clear();
    const auto result = session.generate(prompt, up_to(1));
    EXPECT_EQ(result.token_ids[0], foretold(prompt, 1));
    EXPECT_EQ(model.calls[0].ids.size(), prompt.size() - static_cast<size_t>(result.reused_tokens));
    return result.reused_tokens;
  };
  EXPECT_EQ(generate({1, 2, 7, 4, 5}), 2);
  EXPECT_EQ(generate({1, 2, 7, 4, 5}), 4);
  EXPECT_EQ(generate({1, 2}), 1);
  EXPECT_EQ(generate({9}), 0);
}

TEST(GenerationSession, ModelsThatCannotGoBackSoFarBeginAgain) {
  SumModel model;
  model.keeps_latest_only = true;
  GenerationSession session(model);
  session.generate({1, 2, 3, 4, 5}, up_to(1));
  auto result = session.generate({1, 2, 3, 4, 6}, up_to(1));
  EXPECT_EQ(result.reused_tokens, 4);  // back by one
  result = session.generate({1, 2, 7}, up_to(1));
  EXPECT_EQ(result.reused_tokens, 0);
  EXPECT_EQ(result.token_ids[0], foretold({1, 2, 7}, 1));
}

TEST(GenerationSession, ALargerCacheTakesThePlaceOfAFullOne) {
  SumModel model(10'000);
  GenerationSession session(model);
  const auto reused = [&](int64_t prompt_tokens) {
    const std::vector<TokenId> prompt(static_cast<size_t>(prompt_tokens), 1);
    return session.generate(prompt, up_to(2)).reused_tokens;
  };
  EXPECT_EQ(reused(3), 0);
  EXPECT_EQ(reused(4094), 3);
  EXPECT_EQ(reused(4095), 0);  // with two more it does not fit any longer
  EXPECT_EQ(reused(4096), 4095);
  EXPECT_EQ(reused(9000), 0);
  EXPECT_EQ(model.cache_tokens, (std::vector<int64_t>{4096, 8192, 10'000}));
}

TEST(GenerationSession, ResetForgetsAndDrawsAsAtTheStart) {
  SumModel model;
  GenerationSession session(model);
  auto options = up_to(6);
  options.sampling.temperature = 50;
  const std::vector<TokenId> prompt = {1, 2, 3};
  const auto first = session.generate(prompt, options).token_ids;
  const auto second = session.generate(prompt, options).token_ids;
  session.reset();
  EXPECT_EQ(session.cached_tokens(), 0);
  const auto again = session.generate(prompt, options);
  EXPECT_EQ(again.reused_tokens, 0);
  EXPECT_EQ(again.token_ids, first);
  EXPECT_NE(second, first);  // a stream of its own for each call
}

TEST(GenerationSession, AnErrorLeavesAnEmptySession) {
  SumModel model;
  GenerationSession session(model);
  session.generate({1, 2, 3}, up_to(2));
  EXPECT_THROW(session.generate({}, up_to(2)), InvalidArgument);
  EXPECT_EQ(session.cached_tokens(), 4);  // nothing had begun
  model.nan_from_call = model.calls.size() + 1;
  EXPECT_THROW(session.generate({1, 2, 3, 4}, up_to(2)), CheckpointError);
  EXPECT_EQ(session.cached_tokens(), 0);
  model.nan_from_call = 1000;
  EXPECT_EQ(session.generate({1, 2, 3}, up_to(2)).token_ids[0], foretold({1, 2, 3}, 2));
}

TEST(GenerationSession, ImagesAreRefused) {
  SumModel model;
  auto options = up_to(1);
  const ImageGrid grid{};
  options.image_grids = {&grid, 1};
  EXPECT_THROW(GenerationSession(model).generate({1}, options), InvalidArgument);
}

TEST(GenerationSession, APromptThatFillsTheContextRunsNothing) {
  SumModel model(4);
  GenerationSession session(model);
  session.generate({1, 2}, up_to(1));
  model.calls.clear();
  EXPECT_TRUE(session.generate({1, 2, 3, 4}, up_to(3)).token_ids[0].empty());
  EXPECT_TRUE(model.calls.empty());
  EXPECT_THROW(session.generate({1, 2, 3, 4, 5}, up_to(1)), InvalidArgument);
}

}  // namespace
}  // namespace cadre

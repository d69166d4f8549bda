// The loop around a model: all prompts at once, then one token per unfinished sequence and step.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>

#include "cadre/error.h"
#include "cadre/generation.h"
#include "cadre/tensor.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void check_prompt(const std::vector<TokenId>& prompt, size_t number, const ModelInfo& info) {
  if (prompt.empty()) {
    throw InvalidArgument(str_cat("generate: prompt ", number,
                                  " is empty, expected at least one token; begin with some text"));
  }
  if (static_cast<int64_t>(prompt.size()) > info.max_position_embeddings) {
    throw InvalidArgument(str_cat("generate: prompt ", number, " has ", prompt.size(),
                                  " tokens, the context of ", info.path, " holds ",
                                  info.max_position_embeddings, "; shorten the prompt"));
  }
  for (size_t i = 0; i < prompt.size(); ++i) {
    if (prompt[i] >= 0 && prompt[i] < info.vocab_size) continue;
    throw InvalidArgument(str_cat("generate: prompt ", number, ": token ", i, " has id ", prompt[i],
                                  ", expected 0 to ", info.vocab_size - 1,
                                  "; the tokenizer does not belong to the model"));
  }
}

// One NaN for all is what a damaged weight leaves of every token.
[[noreturn]] void fail_on_nan(size_t number, const ModelInfo& info) {
  throw CheckpointError(str_cat("generate: sequence ", number, ": expected numbers as logits, all ",
                                info.vocab_size, " are NaN: the weights or config.json of ",
                                info.path, " are at fault (or ", name_of(info.compute_dtype),
                                " overflows: try float32); fetch the model again"));
}

void check_logits(std::span<const float> logits, size_t number, const ModelInfo& info) {
  const auto is_nan = [](float logit) { return std::isnan(logit); };
  if (std::all_of(logits.begin(), logits.end(), is_nan)) fail_on_nan(number, info);
}

// "grouped_mm", or with sub-configs "text_config=grouped_mm, vision_config=eager".
std::string experts_of(const Model& model, int64_t num_tokens) {
  const ExpertsImplementation map = model.experts_of_step(num_tokens);
  std::vector<std::string> parts;
  for (const auto& entry : map) {
    if (!entry.first.empty()) parts.push_back(str_cat(entry.first, "=", entry.second));
  }
  if (!parts.empty()) return join(parts);
  const auto whole = map.find("");
  return whole == map.end() ? std::string() : whole->second;
}

// How many tokens may follow `length` of them.
int64_t room_after(int64_t length, const GenerationOptions& options, const ModelInfo& info) {
  return std::min(options.max_new_tokens, info.max_position_embeddings - length);
}

void check_options(const GenerationOptions& options) {
  validate(options.sampling);
  if (options.max_new_tokens < 0) {
    throw InvalidArgument(
        str_cat("generate: max_new_tokens must be at least 0, got ", options.max_new_tokens));
  }
}

class Generation {
 public:
  Generation(Model& model, std::span<const std::vector<TokenId>> prompts,
             const GenerationOptions& options, const TokenCallback& on_token, uint64_t stream = 0)
      : model_(model), options_(options), on_token_(on_token) {
    for (size_t i = 0; i < prompts.size(); ++i) {
      const auto length = static_cast<int64_t>(prompts[i].size());
      sequences_.push_back({prompts[i], room_after(length, options, model.info()),
                            Sampler(options.sampling, stream + i)});
      result_.prompt_tokens += length;
    }
    result_.token_ids.resize(prompts.size());
    result_.finish_reasons.assign(prompts.size(), FinishReason::kLength);
    if (!any_running()) return;
    if (draws_on_device()) {
      next_.resize(prompts.size());
    } else {
      const auto count = static_cast<int64_t>(prompts.size());
      logits_ = Tensor(DType::kF32, {count, model.info().vocab_size});
    }
  }

  /// With a cache of its own.
  GenerationResult run() {
    if (!any_running()) return std::move(result_);
    int64_t longest = 0;
    for (const Sequence& sequence : sequences_) longest = std::max(longest, sequence.end());
    const auto cache = model_.new_cache(static_cast<int64_t>(sequences_.size()), longest);
    return run(*cache, 0);
  }

  /// The cache holds the first `reused` tokens of each prompt, less than all, and nothing else.
  GenerationResult run(KvCache& cache, int64_t reused) {
    if (!any_running()) return std::move(result_);
    cache_ = &cache;
    auto start = Clock::now();
    result_.reused_tokens = reused * static_cast<int64_t>(sequences_.size());
    result_.prefill_experts = experts_of(model_, result_.prompt_tokens - result_.reused_tokens);
    for (const Sequence& sequence : sequences_) {
      feed(sequence, std::span(sequence.ids).subspan(static_cast<size_t>(reused)));
    }
    pixel_values_ = options_.pixel_values;
    image_grids_ = options_.image_grids;
    step();
    pixel_values_ = {};
    image_grids_ = {};
    result_.prefill_seconds = seconds_since(start);
    start = Clock::now();
    result_.decode_experts = experts_of(model_, num_running());
    while (any_running()) {
      for (const Sequence& sequence : sequences_) {
        feed(sequence, std::span(sequence.ids).last(1));
        if (sequence.room > 0) ++result_.decode_tokens;
      }
      step();
    }
    result_.decode_seconds = seconds_since(start);
    return std::move(result_);
  }

 private:
  struct Sequence {
    std::vector<TokenId> ids;  // prompt and continuation
    int64_t room;              // tokens that may still come; 0: finished
    Sampler sampler;

    int64_t end() const { return static_cast<int64_t>(ids.size()) + room; }
  };

  int64_t num_running() const {
    return std::count_if(sequences_.begin(), sequences_.end(),
                         [](const Sequence& sequence) { return sequence.room > 0; });
  }
  bool any_running() const { return num_running() > 0; }

  void feed(const Sequence& sequence, std::span<const TokenId> ids) {
    if (sequence.room == 0) ids = {};
    input_.insert(input_.end(), ids.begin(), ids.end());
    counts_.push_back(static_cast<int64_t>(ids.size()));
  }

  ForwardInput forward_input() const {
    return {input_, counts_, LogitsRows::kLastOfEach, pixel_values_, image_grids_};
  }

  bool draws_on_device() const {
    return model_.can_sample() && options_.sampling.repetition_penalty == 1.0f;
  }

  // One forward of what was fed, then one new token for each running sequence.
  void step() {
    draws_on_device() ? draw_on_device() : draw_here();
    input_.clear();
    counts_.clear();
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].room > 0) accept(i, next_[i]);
    }
  }

  void draw_on_device() {
    SampleRequest request{options_.sampling, {}};
    if (options_.sampling.temperature != 0.0f) {
      if (uniform_.empty()) draw_numbers(uniform_);
      draw_numbers(next_uniform_);
      request.uniform = uniform_;
      request.next_uniform = next_uniform_;
    }
    // Unless a sequence ends with this token, which only its length tells before.
    request.goes_on = std::all_of(sequences_.begin(), sequences_.end(),
                                  [](const Sequence& sequence) { return sequence.room != 1; });
    model_.forward_and_sample(forward_input(), *cache_, request, next_);
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].room > 0 && next_[i] < 0) fail_on_nan(i, model_.info());
    }
    std::swap(uniform_, next_uniform_);
  }

  // One for each running sequence.
  void draw_numbers(std::vector<double>& numbers) {
    numbers.resize(sequences_.size());
    for (size_t i = 0; i < sequences_.size(); ++i) {
      if (sequences_[i].room > 0) numbers[i] = sequences_[i].sampler.uniform();
    }
  }

  void draw_here() {
    model_.forward(forward_input(), *cache_, logits_);
    const auto vocab = static_cast<size_t>(model_.info().vocab_size);
    next_.resize(sequences_.size());
    for (size_t i = 0; i < sequences_.size(); ++i) {
      Sequence& sequence = sequences_[i];
      if (sequence.room == 0) continue;
      const std::span<float> row(logits_->as<float>() + i * vocab, vocab);
      check_logits(row, i, model_.info());
      next_[i] = sequence.sampler.next(row, sequence.ids);
    }
  }

  void accept(size_t number, TokenId id) {
    Sequence& sequence = sequences_[number];
    sequence.ids.push_back(id);
    result_.token_ids[number].push_back(id);
    --sequence.room;
    const auto& eos =
        options_.eos_token_ids.empty() ? model_.info().eos_token_ids : options_.eos_token_ids;
    const bool wants_more = !on_token_ || on_token_(static_cast<int64_t>(number), id);
    if (!options_.ignore_eos && std::find(eos.begin(), eos.end(), id) != eos.end()) {
      finish(number, FinishReason::kEos);
    } else if (!wants_more) {
      finish(number, FinishReason::kStopped);
    }
  }

  void finish(size_t number, FinishReason reason) {
    sequences_[number].room = 0;
    result_.finish_reasons[number] = reason;
  }

  Model& model_;
  const GenerationOptions& options_;
  const TokenCallback& on_token_;
  std::vector<Sequence> sequences_;
  KvCache* cache_ = nullptr;
  Tensor logits_;  // [num_sequences, vocab_size] f32; empty when tokens are drawn on the device
  std::vector<TokenId> next_;         // [num_sequences]
  std::vector<double> uniform_;       // [num_sequences] for the next draw; empty before the first
  std::vector<double> next_uniform_;  // and for the one after it
  std::vector<TokenId> input_;
  std::vector<int64_t> counts_;
  std::span<const float> pixel_values_;  // of the step under way
  std::span<const ImageGrid> image_grids_;
  GenerationResult result_;
};

}  // namespace

void check_token_ids(std::span<const TokenId> ids, const Tokenizer& tokenizer,
                     const ModelInfo& info) {
  const auto id =
      std::find_if(ids.begin(), ids.end(), [&](TokenId token) { return token >= info.vocab_size; });
  if (id == ids.end()) return;
  throw CheckpointError(str_cat(info.path, "/tokenizer.json: expected ids below the model's ",
                                "vocab_size, ", info.vocab_size, " in config.json, got id ", *id,
                                " of ", quote(tokenizer.id_to_token(*id).value_or("")),
                                "; the tokenizer does not belong to the model, fetch it again"));
}

GenerationResult generate(Model& model, std::span<const std::vector<TokenId>> prompts,
                          const GenerationOptions& options, const TokenCallback& on_token) {
  check_options(options);
  for (size_t i = 0; i < prompts.size(); ++i) check_prompt(prompts[i], i, model.info());
  return Generation(model, prompts, options, on_token).run();
}

GenerationResult GenerationSession::generate(const std::vector<TokenId>& prompt,
                                             const GenerationOptions& options,
                                             const TokenCallback& on_token) {
  check_options(options);
  check_prompt(prompt, 0, model_->info());
  if (!options.image_grids.empty()) {
    throw InvalidArgument(
        "generate: a session takes text alone, got images; call cadre::generate() with them");
  }
  const auto length = static_cast<int64_t>(prompt.size());
  make_room(length + room_after(length, options, model_->info()));
  const auto differs =
      std::mismatch(cached_.begin(), cached_.end(), prompt.begin(), prompt.end() - 1).first;
  cached_.erase(differs, cached_.end());  // the last token runs in any case: it gives the logits
  try {
    cache_->truncate(0, cached_tokens());
  } catch (const Unsupported&) {  // some models cannot go back so far, but all can begin again
    cached_.clear();
    cache_->truncate(0, 0);
  }
  try {
    Generation generation(*model_, {&prompt, 1}, options, on_token, num_calls_++);
    GenerationResult result = generation.run(*cache_, cached_tokens());
    cached_ = prompt;
    cached_.insert(cached_.end(), result.token_ids[0].begin(), result.token_ids[0].end());
    cached_.resize(static_cast<size_t>(cache_->length(0)));  // the token drawn last was not run
    return result;
  } catch (...) {
    cached_.clear();
    cache_.reset();  // nobody knows how far the model came
    throw;
  }
}

void GenerationSession::reset() {
  cached_.clear();
  num_calls_ = 0;
}

// Caches do not grow: a larger one takes the place of the old, and all tokens run again. A first
// size for some turns (0.4 GB of a Qwen3-30B) and doubling keep that rare.
void GenerationSession::make_room(int64_t num_tokens) {
  constexpr int64_t kFirstTokens = 4096;
  const int64_t old = cache_ ? cache_->max_tokens() : kFirstTokens / 2;
  if (cache_ && num_tokens <= old) return;
  cached_.clear();
  cache_.reset();  // before the new one: there may not be memory for both
  const int64_t context = model_->info().max_position_embeddings;
  cache_ = model_->new_cache(1, std::min(std::max(num_tokens, 2 * old), context));
}

}  // namespace cadre

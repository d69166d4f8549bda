// DecoderModel's forwards: a forward is cut into steps, steps of decoding are recorded and
// replayed, and one may be begun before it is asked for.
#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "models/decoder_model.h"
#include "models/hook_observer.h"

namespace cadre {
namespace {

bool on_cpu(const ModelInfo& info) { return info.device.type == DeviceType::kCpu; }

// Whether a token takes the place of an older one, which cutting the sequence may ask for again.
bool keeps_latest_only(const KvShape& shape) {
  return std::any_of(shape.layers.begin(), shape.layers.end(), [](const CacheLayout& layer) {
    return std::any_of(layer.begin(), layer.end(),
                       [](const CacheTensor& tensor) { return tensor.fixed_rows != 0; });
  });
}

}  // namespace

DecoderCache& DecoderModel::check_input(const ForwardInput& input, KvCache& cache) const {
  auto* mine = dynamic_cast<DecoderCache*>(&cache);
  if (mine == nullptr || !mine->counts_in(cache_bytes_)) {
    throw InvalidArgument("forward: the cache was made by another model");
  }
  const int64_t sequences = mine->num_sequences();
  if (static_cast<int64_t>(input.num_tokens.size()) != sequences) {
    throw InvalidArgument(str_cat("forward: num_tokens has ", input.num_tokens.size(),
                                  " entries, the cache has ", sequences, " sequences"));
  }
  int64_t total = 0;
  for (int64_t s = 0; s < sequences; ++s) {
    const int64_t count = input.num_tokens[static_cast<size_t>(s)];
    const int64_t room = mine->max_tokens() - mine->store().length(s);
    if (count < 0 || count > room) {
      throw InvalidArgument(str_cat("forward: sequence ", s, ": ", count, " new tokens, room for ",
                                    room, " of ", mine->max_tokens(),
                                    "; make a larger cache or truncate this one"));
    }
    if (count > 0 && !mine->store().can_resume(s, mine->store().length(s))) {
      throw InvalidArgument(str_cat("forward: sequence ", s, ": a forward that failed half-way ",
                                    "has replaced what some layers kept; truncate it to 0 and run ",
                                    "its tokens again"));
    }
    total += count;
  }
  if (total != static_cast<int64_t>(input.token_ids.size())) {
    throw InvalidArgument(str_cat("forward: num_tokens adds up to ", total, ", token_ids has ",
                                  input.token_ids.size()));
  }
  for (size_t i = 0; i < input.token_ids.size(); ++i) {
    if (input.token_ids[i] < 0 || input.token_ids[i] >= info_.vocab_size) {
      throw InvalidArgument(str_cat("forward: token id ", input.token_ids[i], " at index ", i,
                                    " is outside the vocabulary [0, ", info_.vocab_size, ")"));
    }
  }
  if (images_) {
    images_->check(input);
  } else if (!input.image_grids.empty() || !input.pixel_values.empty()) {
    throw Unsupported(str_cat("forward: ", info_.path, ": ", info_.model_type,
                              " models take no images; use a vision model"));
  }
  return *mine;
}

void DecoderModel::check_logits(const ForwardInput& input, const TensorView& logits) const {
  const size_t rows =
      input.rows == LogitsRows::kAll ? input.token_ids.size() : input.num_tokens.size();
  const Dims shape{static_cast<int64_t>(rows), info_.vocab_size};
  if (!(logits.shape() == shape) || logits.dtype() != DType::kF32 || !logits.is_contiguous() ||
      (logits.device() != info_.device && logits.device() != Device{})) {
    throw InvalidArgument(str_cat("forward: logits: expected contiguous float32 ", shape, " on ",
                                  info_.device, on_cpu(info_) ? "" : " or cpu", ", got ",
                                  describe("logits", logits)));
  }
}

void DecoderModel::forward(const ForwardInput& input, KvCache& cache, MutableTensorView logits,
                           const MoeHooks* hooks) {
  DecoderCache& mine = check_input(input, cache);
  check_logits(input, logits);
  drop_ahead();
  if (hooks != nullptr) {
    HookObserver observer(*hooks, stream_);
    run_steps(input, mine, {logits}, &observer);
  } else {
    run_steps(input, mine, {logits}, nullptr);
  }
}

void DecoderModel::forward_and_sample(const ForwardInput& input, KvCache& cache,
                                      const SampleRequest& request, std::span<TokenId> next) {
  if (!can_sample()) return Model::forward_and_sample(input, cache, request, next);
  DecoderCache& mine = check_input(input, cache);
  const size_t sequences = input.num_tokens.size();
  const bool is_greedy = request.options.temperature == 0.0f;
  if (request.options.repetition_penalty != 1.0f || input.rows != LogitsRows::kLastOfEach) {
    throw InvalidArgument(
        "forward_and_sample: expected the last row of each sequence and no repetition penalty; use "
        "forward() and Sampler");
  }
  if (next.size() != sequences || (!is_greedy && request.uniform.size() != sequences)) {
    throw InvalidArgument(str_cat("forward_and_sample: expected ", sequences,
                                  " tokens to write and as many random numbers, got ", next.size(),
                                  " and ", request.uniform.size()));
  }
  const Outcome outcome{{}, &request, next, mine.life()};
  const CurrentDevice current(info_.device);
  if (ahead_ && ahead_->is(outcome.cache, mine.store().lengths(), input, request)) {
    return finish_sampled_step(input, mine.store(), outcome);
  }
  drop_ahead();
  run_steps(input, mine, outcome, nullptr);
}

void DecoderModel::finish_sampled_step(const ForwardInput& input, KvStore& store,
                                       const Outcome& outcome) {
  const size_t turn = step_turn_;
  ahead_.reset();
  if (outcome.request->goes_on) begin_ahead(input, store, outcome);
  step_done_[turn]->wait();
  outputs_.take_tokens(store.lengths(), outcome.next);
  for (size_t s = 0; s < input.num_tokens.size(); ++s) {
    const auto sequence = static_cast<int64_t>(s);
    store.set_length(sequence, store.length(sequence) + input.num_tokens[s]);
    if (ahead_ && input.num_tokens[s] > 0) ahead_->token_ids.push_back(outcome.next[s]);
  }
}

void DecoderModel::begin_ahead(const ForwardInput& input, KvStore& store, const Outcome& outcome) {
  if (keeps_latest_only(store.shape())) return;
  StepAhead ahead{outcome.cache, {}, {}, {}, outcome.request->options, {}};
  for (size_t s = 0; s < input.num_tokens.size(); ++s) {
    ahead.lengths.push_back(store.length(static_cast<int64_t>(s)) + input.num_tokens[s]);
    if (ahead.lengths.back() + input.num_tokens[s] > store.shape().max_tokens) return;  // no room
  }
  ahead.num_tokens.assign(input.num_tokens.begin(), input.num_tokens.end());
  const std::span<const double> uniform = outcome.request->next_uniform;
  ahead.uniform.assign(uniform.begin(), uniform.end());
  ahead_ = std::move(ahead);
  outputs_.set_uniform(uniform, stream_);
  run_step({input.token_ids, spans_, wanted_, outputs_.logits(), true}, store, outcome.request,
           nullptr);
}

void DecoderModel::drop_ahead() {
  if (!ahead_) return;
  ahead_.reset();
  synchronize(stream_);
}

void DecoderModel::run_steps(const ForwardInput& input, DecoderCache& cache, const Outcome& outcome,
                             MoeObserver* observer) {
  if (input.token_ids.empty()) return;
  KvStore& store = cache.store();
  if (decoder_.reserved_tokens() == 0) {
    reserve(on_cpu(info_) ? kDefaultStepTokens : kDefaultStepTokensOfGpu);
  }
  const CurrentDevice current(info_.device);
  const auto total = static_cast<int64_t>(input.token_ids.size());
  const bool is_direct = outcome.request == nullptr && outcome.logits.device() == info_.device;
  if (images_) images_->begin(input, store.lengths(), cache.shifts(), stream_);
  for (int64_t begin = 0; begin < total;) {
    const int64_t end = plan_step(input, store, begin);
    const auto ids =
        input.token_ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    if (!is_direct && outputs_.begin(wanted_, info_.vocab_size, info_.device)) graphs_.clear();
    if (outcome.request != nullptr) outputs_.set_uniform(outcome.request->uniform, stream_);
    DecoderStep step{ids, spans_, wanted_, is_direct ? outcome.logits : outputs_.logits()};
    if (images_) images_->give(begin, end, step, stream_);
    for (const SequenceSpan& s : spans_) {
      store.note_written(s.slot, s.past, s.past + s.num_tokens);
    }
    run_step(step, store, outcome.request, observer);
    const bool brings_tokens = outcome.request != nullptr && can_replay(step, observer);
    if (brings_tokens && begin == 0 && end == total) {
      return finish_sampled_step(input, store, outcome);
    }
    if (outcome.request == nullptr && !is_direct) outputs_.bring_logits(outcome.logits, stream_);
    synchronize(stream_);
    if (outcome.request != nullptr) {
      outputs_.take_tokens(brings_tokens ? store.lengths() : std::span<const int64_t>(),
                           outcome.next);
    }
    begin = end;
  }
  // Only now: a forward that throws leaves the lengths as they were.
  for (int64_t s = 0; s < store.shape().num_sequences; ++s) {
    store.set_length(s, store.length(s) + input.num_tokens[static_cast<size_t>(s)]);
  }
  if (images_) images_->store_shifts(cache.shifts());
}

void DecoderModel::run_step(const DecoderStep& step, KvStore& store, const SampleRequest* request,
                            MoeObserver* observer) {
  if (!step.has_inputs) decoder_.set_inputs(step, stream_);
  const bool replays = can_replay(step, observer);
  const NextStep next = replays && request != nullptr ? decoder_.next_step() : NextStep{};
  const auto compute = [&] {
    decoder_.compute(step, store, workspace_, stream_, observer);
    if (request != nullptr) outputs_.draw(request->options, next, workspace_, stream_);
  };
  if (!replays) return compute();
  graphs_.run(key_of(step, store, request), stream_, compute);
  if (request == nullptr) return;
  step_turn_ = 1 - step_turn_;
  step_done_[step_turn_]->record(stream_);
}

// One new token for each sequence, every row wanted where it stands.
bool DecoderModel::can_replay(const DecoderStep& step, const MoeObserver* observer) const {
  const auto num_tokens = static_cast<int64_t>(step.token_ids.size());
  if (on_cpu(info_) || !use_graphs_ || observer != nullptr || !step.rope_positions.empty() ||
      step.sequences.size() != step.token_ids.size() ||
      step.wanted.size() != step.token_ids.size()) {
    return false;
  }
  for (const LogitsRow& wanted : step.wanted) {
    if (wanted.target != wanted.row) return false;
  }
  return std::all_of(groups_.begin(), groups_.end(), [&](const auto& group) {
    return group->choice_for(num_tokens).backend->can_be_captured();
  });
}

StepKey DecoderModel::key_of(const DecoderStep& step, const KvStore& store,
                             const SampleRequest* request) const {
  StepKey key;
  key.num_tokens = static_cast<int64_t>(step.token_ids.size());
  key.has_inputs = step.has_inputs;
  key.logits = step.logits.data();
  key.cache = store.data();
  key.cache_sequences = store.shape().num_sequences;
  key.cache_tokens = store.shape().max_tokens;
  for (const auto& group : groups_) {
    key.experts.push_back(group->choice_for(key.num_tokens).layers.front().get());
  }
  if (request != nullptr) {
    key.sampling = request->options;
    key.sampling->seed = 0;  // the numbers come from outside
  }
  return key;
}

int64_t DecoderModel::plan_step(const ForwardInput& input, const KvStore& store, int64_t begin) {
  spans_.clear();
  wanted_.clear();
  const auto total = static_cast<int64_t>(input.token_ids.size());
  const int64_t end = std::min(total, begin + decoder_.reserved_tokens());
  int64_t first = 0;  // of the sequence, among all tokens
  for (int64_t s = 0; s < store.shape().num_sequences && first < end; ++s) {
    const int64_t last = first + input.num_tokens[static_cast<size_t>(s)];
    const int64_t from = std::max(first, begin);
    const int64_t to = std::min(last, end);
    if (from < to) {
      spans_.push_back({s, from - begin, to - from, store.length(s) + from - first});
      if (input.rows == LogitsRows::kLastOfEach && to == last) {
        wanted_.push_back({static_cast<int32_t>(to - 1 - begin), s});
      }
    }
    first = last;
  }
  if (input.rows == LogitsRows::kAll) {
    for (int64_t t = begin; t < end; ++t) wanted_.push_back({static_cast<int32_t>(t - begin), t});
  }
  return end;
}

}  // namespace cadre

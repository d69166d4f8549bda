#include "models/decoder_model.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "experts/stage_policy.h"
#include "models/hook_observer.h"
#include "models/host_memory.h"
#include "models/implementation_map.h"
#include "models/prepack.h"

namespace cadre {
namespace {

constexpr size_t kNameCapacity = 64;  // switching assigns names in place

bool on_cpu(const ModelInfo& info) { return info.device.type == DeviceType::kCpu; }

DecoderConfig decoder_config(const TextConfig& text, DType compute_dtype) {
  return {text.vocab_size, text.hidden_size, text.norm_eps, compute_dtype, {text.rope}};
}

}  // namespace

class DecoderModel::Cache final : public KvCache {
 public:
  Cache(const DecoderModel& model, const KvShape& shape)
      : total_(model.cache_bytes_), store_(shape, model.info_.device) {
    *total_ += store_.bytes();
  }
  ~Cache() override { *total_ -= store_.bytes(); }

  int64_t num_sequences() const override { return store_.shape().num_sequences; }
  int64_t max_tokens() const override { return store_.shape().max_tokens; }
  int64_t length(int64_t sequence) const override {
    check_sequence(sequence);
    return store_.length(sequence);
  }
  size_t bytes() const override { return store_.bytes(); }
  void truncate(int64_t sequence, int64_t length) override {
    check_sequence(sequence);
    if (length < 0 || length > store_.length(sequence)) {
      throw InvalidArgument(str_cat("KvCache::truncate: sequence ", sequence, " has ",
                                    store_.length(sequence), " tokens, cannot cut it to ", length));
    }
    store_.set_length(sequence, length);
  }

  /// By the shared counter: the address of a model that is gone may be another model's by now.
  bool belongs_to(const DecoderModel& model) const { return total_ == model.cache_bytes_; }
  KvStore& store() { return store_; }

 private:
  void check_sequence(int64_t sequence) const {
    if (sequence < 0 || sequence >= num_sequences()) {
      throw InvalidArgument(
          str_cat("KvCache: sequence ", sequence, " is outside [0, ", num_sequences(), ")"));
    }
  }

  std::shared_ptr<std::atomic<size_t>> total_;
  KvStore store_;
};

DecoderModel::DecoderModel(ModelInfo info, BuiltModel model, size_t weights_bytes,
                           std::shared_ptr<const void> owner, int num_threads)
    : info_(std::move(info)),
      owner_(std::move(owner)),
      weights_bytes_(weights_bytes),
      groups_(std::move(model.groups)),
      decoder_(decoder_config(model.text, info_.compute_dtype), std::move(model.weights),
               dense_ops(info_.device.type)),
      threads_(num_threads),
      owned_stream_(info_.device, threads_),
      stream_(owned_stream_.get()),
      workspace_(info_.device),
      cache_bytes_(std::make_shared<std::atomic<size_t>>(0)),
      pending_(groups_.size()) {
  whole_.reserve(kNameCapacity);
}

void DecoderModel::prepack(const Checkpoint& checkpoint, const ProgressCallback& progress) {
  require_memory_to_prepack(groups_, available_host_memory());
  prepack_experts(groups_, checkpoint, threads_, progress);
}

MemoryReport DecoderModel::memory() const {
  MemoryReport report;
  (on_cpu(info_) ? report.mapped_bytes : report.weights_bytes) = weights_bytes_;
  for (const auto& group : groups_) report.added_bytes += group->added_bytes();
  report.workspace_bytes = workspace_.capacity();
  report.kv_cache_bytes = *cache_bytes_;
  return report;
}

std::unique_ptr<KvCache> DecoderModel::new_cache(int64_t num_sequences, int64_t max_tokens) {
  if (num_sequences < 1) {
    throw InvalidArgument(str_cat("new_cache: expected at least 1 sequence, got ", num_sequences));
  }
  if (max_tokens < 1 || max_tokens > info_.max_position_embeddings) {
    throw InvalidArgument(str_cat("new_cache: max_tokens must lie in [1, ",
                                  info_.max_position_embeddings,
                                  "] (the context of this model), got ", max_tokens));
  }
  const KvShape shape{num_sequences, max_tokens, decoder_.cache_layouts()};
  const std::optional<size_t> bytes = kv_bytes(shape);
  const std::optional<size_t> available =
      on_cpu(info_) ? available_host_memory()
                    : device_runtime(info_.device).memory(info_.device.index).free_bytes;
  if (!bytes || (available && *bytes > *available)) {
    throw DeviceError(str_cat(
        "new_cache: ", num_sequences, " sequences of ", max_tokens, " tokens need ",
        bytes ? format_bytes(*bytes) : "more than 8 EiB", " of keys and values, ",
        available ? format_bytes(*available) : "an unknown amount", " of memory is available on ",
        info_.device, "; use fewer sequences or a shorter context"));
  }
  return std::make_unique<Cache>(*this, shape);
}

size_t DecoderModel::step_workspace_bytes(int64_t step) const {
  const size_t compute = decoder_.workspace_bytes(step, threads_.num_threads());
  if (!can_sample()) return compute;
  return std::max(compute,
                  dense_ops(info_.device.type).sample_workspace_bytes(step, info_.vocab_size));
}

void DecoderModel::reserve(int64_t max_tokens) {
  if (max_tokens < 1) {
    throw InvalidArgument(str_cat("reserve: expected at least 1 token, got ", max_tokens));
  }
  const int64_t step = std::min(max_tokens, on_cpu(info_) ? kMaxStepTokens : kMaxStepTokensOfGpu);
  if (step <= decoder_.reserved_tokens()) return;
  graphs_.clear();
  try {
    workspace_.reserve(step_workspace_bytes(step));
  } catch (...) {
    fit_workspace();
    throw;
  }
  spans_.reserve(static_cast<size_t>(step));
  wanted_.reserve(static_cast<size_t>(step));
  outputs_.reserve(step);
  decoder_.reserve(step, stream_);
}

DecoderModel::Cache& DecoderModel::check_input(const ForwardInput& input, KvCache& cache) const {
  auto* mine = dynamic_cast<Cache*>(&cache);
  if (mine == nullptr || !mine->belongs_to(*this)) {
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
  KvStore& store = check_input(input, cache).store();
  check_logits(input, logits);
  if (hooks != nullptr) {
    HookObserver observer(*hooks, stream_);
    run_steps(input, store, {logits}, &observer);
  } else {
    run_steps(input, store, {logits}, nullptr);
  }
}

void DecoderModel::forward_and_sample(const ForwardInput& input, KvCache& cache,
                                      const SampleRequest& request, std::span<TokenId> next) {
  if (!can_sample()) return Model::forward_and_sample(input, cache, request, next);
  KvStore& store = check_input(input, cache).store();
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
  run_steps(input, store, {{}, &request, next}, nullptr);
}

void DecoderModel::run_steps(const ForwardInput& input, KvStore& store, const Outcome& outcome,
                             MoeObserver* observer) {
  if (input.token_ids.empty()) return;
  if (decoder_.reserved_tokens() == 0) {
    reserve(on_cpu(info_) ? kDefaultStepTokens : kDefaultStepTokensOfGpu);
  }
  const CurrentDevice current(info_.device);
  const auto total = static_cast<int64_t>(input.token_ids.size());
  const bool is_direct = outcome.request == nullptr && outcome.logits.device() == info_.device;
  for (int64_t begin = 0; begin < total;) {
    const int64_t end = plan_step(input, store, begin);
    const auto ids =
        input.token_ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    if (!is_direct && outputs_.begin(wanted_, info_.vocab_size, info_.device)) graphs_.clear();
    if (outcome.request != nullptr) outputs_.set_uniform(outcome.request->uniform);
    run_step({ids, spans_, wanted_, is_direct ? outcome.logits : outputs_.logits()}, store,
             outcome.request, observer);
    if (outcome.request == nullptr && !is_direct) outputs_.bring_logits(outcome.logits, stream_);
    synchronize(stream_);
    if (outcome.request != nullptr) outputs_.take_tokens(outcome.next);
    begin = end;
  }
  // Only now, so that a forward that throws leaves the cache as it was.
  for (int64_t s = 0; s < store.shape().num_sequences; ++s) {
    store.set_length(s, store.length(s) + input.num_tokens[static_cast<size_t>(s)]);
  }
}

void DecoderModel::run_step(const DecoderStep& step, KvStore& store, const SampleRequest* request,
                            MoeObserver* observer) {
  decoder_.set_inputs(step, stream_);
  const auto compute = [&] {
    decoder_.compute(step, store, workspace_, stream_, observer);
    if (request != nullptr) outputs_.draw(request->options, workspace_, stream_);
  };
  if (can_replay(step, observer)) {
    graphs_.run(key_of(step, store, request), stream_, compute);
  } else {
    compute();
  }
}

// One new token for each sequence, every row wanted where it stands.
bool DecoderModel::can_replay(const DecoderStep& step, const MoeObserver* observer) const {
  const auto num_tokens = static_cast<int64_t>(step.token_ids.size());
  if (on_cpu(info_) || !use_graphs_ || observer != nullptr ||
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

ExpertsImplementation DecoderModel::get_experts_implementation() const {
  ExpertsImplementation map;
  map[""] = whole_;
  for (const auto& group : groups_) map[group->sub_config()] = group->active().name;
  return map;
}

ExpertsImplementation DecoderModel::experts_of_step(int64_t num_tokens) const {
  ExpertsImplementation map;
  map[""] = whole_;
  for (const auto& group : groups_) {
    map[group->sub_config()] = group->choice_for(num_tokens).name;
  }
  return map;
}

void DecoderModel::set_experts_implementation(const ExpertsImplementation& map) {
  check_implementation(map, groups_);
  switch_groups(
      [&](const ExpertsGroup& group) { return implementation_for(map, group.sub_config()); });
  if (const auto whole = map.find(""); whole != map.end()) whole_ = whole->second;
}

void DecoderModel::set_experts_implementation(std::string_view name) {
  if (groups_.empty() || name.empty()) check_backend_name(name);
  switch_groups([&](const ExpertsGroup&) { return name; });
  whole_ = name;
}

void DecoderModel::choose_at_load(const ExpertsImplementation& map, const DecodeExperts& decode) {
  check_implementation(map, groups_);
  switch_groups([&](const ExpertsGroup& group) {
    const std::string_view name = implementation_for(map, group.sub_config());
    return name.empty() ? group.default_name() : std::string(name);
  });
  for (const auto& group : groups_) {
    group->prepare_in_place();
    if (on_cpu(info_)) continue;
    group->set_max_decode_tokens(decode.max_tokens == DecodeExperts::kAuto
                                     ? decode_threshold(group->query())
                                     : decode.max_tokens);
  }
  const auto whole = map.find("");
  whole_ = whole != map.end() ? whole->second
                              : (groups_.empty() ? "eager" : groups_.front()->default_name());
}

template <typename NameOfGroup>
void DecoderModel::switch_groups(const NameOfGroup& name_of_group) {
  try {
    bool news = false;
    for (size_t i = 0; i < groups_.size(); ++i) {
      const auto name = name_of_group(*groups_[i]);
      pending_[i] = name.empty() ? groups_[i]->active_index() : groups_[i]->prepare(name);
      news = news || groups_[i]->has_news();
    }
    if (news) fit_workspace();
  } catch (...) {
    for (const auto& group : groups_) group->rollback();
    fit_workspace();
    throw;
  }
  for (size_t i = 0; i < groups_.size(); ++i) {
    const size_t before = groups_[i]->num_choices();
    groups_[i]->activate(pending_[i]);
    if (groups_[i]->num_choices() != before) graphs_.clear();  // a form that one may use is gone
  }
}

// A backend that was not prepared when room was made may need more. Also puts room back after an
// attempt to make more has failed.
void DecoderModel::fit_workspace() {
  const int64_t step = decoder_.reserved_tokens();
  if (step == 0) return;
  graphs_.clear();
  workspace_.reserve(step_workspace_bytes(step));
}

ExpertsQuery DecoderModel::experts_query(std::string_view sub_config) const {
  std::vector<std::string> known;
  for (const auto& group : groups_) {
    if (group->sub_config() == sub_config) return group->query();
    known.push_back(str_cat('"', group->sub_config(), '"'));
  }
  throw InvalidArgument(str_cat("experts_query: unknown sub-config \"", sub_config,
                                "\"; this model has: ", join(known)));
}

}  // namespace cadre

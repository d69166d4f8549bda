#include "models/decoder_model.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "models/host_memory.h"
#include "models/implementation_map.h"
#include "models/prepack.h"

namespace cadre {
namespace {

constexpr size_t kNameCapacity = 64;  // switching assigns names in place

class HookObserver final : public MoeObserver {
 public:
  explicit HookObserver(const MoeHooks& hooks) : hooks_(hooks) {}
  void on_routing(const MoeLayerView& view) override {
    if (hooks_.on_routing) hooks_.on_routing(view.layer, view.top_k_index, view.top_k_weights);
  }
  void on_output(const MoeLayerView& view) override {
    if (!hooks_.on_output) return;
    hooks_.on_output(
        {view.layer, view.hidden_states, view.top_k_index, view.top_k_weights, view.output});
  }

 private:
  const MoeHooks& hooks_;
};

DecoderConfig decoder_config(const TextConfig& text, DType compute_dtype) {
  return {text.vocab_size, text.hidden_size, text.norm_eps, compute_dtype, text.rope};
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

DecoderModel::DecoderModel(ModelInfo info, BuiltModel model, size_t mapped_bytes,
                           std::shared_ptr<const void> owner, int num_threads)
    : info_(std::move(info)),
      owner_(std::move(owner)),
      mapped_bytes_(mapped_bytes),
      groups_(std::move(model.groups)),
      decoder_(decoder_config(model.text, info_.compute_dtype), std::move(model.weights),
               dense_ops(info_.device.type)),
      threads_(num_threads),
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
  report.mapped_bytes = mapped_bytes_;
  for (const auto& group : groups_) report.added_bytes += group->added_bytes();
  report.workspace_bytes = workspace_.capacity();
  report.kv_cache_bytes = *cache_bytes_;
  return report;
}

KvShape DecoderModel::cache_shape(int64_t num_sequences, int64_t max_tokens) const {
  const AttentionShape& shape = decoder_.attention_shape();
  return {decoder_.num_layers(), num_sequences,      shape.num_kv_heads, max_tokens,
          shape.head_dim,        info_.compute_dtype};
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
  const KvShape shape = cache_shape(num_sequences, max_tokens);
  const std::optional<size_t> bytes = kv_bytes(shape);
  const std::optional<size_t> available = available_host_memory();
  if (!bytes || (available && *bytes > *available)) {
    throw DeviceError(str_cat(
        "new_cache: ", num_sequences, " sequences of ", max_tokens, " tokens need ",
        bytes ? format_bytes(*bytes) : "more than 8 EiB", " of keys and values, ",
        available ? format_bytes(*available) : "an unknown amount", " of memory is available on ",
        info_.device, "; use fewer sequences or a shorter context"));
  }
  return std::make_unique<Cache>(*this, shape);
}

void DecoderModel::reserve(int64_t max_tokens) {
  if (max_tokens < 1) {
    throw InvalidArgument(str_cat("reserve: expected at least 1 token, got ", max_tokens));
  }
  const int64_t step = std::min(max_tokens, kMaxStepTokens);
  if (step <= decoder_.reserved_tokens()) return;
  try {
    workspace_.reserve(decoder_.workspace_bytes(step, threads_.num_threads()));
  } catch (...) {
    fit_workspace();
    throw;
  }
  spans_.reserve(static_cast<size_t>(step));
  wanted_.reserve(static_cast<size_t>(step));
  decoder_.reserve(step, Stream::cpu(threads_));
}

DecoderModel::Cache& DecoderModel::check_input(const ForwardInput& input, KvCache& cache,
                                               const TensorView& logits) const {
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
  const Dims shape{input.rows == LogitsRows::kAll ? total : sequences, info_.vocab_size};
  if (!(logits.shape() == shape) || logits.dtype() != DType::kF32 || !logits.is_contiguous() ||
      logits.device() != info_.device) {
    throw InvalidArgument(str_cat("forward: logits: expected contiguous float32 ", shape, " on ",
                                  info_.device, ", got ", describe("logits", logits)));
  }
  return *mine;
}

void DecoderModel::forward(const ForwardInput& input, KvCache& cache, MutableTensorView logits,
                           const MoeHooks* hooks) {
  KvStore& store = check_input(input, cache, logits).store();
  if (input.token_ids.empty()) return;
  if (decoder_.reserved_tokens() == 0) reserve(kDefaultStepTokens);
  if (hooks != nullptr) {
    HookObserver observer(*hooks);
    run_steps(input, store, logits, &observer);
  } else {
    run_steps(input, store, logits, nullptr);
  }
  // Only now, so that a forward that throws leaves the cache as it was.
  for (int64_t s = 0; s < store.shape().num_sequences; ++s) {
    store.set_length(s, store.length(s) + input.num_tokens[static_cast<size_t>(s)]);
  }
}

void DecoderModel::run_steps(const ForwardInput& input, KvStore& store,
                             const MutableTensorView& logits, MoeObserver* observer) {
  const auto total = static_cast<int64_t>(input.token_ids.size());
  const Stream stream = Stream::cpu(threads_);
  for (int64_t begin = 0; begin < total;) {
    const int64_t end = plan_step(input, store, begin);
    const auto ids =
        input.token_ids.subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    const DecoderStep step{ids, spans_, wanted_, logits};
    decoder_.set_inputs(step, stream);
    decoder_.compute(step, store, workspace_, stream, observer);
    begin = end;
  }
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

void DecoderModel::choose_at_load(const ExpertsImplementation& map) {
  check_implementation(map, groups_);
  switch_groups([&](const ExpertsGroup& group) {
    const std::string_view name = implementation_for(map, group.sub_config());
    return name.empty() ? group.default_name() : std::string(name);
  });
  for (const auto& group : groups_) group->prepare_in_place();
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
  for (size_t i = 0; i < groups_.size(); ++i) groups_[i]->activate(pending_[i]);
}

// A backend that was not prepared when room was made may need more. Also puts room back after an
// attempt to make more has failed.
void DecoderModel::fit_workspace() {
  const int64_t step = decoder_.reserved_tokens();
  if (step > 0) workspace_.reserve(decoder_.workspace_bytes(step, threads_.num_threads()));
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

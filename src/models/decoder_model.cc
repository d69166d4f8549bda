#include "models/decoder_model.h"

#include <algorithm>
#include <numeric>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "experts/stage_policy.h"
#include "models/host_memory.h"
#include "models/implementation_map.h"
#include "models/prepack.h"

namespace cadre {
namespace {

constexpr size_t kNameCapacity = 64;  // switching assigns names in place

bool on_cpu(const ModelInfo& info) { return info.device.type == DeviceType::kCpu; }

DecoderConfig decoder_config(const BuiltModel& model, DType compute_dtype) {
  const TextConfig& text = model.text;
  const std::vector<RopeConfig> ropes =
      model.ropes.empty() ? std::vector<RopeConfig>{text.rope} : model.ropes;
  return {.vocab_size = text.vocab_size,
          .hidden_size = text.hidden_size,
          .norm_eps = text.norm_eps,
          .embedding_scale = text.embedding_scale,
          .logits_scale = text.logits_scale,
          .compute_dtype = compute_dtype,
          .ropes = ropes,
          .hyper = model.hyper};
}

}  // namespace

DecoderModel::DecoderModel(ModelInfo info, BuiltModel model, WeightMemory weights, int num_threads)
    : info_(std::move(info)),
      weights_(std::move(weights)),
      groups_(std::move(model.groups)),
      decoder_(decoder_config(model, info_.compute_dtype), std::move(model.weights),
               dense_ops(info_.device.type)),
      threads_(num_threads),
      owned_stream_(info_.device, threads_),
      stream_(owned_stream_.get()),
      workspace_(info_.device),
      cache_bytes_(std::make_shared<std::atomic<size_t>>(0)),
      pending_(groups_.size()) {
  whole_.reserve(kNameCapacity);
  for (const std::string& name : model.sub_configs) without_experts_[name].reserve(kNameCapacity);
  if (model.vision) {
    images_ = std::make_unique<ImageInputs>(std::move(*model.vision), model.vision_tokens.image,
                                            info_.device);
  }
  if (on_cpu(info_)) return;
  for (auto& event : step_done_)
    event = device_runtime(info_.device).make_event(info_.device.index);
}

DecoderModel::~DecoderModel() {
  try {
    drop_ahead();
  } catch (const Error&) {  // a fault of the step; nobody is there to hear of it
  }
}

void DecoderModel::prepack(const Checkpoint& checkpoint, const ProgressCallback& progress) {
  require_memory_to_prepack(groups_, available_host_memory());
  prepack_experts(groups_, checkpoint, threads_, progress);
}

MemoryReport DecoderModel::memory() const {
  MemoryReport report;
  report.mapped_bytes = weights_.mapped_bytes;
  report.weights_bytes = weights_.copied_bytes;
  for (const auto& group : groups_) report.added_bytes += group->added_bytes();
  report.workspace_bytes = workspace_.capacity() + (images_ ? images_->bytes() : 0);
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
  return std::make_unique<DecoderCache>(cache_bytes_, shape, info_.device);
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
  drop_ahead();
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

ExpertsImplementation DecoderModel::get_experts_implementation() const {
  ExpertsImplementation map;
  map[""] = whole_;
  for (const auto& group : groups_) map[group->sub_config()] = group->active().name;
  map.insert(without_experts_.begin(), without_experts_.end());
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
  check_implementation(map, info_.sub_configs, groups_);
  drop_ahead();
  switch_groups(
      [&](const ExpertsGroup& group) { return implementation_for(map, group.sub_config()); });
  set_whole(map);
}

void DecoderModel::set_whole(const ExpertsImplementation& map) {
  if (const auto whole = map.find(""); whole != map.end()) whole_ = whole->second;
  for (auto& entry : without_experts_) {
    const std::string_view name = implementation_for(map, entry.first);
    if (!name.empty()) entry.second = name;
  }
}

void DecoderModel::set_experts_implementation(std::string_view name) {
  if (groups_.empty() || name.empty()) check_backend_name(name);
  drop_ahead();
  switch_groups([&](const ExpertsGroup&) { return name; });
  whole_ = name;
  for (auto& entry : without_experts_) entry.second = name;
}

void DecoderModel::choose_at_load(const ExpertsImplementation& map, const DecodeExperts& decode) {
  check_implementation(map, info_.sub_configs, groups_);
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
  whole_ = groups_.empty() ? "eager" : groups_.front()->default_name();
  for (auto& entry : without_experts_) entry.second = whole_;
  set_whole(map);
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

#include "layers/experts_group.h"

#include <algorithm>
#include <utility>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// One line for every backend of the device: can it run these experts, and if not, why.
std::string all_answers(const ExpertsQuery& query) {
  std::string text;
  for (const std::string& name : backend_names()) {
    const Support support = supports(name, query);
    text += str_cat("\n  ", name, ": ", support.ok() ? std::string("can run") : to_string(support));
  }
  return text;
}

}  // namespace

int64_t ExpertsGroup::add_layer(std::shared_ptr<const ExpertsWeights> weights) {
  CADRE_ASSERT(choices_.empty());
  weights_.push_back(std::move(weights));
  return num_layers() - 1;
}

void ExpertsGroup::replace_layer(int64_t layer, std::shared_ptr<const ExpertsWeights> weights) {
  CADRE_ASSERT(choices_.empty());
  weights_[static_cast<size_t>(layer)] = std::move(weights);
}

size_t ExpertsGroup::find(std::string_view name) const {
  const auto found = std::find_if(choices_.begin(), choices_.end(),
                                  [&](const Choice& choice) { return choice.name == name; });
  return found == choices_.end() ? kNone : static_cast<size_t>(found - choices_.begin());
}

size_t ExpertsGroup::prepare(std::string_view name) {
  if (const size_t known = find(name); known != kNone) return known;
  if (const Support support = supports(name, query_); !support.ok()) {
    throw Unsupported(str_cat("experts implementation \"", name, "\" cannot run ",
                              sub_config_.empty() ? "this model" : sub_config_, " on ",
                              query_.device, ": ", to_string(support),
                              "; every backend's answer:", all_answers(query_)));
  }
  Choice choice{std::string(name), &find_backend(name, query_.device.type), {}, 0};
  for (const auto& weights : weights_) {
    choice.layers.push_back(choice.backend->prepare(query_, weights));
    choice.added_bytes += choice.layers.back()->added_bytes;
  }
  choices_.push_back(std::move(choice));
  return choices_.size() - 1;
}

void ExpertsGroup::prepare_in_place() {
  for (const std::string& name : backend_names()) {
    if (find(name) != kNone || weights_.empty() || !supports(name, query_).ok()) continue;
    ExpertsBackend& backend = find_backend(name, query_.device.type);
    // One layer tells whether the backend wants memory of its own.
    if (backend.prepare(query_, weights_.front())->added_bytes == 0) prepare(name);
  }
  settled_ = choices_.size();
}

void ExpertsGroup::activate(size_t choice) {
  active_ = choice;
  for (size_t i = choices_.size(); i-- > 0;) {
    if (i == active_ || choices_[i].added_bytes == 0) continue;
    choices_.erase(choices_.begin() + static_cast<std::ptrdiff_t>(i));
    if (active_ > i) --active_;
  }
  settled_ = choices_.size();
}

void ExpertsGroup::rollback() {
  choices_.erase(choices_.begin() + static_cast<std::ptrdiff_t>(settled_), choices_.end());
}

const ExpertsGroup::Choice& ExpertsGroup::choice_for(int64_t num_tokens) const {
  const Choice& current = active();
  if (num_tokens > max_decode_tokens_ || current.name != "grouped_mm") return current;
  const size_t decode = find("batched_mm");
  return decode == kNone ? current : choices_[decode];
}

std::string ExpertsGroup::default_name() const {
  return supports("grouped_mm", query_).ok() ? "grouped_mm" : "eager";
}

size_t ExpertsGroup::added_bytes() const {
  size_t bytes = 0;
  for (const auto& weights : weights_) bytes += packed_bytes(*weights);
  for (const Choice& choice : choices_) bytes += choice.added_bytes;
  return bytes;
}

size_t ExpertsGroup::workspace_bytes(int64_t max_tokens, int num_threads) const {
  size_t bytes = 0;
  for (const Choice& choice : choices_) {
    bytes = std::max(bytes, choice.backend->workspace_bytes(query_, max_tokens, num_threads));
  }
  return bytes;
}

}  // namespace cadre

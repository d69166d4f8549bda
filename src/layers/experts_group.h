// The MoE layers of one sub-config. They share one backend, which can be switched at any time: what
// a backend prepared is kept as long as it costs no memory, so that going back and forth allocates
// nothing.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/experts.h"

namespace cadre {

class ExpertsGroup {
 public:
  /// One backend, ready for all layers.
  struct Choice {
    std::string name;
    ExpertsBackend* backend = nullptr;
    std::vector<std::unique_ptr<PreparedExperts>> layers;
    size_t added_bytes = 0;
  };

  /// `query`: what this group's experts ask of a backend.
  ExpertsGroup(std::string sub_config, const ExpertsQuery& query)
      : sub_config_(std::move(sub_config)), query_(query) {}

  const std::string& sub_config() const { return sub_config_; }
  const ExpertsQuery& query() const { return query_; }
  int64_t num_layers() const { return static_cast<int64_t>(weights_.size()); }

  /// Adds the experts of one more layer and returns the layer's index in the group. Only before the
  /// first choice.
  int64_t add_layer(std::shared_ptr<const ExpertsWeights> weights);

  /// Puts the same experts in another form in a layer's place. Only before the first choice.
  void replace_layer(int64_t layer, std::shared_ptr<const ExpertsWeights> weights);

  /// As they were loaded, with their packed form when they have one.
  const std::shared_ptr<const ExpertsWeights>& weights(int64_t layer) const {
    return weights_[static_cast<size_t>(layer)];
  }

  /// The prepared form for `name`, made now when there is none; returns its index. Nothing is
  /// switched before activate(). Throws InvalidArgument for an unknown name and Unsupported, with
  /// the answers of every backend, for one that cannot run here.
  size_t prepare(std::string_view name);
  bool is_prepared(std::string_view name) const { return find(name) != kNone; }
  /// True between a prepare() that made something and activate() or rollback().
  bool has_news() const { return choices_.size() != settled_; }
  /// Makes a prepared backend the current one; forms that hold memory of their own and are not
  /// current are freed.
  void activate(size_t choice);
  /// Forgets what was prepared since the last activate().
  void rollback();
  /// Prepares every backend that can run and reads weights in place, beside the current one.
  void prepare_in_place();
  /// "grouped_mm" where it can run, else "eager".
  std::string default_name() const;

  const Choice& active() const { return choices_[active_]; }
  /// What a step of this many tokens runs on: the active choice, or in place of grouped_mm a
  /// prepared batched_mm when it has no more tokens than set below.
  const Choice& choice_for(int64_t num_tokens) const;
  /// 0: the active choice at every size.
  void set_max_decode_tokens(int64_t num_tokens) { max_decode_tokens_ = num_tokens; }
  size_t num_choices() const { return choices_.size(); }
  size_t active_index() const { return active_; }
  /// Of packed forms, and of what backends prepared.
  size_t added_bytes() const;
  /// The largest workspace over all prepared backends, so that switching needs none.
  size_t workspace_bytes(int64_t max_tokens, int num_threads) const;

 private:
  size_t find(std::string_view name) const;  // kNone when not prepared
  static constexpr size_t kNone = static_cast<size_t>(-1);

  std::string sub_config_;
  ExpertsQuery query_;
  std::vector<std::shared_ptr<const ExpertsWeights>> weights_;
  std::vector<Choice> choices_;
  size_t active_ = kNone;
  size_t settled_ = 0;  // choices that stay when a switch fails
  int64_t max_decode_tokens_ = 0;
};

}  // namespace cadre

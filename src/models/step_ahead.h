// A decode step that a model began before anybody asked for it: SampleRequest::goes_on.
#pragma once

#include <algorithm>
#include <cstdint>
#include <memory>
#include <span>
#include <vector>

#include "cadre/model.h"

namespace cadre {

struct StepAhead {
  std::weak_ptr<const void> cache;  // its life, so that another one at the same address is not it
  std::vector<int64_t> lengths;     // of the cache's sequences, before the step
  std::vector<int64_t> num_tokens;  // of each: 1 or 0
  std::vector<TokenId> token_ids;   // as drawn before it; empty until the host knows them
  SamplingOptions options;
  std::vector<double> uniform;  // by sequence; empty when greedy

  /// Whether this is what is asked for.
  bool is(const std::shared_ptr<const void>& of_cache, std::span<const int64_t> of_lengths,
          const ForwardInput& input, const SampleRequest& request) const {
    const auto equal = [](const auto& a, const auto& b) {
      return std::equal(a.begin(), a.end(), b.begin(), b.end());
    };
    SamplingOptions same = request.options;
    same.seed = options.seed;  // the numbers come from outside
    const bool same_numbers = options.temperature == 0.0f || equal(uniform, request.uniform);
    return cache.lock() == of_cache && equal(lengths, of_lengths) &&
           equal(num_tokens, input.num_tokens) && equal(token_ids, input.token_ids) &&
           same == options && same_numbers;
  }
};

}  // namespace cadre

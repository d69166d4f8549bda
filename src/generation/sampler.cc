// Transformers' logits processors in its order: repetition penalty, temperature, top-k, top-p,
// min-p. Ties at a cut fall as there: top-k keeps all that equal the k-th; top-p drops the lower
// ids first.
#include <algorithm>
#include <cmath>

#include "cadre/error.h"
#include "cadre/generation.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

using Candidate = std::pair<float, TokenId>;  // logit, id

constexpr auto kLikelierLast = [](const Candidate& a, const Candidate& b) {
  return a.first != b.first ? a.first < b.first : a.second < b.second;
};

[[noreturn]] void refuse(std::string_view option, std::string_view range, double value) {
  throw InvalidArgument(str_cat("sampling options: ", option, " must be ", range, ", got ", value));
}

// Neighbouring seeds and streams give unrelated generators (splitmix64's finaliser).
uint64_t mix(uint64_t seed, uint64_t stream) {
  uint64_t z = seed + 0x9E3779B97F4A7C15u * (stream + 1);
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Relative to the likeliest; sound for infinities too.
double weight(float logit, float max) {
  return logit == max ? 1.0 : std::exp(static_cast<double>(logit) - max);
}

float penalised(float logit, float penalty) {
  return logit < 0 ? logit * penalty : logit / penalty;
}

// Every id of the history once, from the value that it had before.
void penalise(std::span<float> logits, std::span<const TokenId> history, float penalty,
              std::vector<Candidate>& buffer) {
  buffer.clear();
  for (const TokenId id : history) {
    if (id < 0 || static_cast<size_t>(id) >= logits.size()) {
      throw InvalidArgument(str_cat("Sampler::next: history holds id ", id,
                                    ", expected ids below the number of logits, ", logits.size()));
    }
    buffer.emplace_back(penalised(logits[static_cast<size_t>(id)], penalty), id);
  }
  for (const Candidate& entry : buffer) logits[static_cast<size_t>(entry.second)] = entry.first;
}

// Divides by the temperature. A maximum beyond float32 then would make everything near it equal to
// it: such logits are taken relative to the maximum, which changes no probability.
void heat(std::span<float> logits, float max, float temperature) {
  const bool overflows = !std::isfinite(max / temperature);
  for (float& logit : logits) {
    if (overflows) logit = logit == max ? 0.0f : logit - max;
    logit /= temperature;
  }
}

TokenId most_likely(std::span<const float> logits) {
  TokenId best = -1;
  for (size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i])) continue;
    if (best < 0 || logits[i] > logits[static_cast<size_t>(best)]) best = static_cast<TokenId>(i);
  }
  return best;
}

void keep_top_k(std::vector<Candidate>& candidates, int32_t k) {
  if (k <= 0 || static_cast<size_t>(k) >= candidates.size()) return;
  const auto kth = candidates.begin() + (k - 1);
  std::nth_element(candidates.begin(), kth, candidates.end(),
                   [](const Candidate& a, const Candidate& b) { return a.first > b.first; });
  const float least = kth->first;
  std::erase_if(candidates, [least](const Candidate& c) { return c.first < least; });
}

// Keeps the likeliest ones until they make up top_p; at least one.
void keep_top_p(std::vector<Candidate>& candidates, float max, float top_p) {
  if (top_p >= 1.0f) return;
  double total = 0;
  for (const Candidate& candidate : candidates) total += weight(candidate.first, max);
  std::make_heap(candidates.begin(), candidates.end(), kLikelierLast);
  auto rest = candidates.end();
  for (double sum = 0; rest != candidates.begin();) {
    std::pop_heap(candidates.begin(), rest, kLikelierLast);
    --rest;
    sum += weight(rest->first, max);
    if (sum >= static_cast<double>(top_p) * total) break;
  }
  candidates.erase(candidates.begin(), rest);
}

void keep_min_p(std::vector<Candidate>& candidates, float max, float min_p) {
  if (min_p <= 0.0f) return;
  std::erase_if(candidates, [max, min_p](const Candidate& c) {
    return weight(c.first, max) < static_cast<double>(min_p);
  });
}

}  // namespace

void validate(const SamplingOptions& options) {
  if (!(options.temperature >= 0.0f) || std::isinf(options.temperature)) {
    refuse("temperature", "0 (greedy) or a positive number", options.temperature);
  }
  if (options.top_k < 0) refuse("top_k", "0 (off) or a positive integer", options.top_k);
  if (!(options.top_p >= 0.0f && options.top_p <= 1.0f)) {
    refuse("top_p", "from 0 to 1 (off)", options.top_p);
  }
  if (!(options.min_p >= 0.0f && options.min_p <= 1.0f)) {
    refuse("min_p", "from 0 (off) to 1", options.min_p);
  }
  if (!(options.repetition_penalty > 0.0f) || std::isinf(options.repetition_penalty)) {
    refuse("repetition_penalty", "a positive number, 1 being off", options.repetition_penalty);
  }
}

Sampler::Sampler(const SamplingOptions& options, uint64_t stream)
    : options_(options), random_(mix(options.seed, stream)) {
  validate(options);
}

TokenId Sampler::prepare(std::span<float> logits, std::span<const TokenId> history) {
  if (options_.repetition_penalty != 1.0f) {
    penalise(logits, history, options_.repetition_penalty, candidates_);
  }
  const TokenId best = most_likely(logits);
  if (best < 0) {
    throw Error(str_cat("Sampler::next: expected logits, all ", logits.size(),
                        " values are NaN: the model's weights or its input are damaged"));
  }
  if (options_.temperature == 0.0f) {
    candidates_.assign(1, {logits[static_cast<size_t>(best)], best});
    return best;
  }
  heat(logits, logits[static_cast<size_t>(best)], options_.temperature);
  cut(logits, logits[static_cast<size_t>(best)]);
  return best;
}

TokenId Sampler::next(std::span<float> logits, std::span<const TokenId> history) {
  const TokenId best = prepare(logits, history);
  return options_.temperature == 0.0f ? best : draw(logits[static_cast<size_t>(best)]);
}

void Sampler::cut(std::span<const float> logits, float max) {
  candidates_.clear();
  for (size_t i = 0; i < logits.size(); ++i) {
    if (!std::isnan(logits[i])) candidates_.emplace_back(logits[i], static_cast<TokenId>(i));
  }
  keep_top_k(candidates_, options_.top_k);
  keep_top_p(candidates_, max, options_.top_p);
  keep_min_p(candidates_, max, options_.min_p);
  // Whatever order the cuts left behind: the draw depends on seed and logits alone.
  const auto by_id = [](const Candidate& a, const Candidate& b) { return a.second < b.second; };
  if (!std::is_sorted(candidates_.begin(), candidates_.end(), by_id)) {
    std::sort(candidates_.begin(), candidates_.end(), by_id);
  }
}

TokenId Sampler::draw(float max) {
  double total = 0;
  for (const Candidate& candidate : candidates_) total += weight(candidate.first, max);
  // 53 random bits; the library's distributions differ between implementations.
  const double threshold = uniform() * total;
  double sum = 0;
  TokenId last = candidates_.front().second;
  for (const Candidate& candidate : candidates_) {
    const double own = weight(candidate.first, max);
    if (own <= 0) continue;
    last = candidate.second;
    sum += own;
    if (threshold < sum) break;
  }
  return last;
}

std::vector<std::pair<TokenId, double>> Sampler::probabilities(std::span<float> logits,
                                                               std::span<const TokenId> history) {
  const float max = logits[static_cast<size_t>(prepare(logits, history))];
  double total = 0;
  std::vector<std::pair<TokenId, double>> result;
  for (const Candidate& candidate : candidates_) {
    result.emplace_back(candidate.second, weight(candidate.first, max));
    total += result.back().second;
  }
  for (auto& entry : result) entry.second /= total;
  return result;
}

}  // namespace cadre

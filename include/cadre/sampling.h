// How the next token is drawn from logits.
#pragma once

#include <cstdint>

namespace cadre {

/// As in Transformers: logits are penalised, divided by the temperature, cut by top-k, top-p and
/// min-p in this order, then drawn.
struct SamplingOptions {
  float temperature = 0.0f;  // 0 = greedy; the cuts then do nothing
  int32_t top_k = 0;         // 0 = off
  float top_p = 1.0f;        // 1 = off
  float min_p = 0.0f;        // 0 = off
  float repetition_penalty =
      1.0f;  // 1 = off; applied to every id already in the sequence, prompt included
  uint64_t seed = 0;

  friend bool operator==(const SamplingOptions&, const SamplingOptions&) = default;
};

}  // namespace cadre

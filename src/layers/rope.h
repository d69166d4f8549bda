// Rotary position embeddings: from the parameters in a config to inverse frequencies. Sources: the
// RoPE paper (arXiv 2104.09864), YaRN (arXiv 2309.00071), the Llama 3.1 model card.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "dense/dense_ops.h"

namespace cadre {

enum class RopeType : uint8_t { kDefault, kLinear, kDynamic, kLlama3, kYarn, kProportional };

struct RopeConfig {
  RopeType type = RopeType::kDefault;
  double theta = 10000;
  int64_t rotary_dim = 0;            // elements of a head that are rotated; even
  int64_t turning_dim = 0;           // proportional: those of them whose frequency is not 0; even
  double factor = 1;                 // all but default: how far the context is stretched
  double original_max_position = 0;  // dynamic, llama3, yarn: the context before stretching
  double low_freq_factor = 1;        // llama3
  double high_freq_factor = 4;       // llama3
  double beta_fast = 32;             // yarn
  double beta_slow = 1;              // yarn
  bool truncate = true;              // yarn: whole dimensions at the ends of the ramp
  std::optional<double> attention_factor = {};  // yarn: scale of cos and sin, when given
  std::optional<double> mscale = {};            // yarn: both given: their ratio is the scale
  std::optional<double> mscale_all_dim = {};
  // Qwen's M-RoPE, interleaved: of the pairs 0, 1, 2 ... every third turns with the token's row and
  // every third with its column, the first mrope_section[1] and [2] of each; the rest with its
  // time. All zero: a token has one position.
  std::array<int64_t, 3> mrope_section = {};
};

struct RopeFrequencies {
  std::vector<float> inverse;      // [rotary_dim / 2]
  float scale = 1;                 // of cos and sin
  std::vector<int32_t> axes = {};  // [rotary_dim / 2] 0 time, 1 row, 2 column; empty without M-RoPE
  std::optional<DynamicNtk> ntk = {};
};

RopeFrequencies rope_frequencies(const RopeConfig& config);

/// YaRN's scale for a context stretched by `factor`: 0.1 mscale ln(factor) + 1.
double yarn_mscale(double factor, double mscale);

}  // namespace cadre

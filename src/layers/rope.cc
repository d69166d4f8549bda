#include "layers/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "core/check.h"

namespace cadre {
namespace {

// In float32, as the models were trained.
std::vector<float> base_frequencies(const RopeConfig& config) {
  std::vector<float> inverse(static_cast<size_t>(config.rotary_dim / 2));
  for (size_t i = 0; i < inverse.size(); ++i) {
    const float exponent = static_cast<float>(2 * i) / static_cast<float>(config.rotary_dim);
    inverse[i] = 1.0f / std::pow(static_cast<float>(config.theta), exponent);
  }
  return inverse;
}

// Long waves are stretched, short ones kept, those between interpolated.
void scale_llama3(const RopeConfig& config, std::vector<float>& inverse) {
  const double low = config.original_max_position / config.low_freq_factor;
  const double high = config.original_max_position / config.high_freq_factor;
  for (float& frequency : inverse) {
    const double wave = 2 * std::numbers::pi / frequency;
    const double stretched = frequency / config.factor;
    if (wave > low) {
      frequency = static_cast<float>(stretched);
    } else if (wave >= high) {
      const double smooth = (config.original_max_position / wave - config.low_freq_factor) /
                            (config.high_freq_factor - config.low_freq_factor);
      frequency = static_cast<float>((1 - smooth) * stretched + smooth * frequency);
    }
  }
}

// The dimension that turns `rotations` times over the original context.
double yarn_dimension(const RopeConfig& config, double rotations) {
  return static_cast<double>(config.rotary_dim) *
         std::log(config.original_max_position / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(config.theta));
}

void scale_yarn(const RopeConfig& config, std::vector<float>& inverse) {
  double low = yarn_dimension(config, config.beta_fast);
  double high = yarn_dimension(config, config.beta_slow);
  if (config.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(config.rotary_dim - 1));
  if (low == high) high += 0.001;
  for (size_t i = 0; i < inverse.size(); ++i) {
    const double ramp = std::clamp((static_cast<double>(i) - low) / (high - low), 0.0, 1.0);
    const double kept = inverse[i];
    inverse[i] = static_cast<float>(kept / config.factor * ramp + kept * (1 - ramp));
  }
}

double yarn_scale(const RopeConfig& config) {
  if (config.attention_factor) return *config.attention_factor;
  if (config.mscale.value_or(0) != 0 && config.mscale_all_dim.value_or(0) != 0) {
    return yarn_mscale(config.factor, *config.mscale) /
           yarn_mscale(config.factor, *config.mscale_all_dim);
  }
  return yarn_mscale(config.factor, 1);
}

std::vector<int32_t> rope_axes(const RopeConfig& config) {
  if (config.mrope_section == std::array<int64_t, 3>{}) return {};
  std::vector<int32_t> axes(static_cast<size_t>(config.rotary_dim / 2), 0);
  for (size_t axis = 1; axis < 3; ++axis) {
    const auto end = std::min(axes.size(), 3 * static_cast<size_t>(config.mrope_section[axis]));
    for (size_t i = axis; i < end; i += 3) axes[i] = static_cast<int32_t>(axis);
  }
  return axes;
}

}  // namespace

double yarn_mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1.0;
}

RopeFrequencies rope_frequencies(const RopeConfig& config) {
  CADRE_ASSERT(config.rotary_dim >= 0 && config.rotary_dim % 2 == 0);
  RopeFrequencies result{base_frequencies(config), 1.0f, rope_axes(config)};
  switch (config.type) {
    case RopeType::kDefault:
      break;
    case RopeType::kLinear:
      for (float& frequency : result.inverse) frequency /= static_cast<float>(config.factor);
      break;
    case RopeType::kDynamic:
      result.ntk = DynamicNtk{static_cast<float>(config.factor),
                              static_cast<int64_t>(config.original_max_position)};
      break;
    case RopeType::kProportional:
      for (size_t i = 0; i < result.inverse.size(); ++i) {
        const bool turns = static_cast<int64_t>(2 * i) < config.turning_dim;
        result.inverse[i] = turns ? result.inverse[i] / static_cast<float>(config.factor) : 0.0f;
      }
      break;
    case RopeType::kLlama3:
      scale_llama3(config, result.inverse);
      break;
    case RopeType::kYarn:
      scale_yarn(config, result.inverse);
      result.scale = static_cast<float>(yarn_scale(config));
      break;
  }
  return result;
}

}  // namespace cadre

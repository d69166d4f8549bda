// The gate function of experts on the device, in float32 (docs/numerics.md).
#pragma once

#include "cadre/activation.h"
#include "cadre/experts.h"

namespace cadre::cuda {

/// Passed to kernels by value.
struct GateFunction {
  Activation activation = Activation::kSilu;
  bool has_gate = true;
  bool has_limit = false;
  bool has_alpha = false;
  float limit = 0;
  float alpha = 0;
};

inline GateFunction gate_function(const ExpertsConfig& config) {
  return {config.activation,
          config.has_gate,
          config.swiglu_limit.has_value(),
          config.swiglu_alpha.has_value(),
          config.swiglu_limit.value_or(0),
          config.swiglu_alpha.value_or(0)};
}

#ifdef __CUDACC__

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + __expf(-x)); }

__device__ inline float activate_on_device(float x, Activation activation) {
  switch (activation) {
    case Activation::kSilu:
      return x * sigmoid(x);
    case Activation::kGelu:
      return 0.5f * x * (1.0f + erff(x * 0.70710678118654752f));
    case Activation::kGeluTanh: {
      const float inner = 0.79788456080286536f * (x + 0.044715f * x * x * x);
      return 0.5f * x * (1.0f + tanhf(inner));
    }
    case Activation::kRelu2:
      return x < 0 ? 0.0f : x * x;
    default:
      return x < 0 ? 0.0f : x;  // relu; keeps NaN
  }
}

/// h from the sums of gate and up, biases included; `gate` is not read without a gate.
__device__ inline float apply(const GateFunction& f, float gate, float up) {
  if (!f.has_gate) return activate_on_device(up, f.activation);
  if (f.has_limit) {  // clamps keep NaN
    gate = gate > f.limit ? f.limit : gate;
    up = up > f.limit ? f.limit : (up < -f.limit ? -f.limit : up);
  }
  if (f.has_alpha) return (up + 1.0f) * gate * sigmoid(f.alpha * gate);
  return activate_on_device(gate, f.activation) * up;
}

#endif

}  // namespace cadre::cuda

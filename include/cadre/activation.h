// The activation functions of experts and dense blocks, by Transformers' `hidden_act` names.
#pragma once

#include <cstdint>
#include <string_view>

namespace cadre {

enum class Activation : uint8_t {
  kSilu,      // "silu", "swish": x * sigmoid(x)
  kGelu,      // "gelu": x * Phi(x), exact
  kGeluTanh,  // "gelu_pytorch_tanh", "gelu_new": the tanh approximation
  kRelu,      // "relu"
  kRelu2,     // "relu2": max(x, 0)^2
};

std::string_view name_of(Activation activation);
/// Throws Unsupported, listing the known names, when `hidden_act` is none of them.
Activation parse_activation(std::string_view hidden_act);

}  // namespace cadre

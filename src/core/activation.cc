#include "cadre/activation.h"

#include <vector>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

struct NamedActivation {
  std::string_view name;
  Activation activation;
};

// The first name of an activation is the one that name_of gives.
constexpr NamedActivation kNames[] = {
    {"silu", Activation::kSilu},         {"swish", Activation::kSilu},
    {"gelu", Activation::kGelu},         {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"gelu_new", Activation::kGeluTanh}, {"relu", Activation::kRelu},
    {"relu2", Activation::kRelu2},
};

}  // namespace

std::string_view name_of(Activation activation) {
  for (const NamedActivation& entry : kNames) {
    if (entry.activation == activation) return entry.name;
  }
  CADRE_ASSERT(false && "unknown activation");
  return {};
}

Activation parse_activation(std::string_view hidden_act) {
  std::vector<std::string_view> names;
  for (const NamedActivation& entry : kNames) {
    if (entry.name == hidden_act) return entry.activation;
    names.push_back(entry.name);
  }
  throw Unsupported(str_cat("hidden_act: expected one of ", join(names), ", got \"", hidden_act,
                            "\"; this activation is not implemented"));
}

}  // namespace cadre

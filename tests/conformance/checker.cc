#include "conformance/checker.h"

#include <cmath>
#include <cstdlib>
#include <exception>
#include <limits>
#include <optional>

#include "conformance/device_under_test.h"
#include "conformance/placed_call.h"
#include "core/str_cat.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

// Of e4m3 activations against exact ones, whatever the weights (docs/numerics.md).
constexpr double kBoundOfDynamicActivations = 6e-2;

}  // namespace

std::vector<BackendEntry> runnable_backends() {
  const char* only = std::getenv("CADRE_TEST_BACKEND");
  std::vector<BackendEntry> runnable;
  for (const BackendEntry& entry : list_backends()) {
    if (entry.backend == nullptr || entry.device != device_under_test().type) continue;
    if (only == nullptr || only == entry.name) runnable.push_back(entry);
  }
  return runnable;
}

std::vector<double> run_backend(ExpertsBackend& backend, const ExpertsQuery& query,
                                const std::shared_ptr<const ExpertsWeights>& weights,
                                const RoutedTokens& tokens, const Stream& stream) {
  return PlacedCall(backend, query, weights, tokens, stream).run();
}

std::vector<double> reference_of(const ExpertsCase& c) {
  const RoutedTokens tokens = c.tokens();
  std::vector<double> reference(static_cast<size_t>(tokens.hidden_states.numel()));
  std::shared_ptr<const ExpertsWeights> weights = c.weights();
  CaseParams rounded = c.params();
  std::optional<ExpertsCase> twin;
  if (is_wider(rounded.stored_dtype, rounded.compute_dtype)) {
    rounded.round_weights = true;
    weights = twin.emplace(rounded).weights();
  }
  reference_forward(c.params().config, *weights, tokens, reference.data(), c.params().activations);
  return reference;
}

std::vector<double> exact_reference_of(const ExpertsCase& c) {
  if (c.params().activations == ActivationScheme::kNone) return {};
  const RoutedTokens tokens = c.tokens();
  std::vector<double> reference(static_cast<size_t>(tokens.hidden_states.numel()));
  reference_forward(c.params().config, *c.weights(), tokens, reference.data());
  return reference;
}

double bound_of(const ExpertsCase& c, const ExpertsBackend& backend) {
  return backend.emulation_bound(c.query(), c.tokens().output.dtype());
}

namespace {

// Empty when `out` lies within the bound of `reference`.
std::string deviation(const std::vector<double>& out, const std::vector<double>& reference,
                      double bound, std::string_view against, const CaseParams& params) {
  const double error = relative_error(out, reference);
  if (error <= bound) return "";
  size_t worst = 0;
  size_t num_nans = 0;
  const auto distance = [&](size_t i) {  // NaN counts as farthest
    const double d = std::abs(out[i] - reference[i]);
    return std::isnan(d) ? std::numeric_limits<double>::infinity() : d;
  };
  for (size_t i = 0; i < out.size(); ++i) {
    if (distance(i) > distance(worst)) worst = i;
    num_nans += std::isnan(out[i]);
  }
  const auto width = static_cast<size_t>(params.config.hidden_size);
  return str_cat("relative error ", error, " above the ", against, " bound ", bound,
                 "; worst at token ", worst / width, ", column ", worst % width, ": ", out[worst],
                 " against ", reference[worst], "; ", num_nans, " of ", out.size(), " are NaN; ",
                 describe(params));
}

}  // namespace

std::string check_against(const std::vector<double>& reference, ExpertsBackend& backend,
                          const ExpertsCase& c, const Stream& stream,
                          const std::vector<double>& exact) {
  ExpertsQuery query = c.query();
  query.device = stream.device;
  if (const Support support = backend.supports(query); !support) {
    return str_cat("refused: ", to_string(support), "; ", describe(c.params()));
  }
  std::vector<double> out;
  try {
    out = run_backend(backend, query, c.weights(), c.tokens(), stream);
  } catch (const std::exception& e) {
    return str_cat("threw: ", e.what(), "; ", describe(c.params()));
  }
  const bool is_emulated = query.activation_scheme != ActivationScheme::kNone;
  const std::string text = deviation(out, reference, bound_of(c, backend),
                                     is_emulated ? "emulation" : "stated", c.params());
  if (!text.empty() || exact.empty()) return text;
  return deviation(out, exact, kBoundOfDynamicActivations, "stated", c.params());
}

}  // namespace cadre::test

// Runs a backend on a case and holds it to its bound. A third party can run it on a backend of its
// own: it needs nothing but the public interface.
#pragma once

#include <string>
#include <vector>

#include "cadre/experts.h"
#include "conformance/experts_case.h"

namespace cadre::test {

/// The backends that this build can run on the device under test, with the name of each; with the
/// environment variable CADRE_TEST_BACKEND that one alone (a fault on a GPU ends the program for
/// all).
std::vector<BackendEntry> runnable_backends();

/// Runs `tokens`, which lie on the host, on the stream's device: with exactly the workspace the
/// backend asked for, it and the output filled with NaN. Returns the output in row-major order.
std::vector<double> run_backend(ExpertsBackend& backend, const ExpertsQuery& query,
                                const std::shared_ptr<const ExpertsWeights>& weights,
                                const RoutedTokens& tokens, const Stream& stream);

/// The float64 reference of the whole case, in the arithmetic of its query: activations are rounded
/// as its scheme says, weights wider than the compute dtype enter it rounded.
std::vector<double> reference_of(const ExpertsCase& c);

/// The same with activations as they are; empty where that is no different.
std::vector<double> exact_reference_of(const ExpertsCase& c);

/// What |out - reference_of| / |reference_of| must not exceed, as the backend states it.
double bound_of(const ExpertsCase& c, const ExpertsBackend& backend);

/// Empty when the backend's output lies within its bound of `reference` and, where it is given,
/// within stated_bound of `exact`, and everything was written; otherwise what is wrong, the worst
/// element and the case.
std::string check_against(const std::vector<double>& reference, ExpertsBackend& backend,
                          const ExpertsCase& c, const Stream& stream,
                          const std::vector<double>& exact = {});

}  // namespace cadre::test

// Holds backends to their stated bounds on a model's own experts: what every MoE layer sees when
// the model runs goes through each backend and through the float64 reference.
#pragma once

#include <cstdint>
#include <string>

#include "cadre/function_ref.h"
#include "cadre/model.h"

namespace cadre {

struct VerifyOptions {
  int64_t num_tokens = 8;  // random ones; the last one's last slot is replaced by "no expert"
  int64_t num_layers = 0;  // MoE layers from the first on; 0 = all
  uint64_t seed = 0;
  int num_threads = 0;  // 0: default_num_threads()
  ProgressCallback progress = {};
};

/// One backend on one layer.
struct ExpertsCheck {
  int64_t layer = 0;       // of the model
  std::string sub_config;  // "" for a plain model
  std::string backend;
  DType compute_dtype = DType::kF32;
  StorageFormat format = StorageFormat::kF32;
  double relative_error = 0;  // NaN when the result holds one
  double bound = 0;           // the backend's emulation_bound()
  double seconds = 0;         // of one forward, the weights read once before

  bool ok() const { return relative_error <= bound; }
};

struct VerifySummary {
  int64_t num_checks = 0;
  int64_t num_failed = 0;
  double worst_error = 0;  // relative to its bound; infinite for NaN
};

/// Runs the model on random tokens up to the last layer wanted, then every backend that can run
/// here on what each layer saw. Calls `on_check` after each; false stops. Throws InvalidArgument
/// for options out of range and Unsupported for a model without experts. The model's choice of
/// backends stays as it is.
VerifySummary verify_experts(Model& model, const VerifyOptions& options,
                             FunctionRef<bool(const ExpertsCheck&)> on_check);

}  // namespace cadre

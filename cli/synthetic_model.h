// A checkpoint of a real model's shape with random weights, for benchmarks of whole models that are
// not on this machine.
#pragma once

#include <filesystem>

#include "cadre/experts.h"
#include "cadre/model.h"

namespace cadre::cli {

/// What a Qwen3-MoE model has besides its experts.
struct SyntheticModel {
  ExpertsConfig experts;
  int64_t num_layers = 1;
  int64_t vocab_size = 151936;
  int64_t num_heads = 32;
  int64_t num_kv_heads = 4;
  int64_t head_dim = 128;
};

/// Bytes of its weights.
double weight_bytes(const SyntheticModel& model);

/// Throws Error with both numbers when the disk of `folder` has not as much left.
void require_space(const SyntheticModel& model, const std::filesystem::path& folder);

/// Writes config.json and bfloat16 shards, one a layer, in the hub's layout into `folder`, which
/// must exist. Throws Error when it cannot be written.
void write_synthetic_model(const SyntheticModel& model, const std::filesystem::path& folder,
                           const ProgressCallback& progress = {});

/// A folder under the system's temporary folder, made now and removed with all it holds at the end.
class TemporaryFolder {
 public:
  /// Throws Error when it cannot be made.
  TemporaryFolder();
  ~TemporaryFolder();
  TemporaryFolder(const TemporaryFolder&) = delete;
  TemporaryFolder& operator=(const TemporaryFolder&) = delete;

  const std::filesystem::path& path() const { return path_; }

 private:
  std::filesystem::path path_;
};

}  // namespace cadre::cli

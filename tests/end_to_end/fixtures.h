// Models, inputs and damaged files for the tests of the command.
#pragma once

#include <gtest/gtest.h>

#include <filesystem>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cadre/tensor.h"
#include "end_to_end/process.h"
#include "support/temp_dir.h"

namespace cadre::test {

inline const std::vector<std::string> kModels = {"qwen2_moe",  "qwen3_moe", "mixtral",
                                                 "olmoe",      "glm4_moe",  "granitemoe",
                                                 "minimax_m2", "gpt_oss"};
inline const std::vector<std::string> kCpuBackends = {"eager", "batched_mm", "grouped_mm",
                                                      "deepgemm"};

/// A device that no machine has, and the exit status of a command that is asked to run on it: not
/// served by a build without CUDA, else a failing device.
inline const std::string kMissingGpu = "cuda:1000";
int missing_gpu_status();

/// tests/data/models/<name>
std::filesystem::path model_folder(const std::string& name);
/// Its stored values, which are also an input file of `forward` and `generate`.
std::filesystem::path expected_file(const std::string& name);

/// A copy of a model's folder inside `folder` that a test may damage.
std::filesystem::path copy_model(const std::string& name, const TempDir& folder);

std::string read_file(const std::filesystem::path& path);
void write_file(const std::filesystem::path& path, const std::string& content);

/// Replaces a key of config.json.
void set_config(const std::filesystem::path& model, const std::string& key,
                const nlohmann::json& value);

/// Writes input_ids of this shape, filled with `values` over and over.
std::filesystem::path write_input_ids(const std::filesystem::path& file, const Dims& shape,
                                      const std::vector<int64_t>& values,
                                      DType dtype = DType::kI64);

/// A tensor of a file as float64 values.
std::vector<double> read_tensor(const std::filesystem::path& file, const std::string& name);
Dims read_shape(const std::filesystem::path& file, const std::string& name);

/// Standard output as JSON; the test fails when it is not exactly one object on one line.
nlohmann::json json_of(const Result& result);

/// The command ended with `code`, nothing on standard output, and one message on standard error
/// that starts with "cadre" and holds all `parts`.
void expect_failure(const Result& result, int code, const std::vector<std::string>& parts);

/// Ended with 0 and said nothing on standard error.
void expect_success(const Result& result);

}  // namespace cadre::test

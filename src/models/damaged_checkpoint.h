// For tests: a copy of a fixture whose config and tensors can be changed before it is written.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <filesystem>
#include <functional>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "io/json.h"
#include "io/safetensors.h"
#include "support/temp_dir.h"

namespace cadre::test {

class DamagedCheckpoint {
 public:
  /// A fixture of one file.
  explicit DamagedCheckpoint(const std::string& name)
      : source_(std::filesystem::path(CADRE_TEST_DATA) / "models" / name),
        file_(SafetensorsFile::open(source_ / "model.safetensors")),
        config(read_json_file(source_ / "config.json")) {
    for (const SafetensorsEntry& entry : file_.header().entries) {
      tensors[entry.name] = file_.view(entry);
    }
  }

  /// Zeros of this kind under `name`.
  void put(const std::string& name, DType dtype, const Dims& shape) {
    owned_.push_back(std::make_unique<std::vector<std::byte>>(
        static_cast<size_t>(num_elements(shape)) * size_of(dtype)));
    tensors[name] = TensorView(owned_.back()->data(), dtype, shape);
  }

  /// Writes all and returns the folder.
  std::string write() const {
    folder_.write("config.json", config.dump());
    std::vector<NamedTensor> named;
    for (const auto& [name, tensor] : tensors) named.push_back({name, tensor});
    write_safetensors(folder_ / "model.safetensors", named);
    return folder_.path().string();
  }
  const TempDir& folder() const { return folder_; }

 private:
  std::filesystem::path source_;
  SafetensorsFile file_;
  std::vector<std::unique_ptr<std::vector<std::byte>>> owned_;
  TempDir folder_;

 public:
  Json config;
  std::map<std::string, TensorView> tensors;
};

/// What loading the folder says when it fails as `E`; fails the test otherwise.
template <typename E>
std::string message_of(const std::function<void()>& action) {
  try {
    action();
  } catch (const E& error) {
    return error.what();
  } catch (const std::exception& error) {
    ADD_FAILURE() << "another error: " << error.what();
    return {};
  }
  ADD_FAILURE() << "no error";
  return {};
}

}  // namespace cadre::test

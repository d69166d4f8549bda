// Read-only walk through tokenizer.json that knows where it is, so that every fault names file and
// key.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>

#include "io/json.h"

namespace cadre::text {

class JsonNode {
 public:
  JsonNode(const Json& json, const std::string& origin) : json_(&json), origin_(&origin) {}

  const Json& json() const { return *json_; }
  const std::string& path() const { return path_; }

  /// The value of a key of this object; empty when absent or null.
  std::optional<JsonNode> find(std::string_view key) const;
  /// The same, but CheckpointError when absent.
  JsonNode at(std::string_view key) const;
  /// Element of this array.
  JsonNode element(size_t index) const;
  size_t array_size() const;

  std::string text() const;
  int64_t integer(int64_t min, int64_t max) const;
  std::string text_or(std::string_view key, std::string_view fallback) const;
  bool boolean_or(std::string_view key, bool fallback) const;

  /// Throws CheckpointError: file, key, what was expected, what is there.
  [[noreturn]] void fail(std::string_view expected) const;
  /// The same with the finding in own words.
  [[noreturn]] void fail_with(std::string_view finding) const;
  /// Throws Unsupported naming the component and what works.
  [[noreturn]] void unsupported(std::string_view component, std::string_view supported) const;

 private:
  JsonNode(const Json& json, const std::string& origin, std::string path)
      : json_(&json), origin_(&origin), path_(std::move(path)) {}
  std::string where() const;

  const Json* json_;
  const std::string* origin_;
  std::string path_;
};

}  // namespace cadre::text

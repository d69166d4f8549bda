// JSON from files that nobody has checked: a bounded, strict parse and typed access with messages
// that name file and key.
#pragma once

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <limits>
#include <memory>
#include <nlohmann/json_fwd.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cadre {

using Json = nlohmann::json;

/// Throws CheckpointError naming `origin` and the byte offset for malformed text, duplicate keys in
/// one object, nesting deeper than 100, or a top level that is no object.
Json parse_json_object(std::string_view text, const std::string& origin);

/// Reads and parses a file. Throws CheckpointError when it is missing, unreadable or larger than
/// max_bytes.
Json read_json_file(const std::filesystem::path& path, int64_t max_bytes = int64_t{1} << 30);

/// Typed read-only access to one JSON object. Every accessor throws CheckpointError naming the
/// file, the dotted key path, what was expected and what is there. A key whose value is null counts
/// as absent.
class ConfigReader {
 public:
  /// `origin` names the file in messages.
  ConfigReader(Json json, std::string origin);

  bool has(std::string_view key) const;
  /// The key is there and its value is null: where that says something else than leaving it out.
  bool is_null(std::string_view key) const;
  /// "rope_parameters.factor": the key as messages name it.
  std::string path(std::string_view key) const { return prefix_ + std::string(key); }

  int64_t integer(std::string_view key, int64_t min = std::numeric_limits<int64_t>::min(),
                  int64_t max = std::numeric_limits<int64_t>::max()) const;
  int64_t integer_or(std::string_view key, int64_t fallback,
                     int64_t min = std::numeric_limits<int64_t>::min(),
                     int64_t max = std::numeric_limits<int64_t>::max()) const;
  double number(std::string_view key) const;
  double number_or(std::string_view key, double fallback) const;
  bool boolean(std::string_view key) const;
  bool boolean_or(std::string_view key, bool fallback) const;
  std::string text(std::string_view key) const;
  std::string text_or(std::string_view key, std::string_view fallback) const;
  std::vector<int64_t> integers(std::string_view key) const;  // an integer counts as a list of one
  std::vector<std::string> texts(std::string_view key) const;
  ConfigReader object(std::string_view key) const;

  /// The first of `keys` that is present: one field under its older and newer names. Throws when
  /// none is.
  std::string_view first_of(std::initializer_list<std::string_view> keys) const;

  const Json& json() const { return *node_; }
  const std::string& origin() const { return origin_; }

 private:
  ConfigReader(std::shared_ptr<const Json> root, const Json* node, std::string origin,
               std::string prefix);
  const Json* find(std::string_view key) const;  // null when absent
  const Json& at(std::string_view key, std::string_view expected) const;

  std::shared_ptr<const Json> root_;
  const Json* node_;
  std::string origin_;
  std::string prefix_;  // "rope_parameters." inside a nested object
};

}  // namespace cadre

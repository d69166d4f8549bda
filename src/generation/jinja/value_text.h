// Values as text: Python's str() and repr(), and JSON both ways.
#pragma once

#include <nlohmann/json.hpp>
#include <optional>
#include <string>

#include "generation/jinja/value.h"

namespace cadre::jinja {

/// str(value); nothing for an undefined value. Throws Fault for what has no text of its own.
std::string to_text(const Value& value, Budget& budget);
/// repr(value)
std::string to_repr(const Value& value, Budget& budget);

/// json.dumps() as Transformers' filter `tojson` calls it.
struct JsonStyle {
  bool ascii_only = false;
  bool sort_keys = false;
  std::optional<std::string> indent = {};  // of one level; without it all goes on one line
  std::string item_separator = ", ";
  std::string key_separator = ": ";
};
std::string to_json(const Value& value, const JsonStyle& style, Budget& budget);

/// Keeps the order of keys. Throws Fault for integers beyond 64 bits with a sign.
Value from_json(const nlohmann::ordered_json& json);

}  // namespace cadre::jinja

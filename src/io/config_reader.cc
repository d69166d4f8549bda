// Typed access to a JSON object (declared in json.h).
#include <nlohmann/json.hpp>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/json.h"

namespace cadre {
namespace {

// What is there, for a message.
std::string describe(const Json& value) {
  switch (value.type()) {
    case Json::value_t::null:
      return "null";
    case Json::value_t::boolean:
      return value.get<bool>() ? "true" : "false";
    case Json::value_t::string:
      return str_cat("the text ", quote(value.get_ref<const std::string&>()));
    case Json::value_t::array:
      return str_cat("a list of ", value.size());
    case Json::value_t::object:
      return "an object";
    default:
      return str_cat("the number ", value.dump());
  }
}

std::string range_text(int64_t min, int64_t max) {
  constexpr int64_t kLowest = std::numeric_limits<int64_t>::min();
  constexpr int64_t kHighest = std::numeric_limits<int64_t>::max();
  if (min == kLowest && max == kHighest) return "an integer";
  if (max == kHighest) return str_cat("an integer >= ", min);
  if (min == kLowest) return str_cat("an integer <= ", max);
  return str_cat("an integer from ", min, " to ", max);
}

// Empty when the value is no integer or does not fit.
std::optional<int64_t> to_integer(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto number = value.get<uint64_t>();
    if (number > static_cast<uint64_t>(std::numeric_limits<int64_t>::max())) return std::nullopt;
    return static_cast<int64_t>(number);
  }
  if (value.is_number_integer()) return value.get<int64_t>();
  return std::nullopt;
}

[[noreturn]] void fail(const std::string& origin, const std::string& prefix, std::string_view key,
                       std::string_view expected, std::string_view got) {
  throw CheckpointError(str_cat(origin, ": key ", quote(prefix + std::string(key)), ": expected ",
                                expected, ", got ", got, "; correct the file or fetch it again"));
}

}  // namespace

ConfigReader::ConfigReader(Json json, std::string origin)
    : root_(std::make_shared<const Json>(std::move(json))),
      node_(root_.get()),
      origin_(std::move(origin)) {
  if (!node_->is_object()) {
    throw CheckpointError(
        str_cat(origin_, ": expected an object at the top level, got ", describe(*node_)));
  }
}

ConfigReader::ConfigReader(std::shared_ptr<const Json> root, const Json* node, std::string origin,
                           std::string prefix)
    : root_(std::move(root)), node_(node), origin_(std::move(origin)), prefix_(std::move(prefix)) {}

const Json* ConfigReader::find(std::string_view key) const {
  const auto& object = node_->get_ref<const Json::object_t&>();
  const auto found = object.find(key);
  return found == object.end() || found->second.is_null() ? nullptr : &found->second;
}

const Json& ConfigReader::at(std::string_view key, std::string_view expected) const {
  const Json* value = find(key);
  if (value == nullptr)
    fail(origin_, prefix_, key, expected, "nothing (the key is missing or null)");
  return *value;
}

bool ConfigReader::has(std::string_view key) const { return find(key) != nullptr; }

bool ConfigReader::is_null(std::string_view key) const {
  const auto& object = node_->get_ref<const Json::object_t&>();
  const auto found = object.find(key);
  return found != object.end() && found->second.is_null();
}

int64_t ConfigReader::integer(std::string_view key, int64_t min, int64_t max) const {
  const std::string expected = range_text(min, max);
  const Json& value = at(key, expected);
  const std::optional<int64_t> number = to_integer(value);
  if (!number || *number < min || *number > max)
    fail(origin_, prefix_, key, expected, describe(value));
  return *number;
}

int64_t ConfigReader::integer_or(std::string_view key, int64_t fallback, int64_t min,
                                 int64_t max) const {
  return has(key) ? integer(key, min, max) : fallback;
}

double ConfigReader::number(std::string_view key) const {
  const Json& value = at(key, "a number");
  if (!value.is_number()) fail(origin_, prefix_, key, "a number", describe(value));
  return value.get<double>();
}

double ConfigReader::number_or(std::string_view key, double fallback) const {
  return has(key) ? number(key) : fallback;
}

bool ConfigReader::boolean(std::string_view key) const {
  const Json& value = at(key, "true or false");
  if (!value.is_boolean()) fail(origin_, prefix_, key, "true or false", describe(value));
  return value.get<bool>();
}

bool ConfigReader::boolean_or(std::string_view key, bool fallback) const {
  return has(key) ? boolean(key) : fallback;
}

std::string ConfigReader::text(std::string_view key) const {
  const Json& value = at(key, "a text");
  if (!value.is_string()) fail(origin_, prefix_, key, "a text", describe(value));
  return value.get<std::string>();
}

std::string ConfigReader::text_or(std::string_view key, std::string_view fallback) const {
  return has(key) ? text(key) : std::string(fallback);
}

std::vector<int64_t> ConfigReader::integers(std::string_view key) const {
  constexpr std::string_view kExpected = "an integer or a list of integers";
  const Json& value = at(key, kExpected);
  if (const auto single = to_integer(value)) return {*single};
  if (!value.is_array()) fail(origin_, prefix_, key, kExpected, describe(value));
  std::vector<int64_t> result;
  for (const Json& item : value) {
    const auto number = to_integer(item);
    if (!number)
      fail(origin_, prefix_, key, kExpected, str_cat("a list with ", describe(item), " in it"));
    result.push_back(*number);
  }
  return result;
}

std::vector<std::string> ConfigReader::texts(std::string_view key) const {
  constexpr std::string_view kExpected = "a list of texts";
  const Json& value = at(key, kExpected);
  if (!value.is_array()) fail(origin_, prefix_, key, kExpected, describe(value));
  std::vector<std::string> result;
  for (const Json& item : value) {
    if (!item.is_string())
      fail(origin_, prefix_, key, kExpected, str_cat("a list with ", describe(item), " in it"));
    result.push_back(item.get<std::string>());
  }
  return result;
}

ConfigReader ConfigReader::object(std::string_view key) const {
  const Json& value = at(key, "an object");
  if (!value.is_object()) fail(origin_, prefix_, key, "an object", describe(value));
  return ConfigReader(root_, &value, origin_, str_cat(prefix_, key, "."));
}

std::string_view ConfigReader::first_of(std::initializer_list<std::string_view> keys) const {
  for (const std::string_view key : keys) {
    if (has(key)) return key;
  }
  std::vector<std::string> names;
  for (const std::string_view key : keys) names.push_back(quote(prefix_ + std::string(key)));
  throw CheckpointError(str_cat(origin_, ": expected one of the keys ", join(names),
                                ", got none of them; correct the file or fetch it again"));
}

}  // namespace cadre

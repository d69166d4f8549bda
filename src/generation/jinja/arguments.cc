#include <algorithm>

#include "generation/jinja/callable.h"

namespace cadre::jinja {

std::vector<std::optional<Value>> Arguments::bind(std::string_view function,
                                                  std::initializer_list<std::string_view> names,
                                                  size_t required) const {
  if (positional.size() > names.size()) {
    fail(function, " takes at most ", names.size(), " arguments, got ", positional.size());
  }
  std::vector<std::optional<Value>> values(names.size());
  std::copy(positional.begin(), positional.end(), values.begin());
  for (const auto& [name, value] : named) {
    const auto* const place = std::find(names.begin(), names.end(), name);
    if (place == names.end()) fail(function, " takes no argument named ", quote(name));
    auto& slot = values[static_cast<size_t>(place - names.begin())];
    if (slot) fail(function, " got the argument ", quote(name), " twice");
    slot = value;
  }
  for (size_t i = 0; i < required; ++i) {
    if (!values[i]) fail(function, " needs the argument ", quote(names.begin()[i]));
  }
  return values;
}

int64_t to_integer(const Value& value, std::string_view what) {
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_integer()) {
    fail(what, ": expected a whole number, got a value of type ", type_name(value));
  }
  return value.integer();
}

const std::string& to_string(const Value& value, std::string_view what) {
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_string()) {
    fail(what, ": expected a text, got a value of type ", type_name(value));
  }
  return value.string();
}

}  // namespace cadre::jinja

// What templates call: filters, tests, methods and functions of ours, and the templates' own
// macros.
#pragma once

#include <initializer_list>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "generation/jinja/value.h"

namespace cadre::jinja {

class Evaluator;
struct MacroNode;
class Scope;

/// The values of a call, before they meet names.
struct Arguments {
  Values positional = {};
  std::vector<std::pair<std::string, Value>> named = {};

  /// One value per name, in their order; empty where none was given. The first `required` must be
  /// there. Throws Fault, naming `function`, for more values and for names that are not in the
  /// list.
  std::vector<std::optional<Value>> bind(std::string_view function,
                                         std::initializer_list<std::string_view> names,
                                         size_t required = 0) const;
};

/// `self`: what a filter or method is applied to; undefined for functions.
using Function = Value (*)(Evaluator& evaluator, const Value& self, const Arguments& arguments);
using Test = bool (*)(Evaluator& evaluator, const Value& value, const Arguments& arguments);

struct Callable {
  std::string name;
  Function function = nullptr;
  Value self = {};
  const MacroNode* macro = nullptr;  // in place of a function
  Scope* scope = nullptr;            // where the macro was made
};

/// Null for a name that is not known.
Function find_filter(std::string_view name);
Test find_test(std::string_view name);
/// The method `name` of `self`, bound to it; undefined when there is none.
Value find_method(const Value& self, std::string_view name);
/// range, namespace, dict, raise_exception, strftime_now; null for another name.
Function find_global(std::string_view name);

/// For messages: "abs, capitalize, ...".
std::string filter_names();
std::string test_names();

// What several of the files behind these share.

/// A whole number as Python's int, for arguments. Throws Fault naming `what`.
int64_t to_integer(const Value& value, std::string_view what);
/// The text of a string; Throws Fault naming `what` for another type.
const std::string& to_string(const Value& value, std::string_view what);

}  // namespace cadre::jinja

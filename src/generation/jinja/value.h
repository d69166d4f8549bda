// Values of the template language: Python's, as far as templates meet them. All are immutable but
// namespaces and loops, which belong to the interpreter.
#pragma once

#include <concepts>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

#include "generation/jinja/fault.h"

namespace cadre::jinja {

struct Array;
struct Dict;
struct Callable;
struct Namespace;
class LoopState;

/// A name, attribute or item that is not there. `why` is the error that using it gives.
struct Undefined {
  std::shared_ptr<const std::string> why;
};
struct None {};

using Text = std::shared_ptr<const std::string>;  // valid UTF-8
using ArrayPtr = std::shared_ptr<const Array>;
using DictPtr = std::shared_ptr<const Dict>;
using CallablePtr = std::shared_ptr<const Callable>;
using LoopPtr = std::shared_ptr<LoopState>;

class Value {
 public:
  Value() = default;  // undefined
  Value(None none) : data_(none) {}
  Value(Undefined undefined) : data_(std::move(undefined)) {}
  Value(std::same_as<bool> auto value) : data_(static_cast<bool>(value)) {}
  Value(int64_t value) : data_(value) {}
  Value(size_t value) : data_(static_cast<int64_t>(value)) {}
  Value(double value) : data_(value) {}
  Value(std::string text) : data_(std::make_shared<const std::string>(std::move(text))) {}
  Value(std::string_view text) : Value(std::string(text)) {}
  Value(Text text) : data_(std::move(text)) {}
  Value(ArrayPtr array) : data_(std::move(array)) {}
  Value(DictPtr dict) : data_(std::move(dict)) {}
  Value(CallablePtr callable) : data_(std::move(callable)) {}
  Value(Namespace* names) : data_(names) {}
  Value(LoopPtr loop) : data_(std::move(loop)) {}

  bool is_undefined() const { return holds<Undefined>(); }
  bool is_none() const { return holds<None>(); }
  bool is_bool() const { return holds<bool>(); }
  bool is_float() const { return holds<double>(); }
  bool is_string() const { return holds<Text>(); }
  bool is_array() const { return holds<ArrayPtr>(); }
  bool is_dict() const { return holds<DictPtr>(); }
  /// Python's int, of which bool is a kind.
  bool is_integer() const { return holds<int64_t>() || is_bool(); }
  bool is_number() const { return is_integer() || is_float(); }

  /// Each only after its question.
  bool boolean() const { return std::get<bool>(data_); }
  int64_t integer() const {
    return is_bool() ? static_cast<int64_t>(boolean()) : std::get<int64_t>(data_);
  }
  double number() const {
    return is_float() ? std::get<double>(data_) : static_cast<double>(integer());
  }
  /// Exact for integers and decimals alike.
  long double exact_number() const {
    return is_float() ? static_cast<long double>(number()) : static_cast<long double>(integer());
  }
  const std::string& string() const { return *std::get<Text>(data_); }
  const Array& array() const { return *std::get<ArrayPtr>(data_); }
  const Dict& dict() const { return *std::get<DictPtr>(data_); }
  const Undefined& undefined() const { return std::get<Undefined>(data_); }

  /// Null for another type.
  const Callable* callable() const;
  Namespace* names() const;
  LoopState* loop() const;

 private:
  template <typename T>
  bool holds() const {
    return std::holds_alternative<T>(data_);
  }

  std::variant<Undefined, None, bool, int64_t, double, Text, ArrayPtr, DictPtr, CallablePtr,
               Namespace*, LoopPtr>
      data_;
};

using Values = std::vector<Value>;

enum class ArrayKind : uint8_t { kList, kTuple, kRange, kKeys, kValues, kItems, kGenerator };

/// Everything that is a row of values.
struct Array {
  ArrayKind kind = ArrayKind::kList;
  Values items;
  int depth = 1;                  // of containers inside each other
  mutable bool consumed = false;  // a generator gives its items once
};

/// Refuses values nested deeper than a text could ever need: they are walked recursively.
Value make_array(Values items, ArrayKind kind = ArrayKind::kList);

/// Entries in the order in which their keys came first.
struct Dict {
  std::vector<std::pair<Value, Value>> entries;
  int depth = 1;

  /// Null when absent. Throws Fault for a key that cannot be one (a list).
  const Value* find(const Value& key) const;
  /// While the dict is being built.
  void set(const Value& key, Value value);

 private:
  const size_t* index_of(const Value& key) const;

  std::unordered_map<std::string_view, size_t> by_text_;  // views into the keys
  std::map<long double, size_t> by_number_;  // 1, 1.0 and true are one key; exact for both types
  std::optional<size_t> none_;
};
Value make_dict(Dict dict);

/// namespace(): the one thing that templates write to.
struct Namespace {
  Dict names;
};

/// Undefined with the message of its use.
template <typename... Args>
Value make_undefined(const Args&... why) {
  return Undefined{std::make_shared<const std::string>(str_cat(why...))};
}
/// Throws the fault that using `value`, which is undefined, gives.
[[noreturn]] void fail_undefined(const Value& value);

/// "str", "dict", ... as Python names it.
std::string_view type_name(const Value& value);

bool truth(const Value& value);

/// Python's ==; numbers of all types compare by value.
bool equal(const Value& a, const Value& b, Budget& budget);
/// Below, equal or above zero, as a < b would find. Throws Fault where Python has no order.
int compare(const Value& a, const Value& b, Budget& budget);
/// `item in container`
bool contains(const Value& container, const Value& item, Budget& budget);

/// What a loop over `value` visits: items, keys of a dict, characters of a text; nothing for an
/// undefined value. Uses a generator up. Throws Fault for what cannot be looped over.
Values iterate(const Value& value, Budget& budget);
bool is_iterable(const Value& value);

/// len(value)
int64_t length(const Value& value, Budget& budget);

}  // namespace cadre::jinja

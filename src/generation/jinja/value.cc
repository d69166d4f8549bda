#include "generation/jinja/value.h"

#include <algorithm>
#include <cmath>

#include "generation/jinja/callable.h"
#include "generation/jinja/loop.h"
#include "generation/jinja/python_text.h"

namespace cadre::jinja {
namespace {

constexpr int kMaxNesting = 200;

int depth_of(const Value& value) {
  if (value.is_array()) return value.array().depth;
  return value.is_dict() ? value.dict().depth : 0;
}

int nest(int depth, const Value& inner) {
  depth = std::max(depth, depth_of(inner) + 1);
  if (depth > kMaxNesting) fail("lists and dicts nested deeper than ", kMaxNesting, " levels");
  return depth;
}

int compare_numbers(const Value& a, const Value& b) {
  const long double x = a.exact_number();
  const long double y = b.exact_number();
  return x < y ? -1 : static_cast<int>(x > y);
}

bool is_nan(const Value& value) { return value.is_float() && std::isnan(value.number()); }

bool equal_arrays(const Array& a, const Array& b, Budget& budget) {
  if (a.kind != b.kind || a.items.size() != b.items.size()) return false;
  for (size_t i = 0; i < a.items.size(); ++i) {
    if (!equal(a.items[i], b.items[i], budget)) return false;
  }
  return true;
}

bool equal_dicts(const Dict& a, const Dict& b, Budget& budget) {
  if (a.entries.size() != b.entries.size()) return false;
  for (const auto& [key, value] : a.entries) {
    const Value* other = b.find(key);
    if (other == nullptr || !equal(value, *other, budget)) return false;
  }
  return true;
}

[[noreturn]] void fail_order(const Value& a, const Value& b) {
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  fail("values of type ", type_name(a), " and ", type_name(b), " have no order");
}

bool has_length(const Value& value) {
  return value.is_array() && value.array().kind != ArrayKind::kGenerator;
}

}  // namespace

const Callable* Value::callable() const {
  const auto* found = std::get_if<CallablePtr>(&data_);
  return found == nullptr ? nullptr : found->get();
}

Namespace* Value::names() const {
  auto* const* found = std::get_if<Namespace*>(&data_);
  return found == nullptr ? nullptr : *found;
}

LoopState* Value::loop() const {
  const auto* found = std::get_if<LoopPtr>(&data_);
  return found == nullptr ? nullptr : found->get();
}

Value make_array(Values items, ArrayKind kind) {
  auto array = std::make_shared<Array>();
  for (const Value& item : items) array->depth = nest(array->depth, item);
  array->kind = kind;
  array->items = std::move(items);
  return ArrayPtr(std::move(array));
}

Value make_dict(Dict dict) {
  for (const auto& entry : dict.entries) dict.depth = nest(dict.depth, entry.second);
  return std::make_shared<const Dict>(std::move(dict));
}

const size_t* Dict::index_of(const Value& key) const {
  const auto place = [](const auto& map, const auto& wanted) {
    const auto found = map.find(wanted);
    return found == map.end() ? nullptr : &found->second;
  };
  if (key.is_string()) return place(by_text_, std::string_view(key.string()));
  if (key.is_number()) return place(by_number_, key.exact_number());
  if (!key.is_none()) fail("a value of type ", type_name(key), " cannot be a key of a dict");
  return none_ ? &*none_ : nullptr;
}

const Value* Dict::find(const Value& key) const {
  const size_t* index = index_of(key);
  return index == nullptr ? nullptr : &entries[*index].second;
}

void Dict::set(const Value& key, Value value) {
  if (const size_t* index = index_of(key)) {
    entries[*index].second = std::move(value);
    return;
  }
  const size_t index = entries.size();
  entries.emplace_back(key, std::move(value));
  if (key.is_string()) {
    by_text_.emplace(entries.back().first.string(), index);
  } else if (key.is_number()) {
    by_number_.emplace(key.exact_number(), index);
  } else {
    none_ = index;
  }
}

void fail_undefined(const Value& value) {
  const auto& why = value.undefined().why;
  fail(why ? *why : "the value is undefined");
}

std::string_view type_name(const Value& value) {
  if (value.is_undefined()) return "Undefined";
  if (value.is_none()) return "NoneType";
  if (value.is_bool()) return "bool";
  if (value.is_integer()) return "int";
  if (value.is_float()) return "float";
  if (value.is_string()) return "str";
  if (value.is_dict()) return "dict";
  if (value.names() != nullptr) return "Namespace";
  if (value.loop() != nullptr) return "LoopContext";
  if (value.callable() != nullptr) return "function";
  switch (value.array().kind) {
    case ArrayKind::kList:
      return "list";
    case ArrayKind::kTuple:
      return "tuple";
    case ArrayKind::kRange:
      return "range";
    case ArrayKind::kKeys:
      return "dict_keys";
    case ArrayKind::kValues:
      return "dict_values";
    case ArrayKind::kItems:
      return "dict_items";
    case ArrayKind::kGenerator:
      break;
  }
  return "generator";
}

bool truth(const Value& value) {
  if (value.is_undefined() || value.is_none()) return false;
  if (value.is_integer()) return value.integer() != 0;
  if (value.is_float()) return value.number() != 0;
  if (value.is_string()) return !value.string().empty();
  if (has_length(value)) return !value.array().items.empty();
  return !value.is_dict() || !value.dict().entries.empty();
}

bool equal(const Value& a, const Value& b, Budget& budget) {
  budget.step();
  if (a.is_number() && b.is_number()) {
    return !is_nan(a) && !is_nan(b) && compare_numbers(a, b) == 0;
  }
  if (a.is_string() && b.is_string()) {
    if (a.string().size() != b.string().size()) return false;
    budget.bytes(a.string().size());
    return a.string() == b.string();
  }
  if (a.is_array() && b.is_array()) return equal_arrays(a.array(), b.array(), budget);
  if (a.is_dict() && b.is_dict()) return equal_dicts(a.dict(), b.dict(), budget);
  if (a.is_undefined() || b.is_undefined()) return a.is_undefined() && b.is_undefined();
  if (a.is_none() || b.is_none()) return a.is_none() && b.is_none();
  if (a.names() != nullptr) return a.names() == b.names();
  if (a.loop() != nullptr) return a.loop() == b.loop();
  return a.callable() != nullptr && a.callable() == b.callable();
}

int compare(const Value& a, const Value& b, Budget& budget) {
  budget.step();
  if (a.is_number() && b.is_number()) return compare_numbers(a, b);
  if (a.is_string() && b.is_string()) {
    budget.bytes(std::min(a.string().size(), b.string().size()));
    return a.string().compare(b.string());  // the order of UTF-8 is that of code points
  }
  const bool rows = a.is_array() && b.is_array() && a.array().kind == b.array().kind;
  if (!rows || a.array().kind > ArrayKind::kTuple) fail_order(a, b);
  const Values& left = a.array().items;
  const Values& right = b.array().items;
  for (size_t i = 0; i < std::min(left.size(), right.size()); ++i) {
    if (!equal(left[i], right[i], budget)) return compare(left[i], right[i], budget);
  }
  return left.size() < right.size() ? -1 : static_cast<int>(left.size() > right.size());
}

bool contains(const Value& container, const Value& item, Budget& budget) {
  budget.step();
  if (container.is_string()) {
    if (!item.is_string()) {
      fail("'in <string>' requires a string on its left, got a value of type ", type_name(item));
    }
    budget.bytes(container.string().size());
    return find_text(container.string(), item.string()) != std::string_view::npos;
  }
  if (container.is_dict()) return container.dict().find(item) != nullptr;
  if (!is_iterable(container)) {
    fail("'in' requires a container on its right, got a value of type ", type_name(container));
  }
  const Values items = iterate(container, budget);
  return std::any_of(items.begin(), items.end(),
                     [&](const Value& found) { return equal(found, item, budget); });
}

bool is_iterable(const Value& value) {
  return value.is_undefined() || value.is_string() || value.is_array() || value.is_dict();
}

Values iterate(const Value& value, Budget& budget) {
  if (value.is_undefined()) return {};
  Values items;
  if (value.is_string()) {
    budget.bytes(value.string().size());
    for (const std::string_view character : characters(value.string())) {
      budget.items(1);
      items.emplace_back(character);
    }
    return items;
  }
  if (value.is_dict()) {
    budget.items(value.dict().entries.size());
    for (const auto& entry : value.dict().entries) items.push_back(entry.first);
    return items;
  }
  if (!value.is_array()) fail("a value of type ", type_name(value), " cannot be looped over");
  const Array& array = value.array();
  if (array.kind == ArrayKind::kGenerator && std::exchange(array.consumed, true)) return {};
  budget.items(array.items.size());
  return array.items;
}

int64_t length(const Value& value, Budget& budget) {
  if (value.is_undefined()) return 0;
  if (value.is_string()) {
    budget.bytes(value.string().size());
    return static_cast<int64_t>(count_characters(value.string()));
  }
  if (value.is_dict()) return static_cast<int64_t>(value.dict().entries.size());
  if (!has_length(value)) fail("a value of type ", type_name(value), " has no length");
  return static_cast<int64_t>(value.array().items.size());
}

}  // namespace cadre::jinja

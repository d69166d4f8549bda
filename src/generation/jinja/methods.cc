// Methods of texts, dicts, lists and loops.
#include <algorithm>
#include <array>
#include <string>

#include "generation/jinja/evaluator.h"
#include "generation/jinja/loop.h"
#include "generation/jinja/python_text.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {
namespace {

std::optional<std::string_view> optional_text(const std::optional<Value>& value,
                                              std::string_view what) {
  if (!value || value->is_none()) return {};
  return to_string(*value, what);
}

template <Sides sides>
Value stripped(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("strip", {"chars"});
  const auto set = optional_text(bound[0], "strip: chars");
  const std::string& text = self.string();
  evaluator.budget().bytes(text.size() * std::max<size_t>(set ? set->size() : 1, 1));
  return strip(text, set, sides);
}

Value to_list(const std::vector<std::string_view>& parts, Budget& budget) {
  budget.items(parts.size());
  Values items;
  for (const std::string_view part : parts) {
    budget.bytes(part.size());
    items.emplace_back(part);
  }
  return make_array(std::move(items));
}

template <bool from_right>
Value split_text(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("split", {"sep", "maxsplit"});
  const auto separator = optional_text(bound[0], "split: sep");
  if (separator && separator->empty()) fail("split: the separator is empty");
  const int64_t limit = bound[1] ? to_integer(*bound[1], "split: maxsplit") : -1;
  const std::string& text = self.string();
  // A search from the right is not linear.
  evaluator.budget().bytes(text.size() * (from_right && separator ? separator->size() : 1));
  return to_list(
      from_right ? split_from_right(text, separator, limit) : split(text, separator, limit),
      evaluator.budget());
}

Value lines(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("splitlines", {"keepends"});
  evaluator.budget().bytes(self.string().size());
  return to_list(split_lines(self.string(), bound[0] && truth(*bound[0])), evaluator.budget());
}

template <bool at_end>
Value starts_or_ends(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("startswith and endswith", {"text"}, 1);
  const std::string_view text = self.string();
  const auto matches = [&](const Value& part) {
    const std::string& wanted = to_string(part, "startswith and endswith");
    evaluator.budget().bytes(std::min(text.size(), wanted.size()));
    return at_end ? text.ends_with(wanted) : text.starts_with(wanted);
  };
  if (!bound[0]->is_array() || bound[0]->array().kind != ArrayKind::kTuple) {
    return matches(*bound[0]);
  }
  const Values& all = bound[0]->array().items;
  return std::any_of(all.begin(), all.end(), matches);
}

Value replace_text(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("replace", {"old", "new", "count"}, 2);
  const std::string& from = to_string(*bound[0], "replace: old");
  const std::string& to = to_string(*bound[1], "replace: new");
  const int64_t limit = bound[2] ? to_integer(*bound[2], "replace: count") : -1;
  const std::string& text = self.string();
  evaluator.budget().bytes(2 * text.size() + count_text(text, from) * to.size());
  return replace(text, from, to, limit);
}

template <std::string (*change)(std::string_view)>
Value changed(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  arguments.bind("this method", {});
  evaluator.budget().bytes(4 * self.string().size());
  return change(self.string());
}

template <CharacterClass wanted>
Value all_of(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  arguments.bind("this method", {});
  evaluator.budget().bytes(4 * self.string().size());
  return all_are(wanted, self.string());
}

template <bool from_right, bool must_exist>
Value find(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("find and index", {"sub"}, 1);
  const std::string& wanted = to_string(*bound[0], "find and index");
  const std::string& text = self.string();
  evaluator.budget().bytes(text.size() * (from_right ? wanted.size() + 1 : 2));
  const size_t at = from_right ? text.rfind(wanted) : find_text(text, wanted);
  if (at == text.npos && must_exist) fail("index: the text does not hold ", quote(wanted));
  if (at == text.npos) return int64_t{-1};
  return count_characters(std::string_view(text).substr(0, at));
}

Value count_in_text(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("count", {"sub"}, 1);
  evaluator.budget().bytes(self.string().size());
  return count_text(self.string(), to_string(*bound[0], "count"));
}

Value join_with(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("join", {"iterable"}, 1);
  if (bound[0]->is_undefined()) fail_undefined(*bound[0]);
  Budget& budget = evaluator.budget();
  std::string out;
  bool first = true;
  for (const Value& item : iterate(*bound[0], budget)) {
    const std::string& part = to_string(item, "join");
    budget.bytes(part.size() + self.string().size());
    if (!std::exchange(first, false)) out += self.string();
    out += part;
  }
  return out;
}

template <bool at_end>
Value without(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("removeprefix and removesuffix", {"text"}, 1);
  const std::string& gone = to_string(*bound[0], "removeprefix and removesuffix");
  std::string_view text = self.string();
  evaluator.budget().bytes(text.size());
  if (at_end ? text.ends_with(gone) : text.starts_with(gone)) {
    at_end ? text.remove_suffix(gone.size()) : text.remove_prefix(gone.size());
  }
  return text;
}

Value get(Evaluator& /*evaluator*/, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("get", {"key", "default"}, 1);
  if (const Value* found = self.dict().find(*bound[0])) return *found;
  return bound[1] ? *bound[1] : Value(None{});
}

template <ArrayKind kind>
Value view(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  arguments.bind("keys, values and items", {});
  Values items;
  evaluator.budget().items(self.dict().entries.size() * (kind == ArrayKind::kItems ? 3 : 1));
  for (const auto& [key, value] : self.dict().entries) {
    items.push_back(kind == ArrayKind::kKeys     ? key
                    : kind == ArrayKind::kValues ? value
                                                 : make_array({key, value}, ArrayKind::kTuple));
  }
  return make_array(std::move(items), kind);
}

Value copy(Evaluator& /*evaluator*/, const Value& self, const Arguments& arguments) {
  arguments.bind("copy", {});
  return self;  // nothing changes a value
}

Value count_in_list(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("count", {"value"}, 1);
  const Values& all = self.array().items;
  return static_cast<int64_t>(std::count_if(all.begin(), all.end(), [&](const Value& item) {
    return equal(item, *bound[0], evaluator.budget());
  }));
}

Value index_in_list(Evaluator& evaluator, const Value& self, const Arguments& arguments) {
  const auto bound = arguments.bind("index", {"value"}, 1);
  const Values& all = self.array().items;
  for (size_t i = 0; i < all.size(); ++i) {
    if (equal(all[i], *bound[0], evaluator.budget())) return i;
  }
  fail("index: the list does not hold the value");
}

Value cycle(Evaluator& /*evaluator*/, const Value& self, const Arguments& arguments) {
  const Values& all = arguments.positional;
  if (all.empty()) fail("loop.cycle needs values to choose from");
  return all[static_cast<size_t>(self.loop()->index0()) % all.size()];
}

Value refuse_change(Evaluator& /*evaluator*/, const Value& self, const Arguments& /*arguments*/) {
  fail("a template cannot change a value of type ", type_name(self),
       "; only set and namespace() hold what changes");
}

struct Row {
  std::string_view name;
  Function function;
};

constexpr Row kTextMethods[] = {
    {"capitalize", changed<capitalize>},
    {"count", count_in_text},
    {"endswith", starts_or_ends<true>},
    {"find", find<false, false>},
    {"index", find<false, true>},
    {"isalnum", all_of<CharacterClass::kAlnum>},
    {"isalpha", all_of<CharacterClass::kAlpha>},
    {"isdigit", all_of<CharacterClass::kDigit>},
    {"islower", all_of<CharacterClass::kLower>},
    {"isspace", all_of<CharacterClass::kSpace>},
    {"isupper", all_of<CharacterClass::kUpper>},
    {"join", join_with},
    {"lower", changed<lower>},
    {"lstrip", stripped<Sides::kLeft>},
    {"removeprefix", without<false>},
    {"removesuffix", without<true>},
    {"replace", replace_text},
    {"rfind", find<true, false>},
    {"rindex", find<true, true>},
    {"rsplit", split_text<true>},
    {"rstrip", stripped<Sides::kRight>},
    {"split", split_text<false>},
    {"splitlines", lines},
    {"startswith", starts_or_ends<false>},
    {"strip", stripped<Sides::kBoth>},
    {"title", changed<title>},
    {"upper", changed<upper>},
};

constexpr Row kDictMethods[] = {
    {"clear", refuse_change},
    {"copy", copy},
    {"get", get},
    {"items", view<ArrayKind::kItems>},
    {"keys", view<ArrayKind::kKeys>},
    {"pop", refuse_change},
    {"popitem", refuse_change},
    {"setdefault", refuse_change},
    {"update", refuse_change},
    {"values", view<ArrayKind::kValues>},
};

constexpr Row kListMethods[] = {
    {"append", refuse_change},  {"clear", refuse_change},  {"copy", copy},
    {"count", count_in_list},   {"extend", refuse_change}, {"index", index_in_list},
    {"insert", refuse_change},  {"pop", refuse_change},    {"remove", refuse_change},
    {"reverse", refuse_change}, {"sort", refuse_change},
};

constexpr Row kTupleMethods[] = {{"count", count_in_list}, {"index", index_in_list}};

constexpr Row kLoopMethods[] = {{"cycle", cycle}};

std::span<const Row> methods_of(const Value& self) {
  if (self.is_string()) return kTextMethods;
  if (self.is_dict()) return kDictMethods;
  if (self.loop() != nullptr) return kLoopMethods;
  if (!self.is_array()) return {};
  if (self.array().kind == ArrayKind::kList) return kListMethods;
  if (self.array().kind == ArrayKind::kTuple) return kTupleMethods;
  return {};
}

}  // namespace

Value find_method(const Value& self, std::string_view name) {
  for (const Row& row : methods_of(self)) {
    if (row.name != name) continue;
    Callable method{.name = std::string(name), .function = row.function, .self = self};
    return CallablePtr(std::make_shared<const Callable>(std::move(method)));
  }
  return {};
}

}  // namespace cadre::jinja

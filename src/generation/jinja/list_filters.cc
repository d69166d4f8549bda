// Filters of lists, dicts and other rows of values.
#include <algorithm>
#include <charconv>
#include <string>
#include <utility>

#include "generation/jinja/evaluator.h"
#include "generation/jinja/filters.h"
#include "generation/jinja/operators.h"
#include "generation/jinja/python_text.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {
namespace {

// value.a.0.b for the attribute "a.0.b", each part by item or by name.
Value follow(const Value& value, const Value& attribute, Budget& budget) {
  if (attribute.is_integer()) return get_item(value, attribute, budget);
  Value found = value;
  for (const std::string_view part : split(to_string(attribute, "attribute"), ".", -1)) {
    int64_t index = 0;
    const char* end = part.data() + part.size();
    const bool is_index =
        !part.empty() && part.front() != '-' && std::from_chars(part.data(), end, index).ptr == end;
    found = get_item(found, is_index ? Value(index) : Value(part), budget);
  }
  return found;
}

// Lower case for texts unless case matters: how filters compare.
Value folded(const Value& value, bool case_sensitive, Budget& budget) {
  if (case_sensitive || !value.is_string()) return value;
  budget.bytes(3 * value.string().size());
  return lower(value.string());
}

Value key_of(const Value& item, const std::optional<Value>& attribute, bool case_sensitive,
             Budget& budget) {
  const bool has_attribute = attribute && !attribute->is_none();
  return folded(has_attribute ? follow(item, *attribute, budget) : item, case_sensitive, budget);
}

// Sorts by keys[i], stable also when reversed. A fault may leave the sort half done, which harms
// nothing.
Values sorted(Values items, const Values& keys, bool reverse, Budget& budget) {
  std::vector<size_t> order(items.size());
  for (size_t i = 0; i < order.size(); ++i) order[i] = i;
  std::stable_sort(order.begin(), order.end(), [&](size_t a, size_t b) {
    return (reverse ? compare(keys[b], keys[a], budget) : compare(keys[a], keys[b], budget)) < 0;
  });
  Values out;
  for (const size_t i : order) out.push_back(items[i]);
  return out;
}

Value sort(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("sort", {"reverse", "case_sensitive", "attribute"});
  Budget& budget = evaluator.budget();
  const bool case_sensitive = bound[1] && truth(*bound[1]);
  Values items = iterate(value, budget);
  Values keys;
  for (const Value& item : items) {
    const bool several =
        bound[2] && bound[2]->is_string() && bound[2]->string().find(',') != std::string::npos;
    if (!several) {
      keys.push_back(key_of(item, bound[2], case_sensitive, budget));
      continue;
    }
    Values parts;
    for (const std::string_view name : split(bound[2]->string(), ",", -1)) {
      parts.push_back(key_of(item, Value(name), case_sensitive, budget));
    }
    keys.push_back(make_array(std::move(parts)));
  }
  return make_array(sorted(std::move(items), keys, bound[0] && truth(*bound[0]), budget));
}

const Dict& to_dict(const Value& value, std::string_view filter) {
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_dict()) {
    fail(filter, ": expected a dict, got a value of type ", type_name(value));
  }
  return value.dict();
}

Values pairs(const Dict& dict, Budget& budget) {
  Values items;
  budget.items(3 * dict.entries.size());
  for (const auto& [key, value] : dict.entries) {
    items.push_back(make_array({key, value}, ArrayKind::kTuple));
  }
  return items;
}

Value sort_dict(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("dictsort", {"case_sensitive", "by", "reverse"});
  Budget& budget = evaluator.budget();
  const std::string by = bound[1] ? to_string(*bound[1], "dictsort: by") : "key";
  if (by != "key" && by != "value") fail("dictsort: expected by key or value, got ", quote(by));
  const bool case_sensitive = bound[0] && truth(*bound[0]);
  const Dict& dict = to_dict(value, "dictsort");
  Values keys;
  for (const auto& [key, item] : dict.entries) {
    keys.push_back(folded(by == "key" ? key : item, case_sensitive, budget));
  }
  return make_array(sorted(pairs(dict, budget), keys, bound[2] && truth(*bound[2]), budget));
}

Value items(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("items", {});
  if (value.is_undefined()) return make_array({}, ArrayKind::kGenerator);
  return make_array(pairs(to_dict(value, "items"), evaluator.budget()), ArrayKind::kGenerator);
}

Value count(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("length", {});
  return length(value, evaluator.budget());
}

Value first(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("first", {});
  Values all = iterate(value, evaluator.budget());
  return all.empty() ? make_undefined("there is no first item, the row is empty") : all.front();
}

bool is_generator(const Value& value) {
  return value.is_array() && value.array().kind == ArrayKind::kGenerator;
}

Value last(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("last", {});
  if (is_generator(value)) fail("last: a generator has no last item; make it a list first");
  Values all = iterate(value, evaluator.budget());
  return all.empty() ? make_undefined("there is no last item, the row is empty") : all.back();
}

Value list(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("list", {});
  return make_array(iterate(value, evaluator.budget()));
}

Value reverse(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("reverse", {});
  Values all = iterate(value, evaluator.budget());
  std::reverse(all.begin(), all.end());
  if (!value.is_string()) return make_array(std::move(all), ArrayKind::kGenerator);
  std::string text;
  for (const Value& character : all) text += character.string();
  return text;
}

Value join_texts(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("join", {"d", "attribute"});
  Budget& budget = evaluator.budget();
  const std::string between = bound[0] ? to_text(*bound[0], budget) : "";
  const bool has_attribute = bound[1] && !bound[1]->is_none();
  std::string out;
  bool is_first = true;
  for (const Value& item : iterate(value, budget)) {
    budget.bytes(between.size());
    if (!std::exchange(is_first, false)) out += between;
    out += to_text(has_attribute ? follow(item, *bound[1], budget) : item, budget);
  }
  return out;
}

// map(attribute="name", default=value) or map("filter", arguments...)
Value map(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  Budget& budget = evaluator.budget();
  Values out;
  if (arguments.positional.empty()) {
    const auto bound = arguments.bind("map", {"attribute", "default"}, 1);
    for (const Value& item : iterate(value, budget)) {
      Value found = follow(item, *bound[0], budget);
      const bool use_default = found.is_undefined() && bound[1] && !bound[1]->is_none();
      out.push_back(use_default ? *bound[1] : std::move(found));
    }
    return make_array(std::move(out), ArrayKind::kGenerator);
  }
  const std::string name = to_string(arguments.positional.front(), "map");
  Arguments rest = arguments;
  rest.positional.erase(rest.positional.begin());
  for (const Value& item : iterate(value, budget)) {
    out.push_back(evaluator.apply_filter(name, item, rest));
  }
  return make_array(std::move(out), ArrayKind::kGenerator);
}

// select, reject ("test", arguments...) and selectattr, rejectattr ("attribute", "test", ...);
// without a test the truth counts.
template <bool wanted, bool of_attribute>
Value choose(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  Budget& budget = evaluator.budget();
  Arguments rest = arguments;
  const auto take = [&]() -> std::optional<Value> {
    if (rest.positional.empty()) return {};
    Value found = rest.positional.front();
    rest.positional.erase(rest.positional.begin());
    return found;
  };
  const std::optional<Value> attribute = of_attribute ? take() : std::nullopt;
  if (of_attribute && !attribute) fail("selectattr and rejectattr need an attribute");
  const std::optional<Value> test = take();
  const std::string name = test ? to_string(*test, "the name of a test") : "";
  Values out;
  for (const Value& item : iterate(value, budget)) {
    const Value subject = attribute ? follow(item, *attribute, budget) : item;
    const bool passes = test ? evaluator.apply_test(name, subject, rest) : truth(subject);
    if (passes == wanted) out.push_back(item);
  }
  return make_array(std::move(out), ArrayKind::kGenerator);
}

template <bool largest>
Value extreme(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("min and max", {"case_sensitive", "attribute"});
  Budget& budget = evaluator.budget();
  const bool case_sensitive = bound[0] && truth(*bound[0]);
  const Values all = iterate(value, budget);
  if (all.empty()) return make_undefined("there is no smallest or largest item, the row is empty");
  Value best = all.front();
  Value best_key = key_of(best, bound[1], case_sensitive, budget);
  for (const Value& item : all) {
    const Value key = key_of(item, bound[1], case_sensitive, budget);
    const int order = compare(key, best_key, budget);
    if (largest ? order <= 0 : order >= 0) continue;
    best = item;
    best_key = key;
  }
  return best;
}

Value sum(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("sum", {"attribute", "start"});
  Budget& budget = evaluator.budget();
  Value total = bound[1] ? *bound[1] : Value(int64_t{0});
  const bool has_attribute = bound[0] && !bound[0]->is_none();
  for (const Value& item : iterate(value, budget)) {
    total = calculate(Operator::kAdd, total, has_attribute ? follow(item, *bound[0], budget) : item,
                      budget);
  }
  return total;
}

Value unique(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("unique", {"case_sensitive", "attribute"});
  Budget& budget = evaluator.budget();
  const bool case_sensitive = bound[0] && truth(*bound[0]);
  Dict seen;
  Values out;
  for (const Value& item : iterate(value, budget)) {
    const Value key = key_of(item, bound[1], case_sensitive, budget);
    if (seen.find(key) != nullptr) continue;
    budget.bytes(128);
    seen.set(key, None{});
    out.push_back(item);
  }
  return make_array(std::move(out), ArrayKind::kGenerator);
}

Value attribute(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("attr", {"name"}, 1);
  if (value.is_dict()) {  // attributes alone, never keys
    const Value method = find_method(value, to_string(*bound[0], "attr: name"));
    return method.is_undefined() ? make_undefined("a dict has no such attribute") : method;
  }
  return get_attribute(value, to_string(*bound[0], "attr: name"));
}

Value batch(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("batch", {"linecount", "fill_with"}, 1);
  const int64_t size = to_integer(*bound[0], "batch: linecount");
  if (size < 1) fail("batch: expected rows of at least 1, got ", size);
  Values rows;
  Values row;
  for (const Value& item : iterate(value, evaluator.budget())) {
    if (static_cast<int64_t>(row.size()) == size) {
      rows.push_back(make_array(std::exchange(row, {})));
    }
    row.push_back(item);
  }
  const bool fills = bound[1] && !bound[1]->is_none();
  if (fills && !row.empty()) {
    evaluator.budget().items(static_cast<size_t>(size));
    row.resize(static_cast<size_t>(size), *bound[1]);
  }
  if (!row.empty()) rows.push_back(make_array(std::move(row)));
  return make_array(std::move(rows), ArrayKind::kGenerator);
}

}  // namespace

const std::array<FilterRow, 21> kListFilters = {{
    {"attr", attribute},
    {"batch", batch},
    {"count", count},
    {"dictsort", sort_dict},
    {"first", first},
    {"items", items},
    {"join", join_texts},
    {"last", last},
    {"length", count},
    {"list", list},
    {"map", map},
    {"max", extreme<true>},
    {"min", extreme<false>},
    {"reject", choose<false, false>},
    {"rejectattr", choose<false, true>},
    {"reverse", reverse},
    {"select", choose<true, false>},
    {"selectattr", choose<true, true>},
    {"sort", sort},
    {"sum", sum},
    {"unique", unique},
}};

}  // namespace cadre::jinja

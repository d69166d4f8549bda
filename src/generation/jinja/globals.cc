// The functions that every template finds: Jinja's and Transformers'.
#include <string>

#include "generation/jinja/evaluator.h"
#include "generation/jinja/python_text.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {
namespace {

Value range(Evaluator& evaluator, const Value& /*self*/, const Arguments& arguments) {
  constexpr int64_t kMost = 100'000;  // Jinja's own limit
  const auto bound = arguments.bind("range", {"start", "stop", "step"}, 1);
  int64_t first = to_integer(*bound[0], "range");
  int64_t last = bound[1] ? to_integer(*bound[1], "range") : std::exchange(first, 0);
  const int64_t step = bound[2] ? to_integer(*bound[2], "range") : 1;
  if (step == 0) fail("range: the step is 0");
  Values items;
  for (int64_t i = first; step > 0 ? i < last : i > last;) {
    if (static_cast<int64_t>(items.size()) == kMost) fail("range: more than ", kMost, " numbers");
    evaluator.budget().items(1);
    items.emplace_back(i);
    if (__builtin_add_overflow(i, step, &i)) break;
  }
  return make_array(std::move(items), ArrayKind::kRange);
}

// dict(mapping or pairs, name=value ...)
Dict to_dict(Evaluator& evaluator, const Arguments& arguments, std::string_view function) {
  if (arguments.positional.size() > 1) fail(function, " takes one argument without a name");
  Budget& budget = evaluator.budget();
  Dict dict;
  const auto add = [&](const Value& key, const Value& value) {
    budget.bytes(128);
    dict.set(key, value);
  };
  for (const Value& from : arguments.positional) {
    if (from.is_dict()) {
      for (const auto& [key, value] : from.dict().entries) add(key, value);
      continue;
    }
    for (const Value& pair : iterate(from, budget)) {
      const Values parts = iterate(pair, budget);
      if (parts.size() != 2) fail(function, ": expected pairs, got ", parts.size(), " values");
      add(parts[0], parts[1]);
    }
  }
  for (const auto& [name, value] : arguments.named) add(Value(name), value);
  return dict;
}

Value new_dict(Evaluator& evaluator, const Value& /*self*/, const Arguments& arguments) {
  return make_dict(to_dict(evaluator, arguments, "dict"));
}

Value new_namespace(Evaluator& evaluator, const Value& /*self*/, const Arguments& arguments) {
  return evaluator.make_namespace(to_dict(evaluator, arguments, "namespace"));
}

Value raise_exception(Evaluator& evaluator, const Value& /*self*/, const Arguments& arguments) {
  const auto bound = arguments.bind("raise_exception", {"message"}, 1);
  throw Fault{Fault::Kind::kRaised, to_text(*bound[0], evaluator.budget())};
}

Value strftime_now(Evaluator& evaluator, const Value& /*self*/, const Arguments& arguments) {
  const auto bound = arguments.bind("strftime_now", {"format"}, 1);
  const std::string& format = to_string(*bound[0], "strftime_now");
  if (format.empty()) return std::string();
  char buffer[1024];
  const size_t size = std::strftime(buffer, sizeof buffer, format.c_str(), &evaluator.now());
  if (size == 0) fail("strftime_now: expected the format of a date, got ", quote(format));
  return std::string(buffer, size);
}

}  // namespace

Function find_global(std::string_view name) {
  if (name == "range") return range;
  if (name == "dict") return new_dict;
  if (name == "namespace") return new_namespace;
  if (name == "raise_exception") return raise_exception;
  if (name == "strftime_now") return strftime_now;
  return nullptr;
}

}  // namespace cadre::jinja

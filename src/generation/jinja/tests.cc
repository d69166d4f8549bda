// What may stand after "is".
#include <array>
#include <cmath>
#include <string>

#include "generation/jinja/evaluator.h"
#include "generation/jinja/operators.h"
#include "generation/jinja/python_text.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {
namespace {

Value the_argument(const Arguments& arguments, std::string_view test) {
  return *arguments.bind(test, {"other"}, 1)[0];
}

template <Operator op>
bool compares(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  return holds(op, value, the_argument(arguments, "a comparing test"), evaluator.budget());
}

template <bool (*question)(const Value&)>
bool asks(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  arguments.bind("this test", {});
  return question(value);
}

bool is_odd(Evaluator& evaluator, const Value& value, const Arguments& /*arguments*/) {
  const Value rest = calculate(Operator::kModulo, value, int64_t{2}, evaluator.budget());
  return rest.is_number() && rest.number() == 1;
}

bool is_even(Evaluator& evaluator, const Value& value, const Arguments& /*arguments*/) {
  const Value rest = calculate(Operator::kModulo, value, int64_t{2}, evaluator.budget());
  return rest.is_number() && rest.number() == 0;
}

bool is_divisible(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const Value divisor = *arguments.bind("divisibleby", {"num"}, 1)[0];
  const Value rest = calculate(Operator::kModulo, value, divisor, evaluator.budget());
  return rest.is_number() && rest.number() == 0;
}

// Python's `is`, as far as it means something here: the same constant or the same object.
bool is_same(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const Value other = the_argument(arguments, "sameas");
  return type_name(value) == type_name(other) && equal(value, other, evaluator.budget());
}

bool is_lower(Evaluator& evaluator, const Value& value, const Arguments& /*arguments*/) {
  return all_are(CharacterClass::kLower, to_text(value, evaluator.budget()));
}

bool is_upper(Evaluator& evaluator, const Value& value, const Arguments& /*arguments*/) {
  return all_are(CharacterClass::kUpper, to_text(value, evaluator.budget()));
}

bool is_filter(Evaluator& /*evaluator*/, const Value& value, const Arguments& /*arguments*/) {
  return value.is_string() && find_filter(value.string()) != nullptr;
}

bool is_test(Evaluator& /*evaluator*/, const Value& value, const Arguments& /*arguments*/) {
  return value.is_string() && find_test(value.string()) != nullptr;
}

bool has_row_kind(const Value& value) {
  return value.is_array() && value.array().kind <= ArrayKind::kRange;
}

struct Row {
  std::string_view name;
  Test test;
};

constexpr Test kEqual = compares<Operator::kEqual>;
constexpr Test kNotEqual = compares<Operator::kNotEqual>;
constexpr Test kLess = compares<Operator::kLess>;
constexpr Test kLessEqual = compares<Operator::kLessEqual>;
constexpr Test kGreater = compares<Operator::kGreater>;
constexpr Test kGreaterEqual = compares<Operator::kGreaterEqual>;

constexpr std::array kTests = {
    Row{"!=", kNotEqual},
    Row{"<", kLess},
    Row{"<=", kLessEqual},
    Row{"==", kEqual},
    Row{">", kGreater},
    Row{">=", kGreaterEqual},
    Row{"boolean", asks<[](const Value& v) { return v.is_bool(); }>},
    Row{"callable", asks<[](const Value& v) { return v.callable() != nullptr; }>},
    Row{"defined", asks<[](const Value& v) { return !v.is_undefined(); }>},
    Row{"divisibleby", is_divisible},
    Row{"eq", kEqual},
    Row{"equalto", kEqual},
    Row{"even", is_even},
    Row{"false", asks<[](const Value& v) { return v.is_bool() && !v.boolean(); }>},
    Row{"filter", is_filter},
    Row{"float", asks<[](const Value& v) { return v.is_float(); }>},
    Row{"ge", kGreaterEqual},
    Row{"greaterthan", kGreater},
    Row{"gt", kGreater},
    Row{"in", compares<Operator::kIn>},
    Row{"integer", asks<[](const Value& v) { return v.is_integer() && !v.is_bool(); }>},
    Row{"iterable", asks<is_iterable>},
    Row{"le", kLessEqual},
    Row{"lessthan", kLess},
    Row{"lower", is_lower},
    Row{"lt", kLess},
    Row{"mapping", asks<[](const Value& v) { return v.is_dict(); }>},
    Row{"ne", kNotEqual},
    Row{"none", asks<[](const Value& v) { return v.is_none(); }>},
    Row{"number", asks<[](const Value& v) { return v.is_number(); }>},
    Row{"odd", is_odd},
    Row{"sameas", is_same},
    Row{"sequence", asks<[](const Value& v) {
          return v.is_undefined() || v.is_string() || v.is_dict() || has_row_kind(v);
        }>},
    Row{"string", asks<[](const Value& v) { return v.is_string(); }>},
    Row{"test", is_test},
    Row{"true", asks<[](const Value& v) { return v.is_bool() && v.boolean(); }>},
    Row{"undefined", asks<[](const Value& v) { return v.is_undefined(); }>},
    Row{"upper", is_upper},
};

}  // namespace

Test find_test(std::string_view name) {
  for (const Row& row : kTests) {
    if (row.name == name) return row.test;
  }
  return nullptr;
}

std::string test_names() {
  std::vector<std::string_view> names;
  for (const Row& row : kTests) names.push_back(row.name);
  return join(names);
}

}  // namespace cadre::jinja

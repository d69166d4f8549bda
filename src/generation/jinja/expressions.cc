// The part of the evaluator that works out expressions.
#include <utility>

#include "generation/jinja/evaluator.h"
#include "generation/jinja/nesting.h"
#include "generation/jinja/operators.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {

Value Evaluator::evaluate(const Expression& expression) {
  const Depth depth(*this);
  at_ = expression.at;
  budget_.step();
  return evaluate_node(expression);
}

Value Evaluator::evaluate_node(const Expression& expression) {
  using Kind = Expression::Kind;
  switch (expression.kind) {
    case Kind::kConstant:
      return expression.value;
    case Kind::kName:
      return name(expression);
    case Kind::kTuple:
      return make_array(evaluate_parts(expression), ArrayKind::kTuple);
    case Kind::kList:
      return make_array(evaluate_parts(expression));
    case Kind::kDict:
      return dict(expression);
    case Kind::kAttribute:
    case Kind::kItem:
    case Kind::kSlice:
      return item(expression);
    case Kind::kCall:
      return call(expression);
    case Kind::kFilter:
      return filter(expression);
    case Kind::kTest:
      return test(expression);
    case Kind::kNegative:
      return negative(evaluate(*expression.parts.front()));
    case Kind::kPositive:
      return calculate(Operator::kAdd, int64_t{0}, evaluate(*expression.parts.front()), budget_);
    case Kind::kNot:
      return !truth(evaluate(*expression.parts.front()));
    case Kind::kMath:
      return math(expression);
    case Kind::kConcat:
      return concat(expression);
    case Kind::kCompare:
      return comparison(expression);
    case Kind::kAnd:
      return words(expression, false);
    case Kind::kOr:
      return words(expression, true);
    case Kind::kCondition:
      break;
  }
  return condition(expression);
}

Value Evaluator::evaluate_or_none(const ExpressionPtr& expression) {
  return expression ? evaluate(*expression) : Value(None{});
}

Values Evaluator::evaluate_parts(const Expression& expression) {
  budget_.items(expression.parts.size());
  Values values;
  for (const ExpressionPtr& part : expression.parts) values.push_back(evaluate(*part));
  return values;
}

Value Evaluator::name(const Expression& expression) {
  for (const Scope* scope = scope_; scope != nullptr; scope = scope->parent()) {
    if (const Value* found = scope->find(expression.name)) return *found;
  }
  if (Function function = find_global(expression.name)) {
    Callable global{.name = expression.name, .function = function};
    return CallablePtr(std::make_shared<const Callable>(std::move(global)));
  }
  return make_undefined("'", expression.name, "' is undefined");
}

Value Evaluator::dict(const Expression& expression) {
  Dict dict;
  for (size_t i = 0; i < expression.parts.size(); i += 2) {
    budget_.bytes(128);
    const Value key = evaluate(*expression.parts[i]);
    dict.set(key, evaluate(*expression.parts[i + 1]));
  }
  return make_dict(std::move(dict));
}

Value Evaluator::item(const Expression& expression) {
  const Value container = evaluate(*expression.parts.front());
  if (expression.kind == Expression::Kind::kAttribute) {
    at_ = expression.at;
    return get_attribute(container, expression.name);
  }
  if (expression.kind == Expression::Kind::kItem) {
    const Value key = evaluate(*expression.parts[1]);
    at_ = expression.at;
    return get_item(container, key, budget_);
  }
  const Value begin = evaluate_or_none(expression.parts[1]);
  const Value end = evaluate_or_none(expression.parts[2]);
  const Value step = evaluate_or_none(expression.parts[3]);
  at_ = expression.at;
  return get_slice(container, begin, end, step, budget_);
}

Arguments Evaluator::evaluate_arguments(const std::vector<Argument>& arguments) {
  Arguments values;
  for (const Argument& argument : arguments) {
    Value value = evaluate(*argument.value);
    if (argument.spread == Spread::kList) {
      for (Value& item : iterate(value, budget_)) values.positional.push_back(std::move(item));
    } else if (argument.spread == Spread::kDict) {
      if (!value.is_dict()) fail("** requires a dict, got a value of type ", type_name(value));
      for (const auto& [key, item] : value.dict().entries) {
        values.named.emplace_back(to_string(key, "** : a key"), item);
      }
    } else if (argument.name.empty()) {
      values.positional.push_back(std::move(value));
    } else {
      values.named.emplace_back(argument.name, std::move(value));
    }
  }
  budget_.step(values.positional.size() + values.named.size());
  return values;
}

Value Evaluator::call(const Expression& expression) {
  const Value callable = evaluate(*expression.parts.front());
  const Arguments arguments = evaluate_arguments(expression.arguments);
  at_ = expression.at;
  return call_value(callable, arguments);
}

Value Evaluator::call_value(const Value& callable, const Arguments& arguments) {
  if (callable.is_undefined()) fail_undefined(callable);
  const Callable* target = callable.callable();
  if (target == nullptr) fail("a value of type ", type_name(callable), " cannot be called");
  if (target->macro != nullptr) return call_macro(*target->macro, target->scope, arguments);
  return target->function(*this, target->self, arguments);
}

Value Evaluator::filter(const Expression& expression) {
  if (expression.filter == nullptr) {
    fail_unsupported("unknown filter ", quote(expression.name),
                     "; the filters of this version are ", filter_names());
  }
  const ExpressionPtr& input = expression.parts.front();
  const Value value = input ? evaluate(*input) : *block_text_;
  const Arguments arguments = evaluate_arguments(expression.arguments);
  at_ = expression.at;
  return expression.filter(*this, value, arguments);
}

bool Evaluator::test(const Expression& expression) {
  if (expression.test == nullptr) {
    fail_unsupported("unknown test ", quote(expression.name), "; the tests of this version are ",
                     test_names());
  }
  const Value value = evaluate(*expression.parts.front());
  const Arguments arguments = evaluate_arguments(expression.arguments);
  at_ = expression.at;
  return expression.test(*this, value, arguments);
}

Value Evaluator::apply_filter(std::string_view name, const Value& value,
                              const Arguments& arguments) {
  const Function function = find_filter(name);
  if (function == nullptr) {
    fail_unsupported("unknown filter ", quote(name), "; the filters of this version are ",
                     filter_names());
  }
  budget_.step();
  return function(*this, value, arguments);
}

bool Evaluator::apply_test(std::string_view name, const Value& value, const Arguments& arguments) {
  const Test function = find_test(name);
  if (function == nullptr) {
    fail_unsupported("unknown test ", quote(name), "; the tests of this version are ",
                     test_names());
  }
  budget_.step();
  return function(*this, value, arguments);
}

Value Evaluator::math(const Expression& expression) {
  Value value = evaluate(*expression.parts.front());
  for (size_t i = 0; i < expression.operators.size(); ++i) {
    const Value right = evaluate(*expression.parts[i + 1]);
    at_ = expression.at;
    value = calculate(expression.operators[i], value, right, budget_);
  }
  return value;
}

Value Evaluator::concat(const Expression& expression) {
  std::string text;
  for (const ExpressionPtr& part : expression.parts) {
    const Value value = evaluate(*part);
    at_ = expression.at;
    text += to_text(value, budget_);
  }
  return text;
}

// a < b < c holds when both do; b is evaluated once, c only when needed.
bool Evaluator::comparison(const Expression& expression) {
  Value left = evaluate(*expression.parts.front());
  for (size_t i = 0; i < expression.operators.size(); ++i) {
    Value right = evaluate(*expression.parts[i + 1]);
    at_ = expression.at;
    if (!holds(expression.operators[i], left, right, budget_)) return false;
    left = std::move(right);
  }
  return true;
}

// `and`, `or`: the first value whose truth is `until`, else the last.
Value Evaluator::words(const Expression& expression, bool until) {
  Value value;
  for (const ExpressionPtr& part : expression.parts) {
    value = evaluate(*part);
    if (truth(value) == until) break;
  }
  return value;
}

Value Evaluator::condition(const Expression& expression) {
  if (truth(evaluate(*expression.parts[1]))) return evaluate(*expression.parts[0]);
  if (expression.parts[2]) return evaluate(*expression.parts[2]);
  return make_undefined("the if-expression has no else part and its condition is false");
}

}  // namespace cadre::jinja

#include "generation/jinja/operators.h"

#include <cmath>
#include <cstring>

#include "generation/jinja/loop.h"
#include "generation/jinja/python_text.h"

namespace cadre::jinja {
namespace {

std::string_view symbol(Operator op) {
  constexpr std::string_view kSymbols[] = {"+", "-", "*", "/", "//", "%", "**"};
  return kSymbols[static_cast<size_t>(op)];
}

[[noreturn]] void fail_types(Operator op, const Value& a, const Value& b) {
  if (a.is_undefined()) fail_undefined(a);
  if (b.is_undefined()) fail_undefined(b);
  fail("the operator ", symbol(op), " does not go with values of type ", type_name(a), " and ",
       type_name(b));
}

[[noreturn]] void fail_overflow(Operator op) {
  fail("the result of ", symbol(op), " does not fit in 64 bits");
}

int64_t integer_power(int64_t base, int64_t exponent) {
  int64_t result = 1;
  // A base beyond -1 ... 1 overflows within 64 rounds; the others need none.
  if (base == 0 || base == 1) return exponent == 0 ? 1 : base;
  if (base == -1) return exponent % 2 == 0 ? 1 : -1;
  for (; exponent > 0; --exponent) {
    if (__builtin_mul_overflow(result, base, &result)) fail_overflow(Operator::kPower);
  }
  return result;
}

// Rounds towards minus infinity, the remainder has the sign of b, as in Python.
Value divide_integers(Operator op, int64_t a, int64_t b) {
  if (b == 0) fail("division by zero");
  if (b == -1) {  // the only quotient that may overflow
    int64_t negated = 0;
    if (op == Operator::kModulo) return int64_t{0};
    if (__builtin_sub_overflow(int64_t{0}, a, &negated)) fail_overflow(op);
    return negated;
  }
  int64_t quotient = a / b;
  int64_t remainder = a % b;
  if (remainder != 0 && (remainder < 0) != (b < 0)) {
    --quotient;
    remainder += b;
  }
  return op == Operator::kModulo ? remainder : quotient;
}

Value calculate_integers(Operator op, int64_t a, int64_t b) {
  int64_t result = 0;
  bool overflow = false;
  switch (op) {
    case Operator::kAdd:
      overflow = __builtin_add_overflow(a, b, &result);
      break;
    case Operator::kSubtract:
      overflow = __builtin_sub_overflow(a, b, &result);
      break;
    case Operator::kMultiply:
      overflow = __builtin_mul_overflow(a, b, &result);
      break;
    case Operator::kDivide:
      if (b == 0) fail("division by zero");
      return static_cast<double>(static_cast<long double>(a) / static_cast<long double>(b));
    case Operator::kPower:
      if (b < 0) return std::pow(static_cast<double>(a), static_cast<double>(b));
      return integer_power(a, b);
    default:
      return divide_integers(op, a, b);
  }
  if (overflow) fail_overflow(op);
  return result;
}

Value calculate_floats(Operator op, double a, double b) {
  const bool divides =
      op == Operator::kDivide || op == Operator::kFloorDivide || op == Operator::kModulo;
  if (divides && b == 0) fail("division by zero");
  switch (op) {
    case Operator::kAdd:
      return a + b;
    case Operator::kSubtract:
      return a - b;
    case Operator::kMultiply:
      return a * b;
    case Operator::kDivide:
      return a / b;
    case Operator::kPower:
      return std::pow(a, b);
    default:
      break;
  }
  double remainder = std::fmod(a, b);
  if (remainder != 0 && (remainder < 0) != (b < 0)) remainder += b;
  if (remainder == 0) remainder = std::copysign(0.0, b);
  if (op == Operator::kModulo) return remainder;
  return std::round((a - remainder) / b);
}

Value add_rows(const Value& a, const Value& b, Budget& budget) {
  budget.items(a.array().items.size() + b.array().items.size());
  Values items = a.array().items;
  items.insert(items.end(), b.array().items.begin(), b.array().items.end());
  return make_array(std::move(items), a.array().kind);
}

Value repeat(const Value& row, int64_t count, Budget& budget) {
  const auto times = static_cast<size_t>(std::max<int64_t>(count, 0));
  const auto check = [&](size_t size) {  // before a product that could overflow
    if (size != 0 && times > size_t{1} << 40) fail("a row is repeated ", count, " times");
  };
  if (row.is_string()) {
    const std::string& text = row.string();
    check(text.size());
    budget.bytes(text.size() * times);
    std::string out;
    if (text.empty()) return out;
    for (size_t i = 0; i < times; ++i) out += text;
    return out;
  }
  const Values& items = row.array().items;
  check(items.size());
  budget.items(items.size() * times);
  Values out;
  for (size_t i = 0; i < times && !items.empty(); ++i) {
    out.insert(out.end(), items.begin(), items.end());
  }
  return make_array(std::move(out), row.array().kind);
}

bool is_row(const Value& value) {
  return value.is_array() && value.array().kind <= ArrayKind::kTuple;
}

bool has_nan(const Value& a, const Value& b) {
  return (a.is_float() && std::isnan(a.number())) || (b.is_float() && std::isnan(b.number()));
}

// The place of an index that may count from the end; empty when it lies outside.
std::optional<size_t> place(int64_t index, size_t size) {
  const auto count = static_cast<int64_t>(size);
  if (index < 0) index += count;
  if (index < 0 || index >= count) return {};
  return static_cast<size_t>(index);
}

int64_t bound(const Value& value, int64_t fallback, int64_t low, int64_t high, int64_t count) {
  if (value.is_none()) return fallback;
  if (!value.is_integer()) fail("a slice needs whole numbers, got a ", type_name(value));
  int64_t index = value.integer();
  if (index < 0) index += count;
  return std::clamp(index, low, high);
}

// The indices that a slice visits.
std::vector<size_t> slice_places(const Value& begin, const Value& end, const Value& step,
                                 size_t size) {
  const auto count = static_cast<int64_t>(size);
  if (!step.is_none() && !step.is_integer()) fail("a slice needs whole numbers");
  const int64_t by = step.is_none() ? 1 : step.integer();
  if (by == 0) fail("the step of a slice is 0");
  const bool forward = by > 0;
  const int64_t low = forward ? 0 : -1;
  const int64_t high = forward ? count : count - 1;
  const int64_t first = bound(begin, forward ? low : high, low, high, count);
  const int64_t last = bound(end, forward ? high : low, low, high, count);
  std::vector<size_t> places;
  for (int64_t i = first; forward ? i < last : i > last;) {
    places.push_back(static_cast<size_t>(i));
    if (__builtin_add_overflow(i, by, &i)) break;
  }
  return places;
}

std::string object_name(const Value& value) { return str_cat("'", type_name(value), " object'"); }

}  // namespace

Value calculate(Operator op, const Value& a, const Value& b, Budget& budget) {
  budget.step();
  if (a.is_integer() && b.is_integer()) return calculate_integers(op, a.integer(), b.integer());
  if (a.is_number() && b.is_number()) return calculate_floats(op, a.number(), b.number());
  if (op == Operator::kAdd && a.is_string() && b.is_string()) {
    budget.bytes(a.string().size() + b.string().size());
    return a.string() + b.string();
  }
  if (op == Operator::kAdd && is_row(a) && is_row(b) && a.array().kind == b.array().kind) {
    return add_rows(a, b, budget);
  }
  if (op == Operator::kMultiply) {
    if ((a.is_string() || is_row(a)) && b.is_integer()) return repeat(a, b.integer(), budget);
    if ((b.is_string() || is_row(b)) && a.is_integer()) return repeat(b, a.integer(), budget);
  }
  if (op == Operator::kModulo && a.is_string()) {
    fail_unsupported("text formatted with % is not served; join its parts with ~");
  }
  fail_types(op, a, b);
}

Value negative(const Value& value) {
  if (value.is_undefined()) fail_undefined(value);
  if (value.is_float()) return -value.number();
  if (!value.is_integer()) fail("a value of type ", type_name(value), " has no negative");
  return calculate_integers(Operator::kSubtract, 0, value.integer());
}

bool holds(Operator op, const Value& a, const Value& b, Budget& budget) {
  switch (op) {
    case Operator::kEqual:
      return equal(a, b, budget);
    case Operator::kNotEqual:
      return !equal(a, b, budget);
    case Operator::kIn:
      return contains(b, a, budget);
    case Operator::kNotIn:
      return !contains(b, a, budget);
    default:
      break;
  }
  const int order = compare(a, b, budget);
  if (has_nan(a, b)) return false;
  if (op == Operator::kLess) return order < 0;
  if (op == Operator::kLessEqual) return order <= 0;
  return op == Operator::kGreater ? order > 0 : order >= 0;
}

Value get_item(const Value& container, const Value& key, Budget& budget) {
  if (container.is_undefined()) fail_undefined(container);
  if (container.is_dict()) {
    if (const Value* found = container.dict().find(key)) return *found;
  } else if (key.is_integer()) {
    if (container.is_string()) {
      budget.bytes(container.string().size());
      const auto all = characters(container.string());
      if (const auto at = place(key.integer(), all.size())) return all[*at];
    } else if (container.is_array() && container.array().kind <= ArrayKind::kRange) {
      const Values& items = container.array().items;
      if (const auto at = place(key.integer(), items.size())) return items[*at];
    }
  }
  if (key.is_string()) return get_attribute(container, key.string());
  return make_undefined(type_name(container), " object has no such element");
}

Value get_slice(const Value& container, const Value& begin, const Value& end, const Value& step,
                Budget& budget) {
  if (container.is_undefined()) fail_undefined(container);
  if (container.is_string()) {
    budget.bytes(container.string().size());
    const auto all = characters(container.string());
    std::string out;
    for (const size_t i : slice_places(begin, end, step, all.size())) out += all[i];
    return out;
  }
  if (!container.is_array() || container.array().kind > ArrayKind::kRange) {
    return make_undefined(type_name(container), " object cannot be sliced");
  }
  const Values& items = container.array().items;
  Values out;
  for (const size_t i : slice_places(begin, end, step, items.size())) {
    budget.items(1);
    out.push_back(items[i]);
  }
  return make_array(std::move(out), container.array().kind);
}

Value get_attribute(const Value& value, std::string_view name) {
  if (value.is_undefined()) fail_undefined(value);
  Value method = find_method(value, name);
  if (!method.is_undefined()) return method;
  if (value.is_dict()) {
    if (const Value* found = value.dict().find(name)) return *found;
  } else if (Namespace* names = value.names()) {
    if (const Value* found = names->names.find(name)) return *found;
  } else if (LoopState* loop = value.loop()) {
    return loop->attribute(name);
  }
  return make_undefined(object_name(value), " has no attribute ", quote(name));
}

}  // namespace cadre::jinja

// Python's operators on values. All throw Fault for types that do not go together.
#pragma once

#include "generation/jinja/tree.h"

namespace cadre::jinja {

/// a + b, a - b, a * b, a / b, a // b, a % b, a ** b
Value calculate(Operator op, const Value& a, const Value& b, Budget& budget);
Value negative(const Value& value);
/// a == b, a < b, a in b and the like
bool holds(Operator op, const Value& a, const Value& b, Budget& budget);

/// container[key]; undefined when there is no such item or the container has none at all. Texts are
/// indexed by characters.
Value get_item(const Value& container, const Value& key, Budget& budget);
/// container[begin:end:step]; none where left out.
Value get_slice(const Value& container, const Value& begin, const Value& end, const Value& step,
                Budget& budget);
/// value.name: a method, a key of a dict, a name of a namespace; undefined when there is none.
Value get_attribute(const Value& value, std::string_view name);

}  // namespace cadre::jinja

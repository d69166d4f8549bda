// What may follow a value in an expression: .name, [item], (call), | filter, is test; and the
// targets of assignments.
#include <algorithm>
#include <charconv>
#include <utility>

#include "generation/jinja/expression_parser.h"

namespace cadre::jinja {

ExpressionPtr ExpressionParser::parse_postfix(ExpressionPtr value) {
  for (;;) {
    if (current().is_operator(".")) {
      value = parse_attribute(std::move(value));
    } else if (current().is_operator("[")) {
      value = parse_subscript(std::move(value));
    } else if (current().is_operator("(")) {
      value = parse_call(std::move(value));
    } else {
      return value;
    }
  }
}

ExpressionPtr ExpressionParser::parse_attribute(ExpressionPtr value) {
  const Position at = take().at;
  if (current().type == TokenType::kInteger) {
    return make(Kind::kItem, at, std::move(value), parse_number());
  }
  Expression attribute{.kind = Kind::kAttribute, .at = at, .name = expect_name()};
  attribute.parts.push_back(std::move(value));
  return finish(std::move(attribute));
}

ExpressionPtr ExpressionParser::parse_subscript(ExpressionPtr value) {
  const Position at = take().at;
  Expression slice{.kind = Kind::kSlice, .at = at};
  slice.parts.push_back(std::move(value));
  const auto at_end = [&] {
    return current().is_operator("]") || current().is_operator(":") || current().is_operator(",");
  };
  slice.parts.push_back(at_end() ? nullptr : parse_expression());
  const bool is_slice = current().is_operator(":");
  while (skip_operator(":") && slice.parts.size() < 4) {
    slice.parts.push_back(at_end() ? nullptr : parse_expression());
  }
  if (!is_slice && !slice.parts[1]) fail_expected("an expression");
  if (current().is_operator(",")) fail_here("an item has one index here, got several");
  expect_operator("]");
  if (!is_slice) slice.kind = Kind::kItem;
  if (is_slice) slice.parts.resize(4);
  return finish(std::move(slice));
}

ExpressionPtr ExpressionParser::parse_call(ExpressionPtr value) {
  Expression call{.kind = Kind::kCall, .at = current().at};
  call.parts.push_back(std::move(value));
  call.arguments = parse_arguments();
  return finish(std::move(call));
}

std::vector<Argument> ExpressionParser::parse_arguments() {
  std::vector<Argument> arguments;
  expect_operator("(");
  while (!current().is_operator(")")) {
    if (!arguments.empty()) expect_operator(",");
    if (current().is_operator(")")) break;
    arguments.push_back(parse_argument(arguments));
  }
  expect_operator(")");
  return arguments;
}

Argument ExpressionParser::parse_argument(const std::vector<Argument>& before) {
  Argument argument;
  if (skip_operator("*")) {
    argument.spread = Spread::kList;
  } else if (skip_operator("**")) {
    argument.spread = Spread::kDict;
  } else if (current().type == TokenType::kName && look_ahead().is_operator("=")) {
    argument.name = take().text;
    take();
  }
  const bool is_plain = argument.spread == Spread::kNone && argument.name.empty();
  const bool wrong = std::any_of(before.begin(), before.end(), [&](const Argument& earlier) {
    if (earlier.spread == argument.spread && earlier.spread != Spread::kNone) return true;
    if (earlier.spread == Spread::kDict) return true;
    return is_plain && (earlier.spread != Spread::kNone || !earlier.name.empty());
  });
  if (wrong) fail_here("an argument without a name comes after named ones");
  argument.value = parse_expression();
  return argument;
}

ExpressionPtr ExpressionParser::parse_filters_and_tests(ExpressionPtr value) {
  for (;;) {
    if (skip_operator("|")) {
      value = parse_filter(std::move(value));
    } else if (current().is_name("is")) {
      value = parse_test(std::move(value));
    } else if (current().is_operator("(")) {
      value = parse_call(std::move(value));
    } else {
      return value;
    }
  }
}

ExpressionPtr ExpressionParser::parse_filter(ExpressionPtr value) {
  Expression filter{.kind = Kind::kFilter, .at = current().at, .name = expect_name()};
  while (skip_operator(".")) filter.name += "." + expect_name();
  filter.filter = find_filter(filter.name);
  filter.parts.push_back(std::move(value));
  if (current().is_operator("(")) filter.arguments = parse_arguments();
  return finish(std::move(filter));
}

ExpressionPtr ExpressionParser::parse_filters_of_block() {
  ExpressionPtr value = parse_filter(nullptr);
  while (skip_operator("|")) value = parse_filter(std::move(value));
  return value;
}

ExpressionPtr ExpressionParser::parse_test(ExpressionPtr value) {
  const Position at = take().at;
  const bool negated = skip_name("not");
  Expression test{.kind = Kind::kTest, .at = at, .name = expect_name()};
  test.test = find_test(test.name);
  test.parts.push_back(std::move(value));
  const Token& next = current();
  const bool is_word = next.is_name("else") || next.is_name("or") || next.is_name("and");
  const bool is_value = next.type == TokenType::kName || next.type == TokenType::kString ||
                        next.type == TokenType::kInteger || next.type == TokenType::kFloat ||
                        next.is_operator("[") || next.is_operator("{");
  if (next.is_operator("(")) {
    test.arguments = parse_arguments();
  } else if (is_value && !is_word) {
    if (next.is_name("is")) fail_here("tests with \"is\" cannot follow each other");
    Argument argument;
    argument.value = parse_postfix(parse_primary());
    test.arguments.push_back(std::move(argument));
  }
  ExpressionPtr result = finish(std::move(test));
  return negated ? make(Kind::kNot, at, std::move(result)) : std::move(result);
}

Target ExpressionParser::parse_single_target(bool with_attributes) {
  const Nesting nesting(*this);
  Target target{.at = current().at};
  if (skip_operator("(")) {
    target = parse_target(with_attributes);
    expect_operator(")");
    return target;
  }
  target.name = expect_name();
  for (const char* constant : {"true", "True", "false", "False", "none", "None"}) {
    if (target.name == constant) fail_here(constant, " cannot be assigned to");
  }
  if (with_attributes && skip_operator(".")) target.attribute = expect_name();
  return target;
}

Target ExpressionParser::parse_target(bool with_attributes) {
  const Position at = current().at;
  Target first = parse_single_target(with_attributes);
  if (!current().is_operator(",")) return first;
  Target tuple{.at = at};
  tuple.parts.push_back(std::move(first));
  while (skip_operator(",")) {
    if (current().type != TokenType::kName && !current().is_operator("(")) break;
    if (current().is_name("in")) break;
    tuple.parts.push_back(parse_single_target(with_attributes));
  }
  return tuple;
}

}  // namespace cadre::jinja

#include "generation/jinja/expression_parser.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <utility>

namespace cadre::jinja {
namespace {

constexpr int kMaxNesting = 100;
constexpr int kMaxDepth = 200;  // of a tree: a.b.c is three deep

constexpr std::array<std::pair<std::string_view, Operator>, 6> kCompare = {
    {{"==", Operator::kEqual},
     {"!=", Operator::kNotEqual},
     {"<", Operator::kLess},
     {"<=", Operator::kLessEqual},
     {">", Operator::kGreater},
     {">=", Operator::kGreaterEqual}}};

std::string describe(const Token& token) {
  switch (token.type) {
    case TokenType::kData:
      return "text";
    case TokenType::kVariableBegin:
      return "\"{{\"";
    case TokenType::kVariableEnd:
      return "\"}}\"";
    case TokenType::kBlockBegin:
      return "\"{%\"";
    case TokenType::kBlockEnd:
      return "\"%}\"";
    case TokenType::kEnd:
      return "the end of the template";
    default:
      return quote(token.text);
  }
}

}  // namespace

ExpressionParser::Nesting::Nesting(ExpressionParser& parser) : parser_(parser) {
  if (parser.nesting_ == kMaxNesting) {
    parser.fail_here("nested deeper than ", kMaxNesting, " levels");
  }
  ++parser.nesting_;
}

bool ExpressionParser::skip_name(std::string_view name) {
  const bool is_there = current().is_name(name);
  if (is_there) take();
  return is_there;
}

bool ExpressionParser::skip_operator(std::string_view name) {
  const bool is_there = current().is_operator(name);
  if (is_there) take();
  return is_there;
}

void ExpressionParser::expect_operator(std::string_view name) {
  if (!skip_operator(name)) fail_expected(str_cat('"', name, '"'));
}

std::string ExpressionParser::expect_name() {
  if (current().type != TokenType::kName) fail_expected("a name");
  return take().text;
}

void ExpressionParser::fail_expected(std::string_view what) const {
  fail_here("expected ", what, ", got ", describe(current()));
}

// Every expression passes here once.
ExpressionPtr ExpressionParser::finish(Expression&& expression) const {
  const auto include = [&](const ExpressionPtr& part) {
    if (part) expression.depth = std::max(expression.depth, part->depth + 1);
  };
  for (const ExpressionPtr& part : expression.parts) include(part);
  for (const Argument& argument : expression.arguments) include(argument.value);
  if (expression.depth > kMaxDepth) {
    throw SyntaxFault{{Fault::Kind::kTemplate,
                       str_cat("an expression is nested deeper than ", kMaxDepth, " levels")},
                      expression.at};
  }
  return std::make_unique<const Expression>(std::move(expression));
}

ExpressionPtr ExpressionParser::make(Kind kind, Position at, ExpressionPtr a,
                                     ExpressionPtr b) const {
  Expression expression{.kind = kind, .at = at};
  if (a) expression.parts.push_back(std::move(a));
  if (b) expression.parts.push_back(std::move(b));
  return finish(std::move(expression));
}

bool ExpressionParser::at_tuple_end() const {
  const TokenType type = current().type;
  return type == TokenType::kVariableEnd || type == TokenType::kBlockEnd ||
         type == TokenType::kEnd || current().is_operator(")");
}

ExpressionPtr ExpressionParser::parse_tuple(bool with_condition) {
  const Position at = current().at;
  if (at_tuple_end()) fail_expected("an expression");
  ExpressionPtr first = parse_expression(with_condition);
  if (!current().is_operator(",")) return first;
  Expression tuple{.kind = Kind::kTuple, .at = at};
  tuple.parts.push_back(std::move(first));
  while (skip_operator(",")) {
    if (at_tuple_end()) break;
    tuple.parts.push_back(parse_expression(with_condition));
  }
  return finish(std::move(tuple));
}

ExpressionPtr ExpressionParser::parse_expression(bool with_condition) {
  const Nesting nesting(*this);
  ExpressionPtr value = parse_or();
  while (with_condition && current().is_name("if")) {
    Expression condition{.kind = Kind::kCondition, .at = take().at};
    condition.parts.push_back(std::move(value));
    condition.parts.push_back(parse_or());
    condition.parts.push_back(skip_name("else") ? parse_expression() : nullptr);
    value = finish(std::move(condition));
  }
  return value;
}

// a word b word c
template <typename Next>
ExpressionPtr ExpressionParser::parse_words(std::string_view word, Kind kind, Next next) {
  Expression chain{.kind = kind, .at = current().at};
  chain.parts.push_back((this->*next)());
  while (skip_name(word)) chain.parts.push_back((this->*next)());
  return chain.parts.size() == 1 ? std::move(chain.parts.front()) : finish(std::move(chain));
}

ExpressionPtr ExpressionParser::parse_or() {
  return parse_words("or", Kind::kOr, &ExpressionParser::parse_and);
}

ExpressionPtr ExpressionParser::parse_and() {
  return parse_words("and", Kind::kAnd, &ExpressionParser::parse_not);
}

ExpressionPtr ExpressionParser::parse_not() {
  if (!current().is_name("not")) return parse_compare();
  const Nesting nesting(*this);
  const Position at = take().at;
  return make(Kind::kNot, at, parse_not());
}

bool ExpressionParser::take_compare(Operator& found) {
  for (const auto& [text, op] : kCompare) {
    if (!skip_operator(text)) continue;
    found = op;
    return true;
  }
  found = Operator::kIn;
  if (skip_name("in")) return true;
  found = Operator::kNotIn;
  if (!current().is_name("not") || !look_ahead().is_name("in")) return false;
  take();
  take();
  return true;
}

ExpressionPtr ExpressionParser::parse_compare() {
  Expression chain{.kind = Kind::kCompare, .at = current().at};
  chain.parts.push_back(parse_sum());
  for (Operator found; take_compare(found);) {
    chain.operators.push_back(found);
    chain.parts.push_back(parse_sum());
  }
  return chain.operators.empty() ? std::move(chain.parts.front()) : finish(std::move(chain));
}

template <typename Next>
ExpressionPtr ExpressionParser::parse_math(
    std::initializer_list<std::pair<std::string_view, Operator>> operators, Next next) {
  Expression chain{.kind = Kind::kMath, .at = current().at};
  chain.parts.push_back(next());
  for (bool found = true; found;) {
    found = false;
    for (const auto& [text, op] : operators) {
      if (!skip_operator(text)) continue;
      chain.operators.push_back(op);
      chain.parts.push_back(next());
      found = true;
      break;
    }
  }
  return chain.operators.empty() ? std::move(chain.parts.front()) : finish(std::move(chain));
}

ExpressionPtr ExpressionParser::parse_sum() {
  return parse_math({{"+", Operator::kAdd}, {"-", Operator::kSubtract}},
                    [this] { return parse_concat(); });
}

ExpressionPtr ExpressionParser::parse_concat() {
  Expression chain{.kind = Kind::kConcat, .at = current().at};
  chain.parts.push_back(parse_product());
  while (skip_operator("~")) chain.parts.push_back(parse_product());
  return chain.parts.size() == 1 ? std::move(chain.parts.front()) : finish(std::move(chain));
}

ExpressionPtr ExpressionParser::parse_product() {
  return parse_math({{"*", Operator::kMultiply},
                     {"/", Operator::kDivide},
                     {"//", Operator::kFloorDivide},
                     {"%", Operator::kModulo}},
                    [this] { return parse_power(); });
}

ExpressionPtr ExpressionParser::parse_power() {
  return parse_math({{"**", Operator::kPower}}, [this] { return parse_unary(true); });
}

ExpressionPtr ExpressionParser::parse_unary(bool with_filter) {
  ExpressionPtr value;
  if (current().is_operator("-") || current().is_operator("+")) {
    const Nesting nesting(*this);
    const Token sign = take();
    value = make(sign.text == "-" ? Kind::kNegative : Kind::kPositive, sign.at, parse_unary(false));
  } else {
    value = parse_primary();
  }
  value = parse_postfix(std::move(value));
  return with_filter ? parse_filters_and_tests(std::move(value)) : std::move(value);
}

ExpressionPtr ExpressionParser::parse_primary() {
  const Token token = current();
  Expression constant{.kind = Kind::kConstant, .at = token.at};
  if (token.type == TokenType::kString) {
    std::string text;
    while (current().type == TokenType::kString) text += take().text;  // "a" "b" is "ab"
    constant.value = Value(std::move(text));
    return finish(std::move(constant));
  }
  if (token.type == TokenType::kInteger || token.type == TokenType::kFloat) return parse_number();
  if (token.is_operator("[")) return parse_list();
  if (token.is_operator("{")) return parse_dict();
  if (skip_operator("(")) {
    ExpressionPtr inside =
        current().is_operator(")") ? make(Kind::kTuple, token.at) : parse_tuple();
    expect_operator(")");
    return inside;
  }
  if (token.type != TokenType::kName) fail_expected("an expression");
  take();
  const std::string& name = token.text;
  if (name == "true" || name == "True" || name == "false" || name == "False") {
    constant.value = name == "true" || name == "True";
  } else if (name == "none" || name == "None") {
    constant.value = None{};
  } else {
    constant.kind = Kind::kName;
    constant.name = name;
    special_names.varargs |= name == "varargs";
    special_names.kwargs |= name == "kwargs";
    special_names.caller |= name == "caller";
  }
  return finish(std::move(constant));
}

ExpressionPtr ExpressionParser::parse_number() {
  const Token token = current();
  Expression constant{.kind = Kind::kConstant, .at = token.at};
  const bool is_hex = token.text.starts_with("0x") || token.text.starts_with("0X");
  const char* begin = token.text.data() + (is_hex ? 2 : 0);
  const char* end = token.text.data() + token.text.size();
  std::from_chars_result result{};
  if (token.type == TokenType::kFloat) {
    double value = 0;
    result = std::from_chars(begin, end, value);
    constant.value = value;
  } else {
    int64_t value = 0;
    result = std::from_chars(begin, end, value, is_hex ? 16 : 10);
    constant.value = value;
  }
  if (result.ec != std::errc() || result.ptr != end) {
    fail_here("expected a number of 64 bits, got ", token.text);
  }
  take();
  return finish(std::move(constant));
}

ExpressionPtr ExpressionParser::parse_list() {
  Expression list{.kind = Kind::kList, .at = take().at};
  while (!current().is_operator("]")) {
    if (!list.parts.empty()) expect_operator(",");
    if (current().is_operator("]")) break;
    list.parts.push_back(parse_expression());
  }
  expect_operator("]");
  return finish(std::move(list));
}

ExpressionPtr ExpressionParser::parse_dict() {
  Expression dict{.kind = Kind::kDict, .at = take().at};
  while (!current().is_operator("}")) {
    if (!dict.parts.empty()) expect_operator(",");
    if (current().is_operator("}")) break;
    dict.parts.push_back(parse_expression());
    expect_operator(":");
    dict.parts.push_back(parse_expression());
  }
  expect_operator("}");
  return finish(std::move(dict));
}

}  // namespace cadre::jinja

// The part of the parser that reads expressions, on a list of tokens that it shares with the part
// that reads statements.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "generation/jinja/lexer.h"
#include "generation/jinja/tree.h"

namespace cadre::jinja {

class ExpressionParser {
 public:
  explicit ExpressionParser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  const Token& current() const { return tokens_[next_]; }
  const Token& look_ahead() const { return tokens_[std::min(next_ + 1, tokens_.size() - 1)]; }
  Token take() { return next_ + 1 < tokens_.size() ? tokens_[next_++] : tokens_[next_]; }
  bool skip_name(std::string_view name);
  bool skip_operator(std::string_view name);
  void expect_operator(std::string_view name);
  std::string expect_name();

  /// Throws SyntaxFault at the current token.
  template <typename... Args>
  [[noreturn]] void fail_here(const Args&... what) const {
    throw SyntaxFault{{Fault::Kind::kTemplate, str_cat(what...)}, current().at};
  }
  [[noreturn]] void fail_expected(std::string_view what) const;

  /// One expression. Without conditions, `a if b` ends before the "if".
  ExpressionPtr parse_expression(bool with_condition = true);
  /// One expression, or several with commas between them as a tuple.
  ExpressionPtr parse_tuple(bool with_condition = true);
  /// name | filter | filter(...), the value to come later (null); at the first filter's name.
  ExpressionPtr parse_filters_of_block();
  Target parse_target(bool with_attributes);

  /// Names that were read anywhere since; macros ask for caller, varargs and kwargs.
  struct SpecialNames {
    bool varargs = false, kwargs = false, caller = false;
  };
  SpecialNames special_names = {};

  /// Counts what is open inside each other, statements included.
  class Nesting {
   public:
    explicit Nesting(ExpressionParser& parser);
    ~Nesting() { --parser_.nesting_; }
    Nesting(const Nesting&) = delete;
    Nesting& operator=(const Nesting&) = delete;

   private:
    ExpressionParser& parser_;
  };

 private:
  using Kind = Expression::Kind;

  ExpressionPtr finish(Expression&& expression) const;
  ExpressionPtr make(Kind kind, Position at, ExpressionPtr a = {}, ExpressionPtr b = {}) const;
  template <typename Next>
  ExpressionPtr parse_words(std::string_view word, Kind kind, Next next);
  template <typename Next>
  ExpressionPtr parse_math(std::initializer_list<std::pair<std::string_view, Operator>> operators,
                           Next next);

  ExpressionPtr parse_or();
  ExpressionPtr parse_and();
  ExpressionPtr parse_not();
  ExpressionPtr parse_compare();
  ExpressionPtr parse_sum();
  ExpressionPtr parse_concat();
  ExpressionPtr parse_product();
  ExpressionPtr parse_power();
  ExpressionPtr parse_unary(bool with_filter);
  ExpressionPtr parse_primary();
  ExpressionPtr parse_number();
  ExpressionPtr parse_list();
  ExpressionPtr parse_dict();
  ExpressionPtr parse_postfix(ExpressionPtr value);
  ExpressionPtr parse_filters_and_tests(ExpressionPtr value);
  ExpressionPtr parse_filter(ExpressionPtr value);
  ExpressionPtr parse_test(ExpressionPtr value);
  ExpressionPtr parse_subscript(ExpressionPtr value);
  ExpressionPtr parse_attribute(ExpressionPtr value);
  ExpressionPtr parse_call(ExpressionPtr value);
  std::vector<Argument> parse_arguments();
  Argument parse_argument(const std::vector<Argument>& before);
  Target parse_single_target(bool with_attributes);
  bool take_compare(Operator& found);
  bool at_tuple_end() const;

  std::vector<Token> tokens_;
  size_t next_ = 0;
  int nesting_ = 0;
};

}  // namespace cadre::jinja

// Statements; expression_parser.cc and postfix_parser.cc read what stands in them.
#include "generation/jinja/parser.h"

#include <algorithm>
#include <initializer_list>
#include <utility>

#include "generation/jinja/expression_parser.h"

namespace cadre::jinja {
namespace {

constexpr std::string_view kStatements =
    "if, for, set, macro, call, filter, with, raw, print, break, continue, generation";

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : in_(std::move(tokens)) {}

  Block run() {
    Block body = parse_body({}, "");
    return body;
  }

 private:
  using Ends = std::initializer_list<std::string_view>;

  // Up to one of the tags `ends`, whose name is then the current token; without any, to the end.
  Block parse_body(Ends ends, std::string_view opened_by) {
    const ExpressionParser::Nesting nesting(in_);
    const Position begin = in_.current().at;
    Block body;
    for (;;) {
      const Token token = in_.current();
      if (token.type == TokenType::kEnd) {
        if (ends.size() == 0) return body;
        in_.fail_here("expected {% ", *(ends.end() - 1), " %} for the {% ", opened_by,
                      " %} in line ", begin.line, ", got the end of the template");
      }
      in_.take();
      if (token.type == TokenType::kData) {
        body.push_back({token.at, TextNode{token.text}});
      } else if (token.type == TokenType::kVariableBegin) {
        body.push_back({in_.current().at, PrintNode{in_.parse_tuple()}});
        expect_end(TokenType::kVariableEnd, "\"}}\"");
      } else {
        if (std::any_of(ends.begin(), ends.end(),
                        [&](std::string_view end) { return in_.current().is_name(end); })) {
          return body;
        }
        parse_statement(body);
      }
    }
  }

  void expect_end(TokenType type, std::string_view text) {
    if (in_.current().type != type) in_.fail_expected(text);
    in_.take();
  }
  void expect_block_end() { expect_end(TokenType::kBlockEnd, "\"%}\""); }

  // The body of a statement from the end of its tag to the end of {% end %}.
  Block parse_block(std::string_view end, std::string_view opened_by) {
    in_.skip_operator(":");
    expect_block_end();
    Block body = parse_body({end}, opened_by);
    in_.take();
    expect_block_end();
    return body;
  }

  void parse_statement(Block& body) {
    const Position at = in_.current().at;
    const std::string name = in_.expect_name();
    if (name == "if") return body.push_back({at, parse_if()});
    if (name == "for") return body.push_back({at, parse_for()});
    if (name == "set") return parse_set(at, body);
    if (name == "with") return body.push_back({at, parse_with()});
    if (name == "macro") return body.push_back({at, parse_macro()});
    if (name == "call") return body.push_back({at, parse_call()});
    if (name == "filter") return body.push_back({at, parse_filter()});
    if (name == "print") return parse_print(at, body);
    if (name == "generation") {
      const int loops = std::exchange(loops_, 0);
      GenerationNode node{parse_block("endgeneration", name)};
      loops_ = loops;
      return body.push_back({at, std::move(node)});
    }
    if (name == "break" || name == "continue") {
      if (loops_ == 0) in_.fail_here(name, " stands outside of a loop");
      expect_block_end();
      if (name == "break") return body.push_back({at, BreakNode{}});
      return body.push_back({at, ContinueNode{}});
    }
    throw SyntaxFault{
        {name.starts_with("end") || name == "else" || name == "elif" ? Fault::Kind::kTemplate
                                                                     : Fault::Kind::kUnsupported,
         str_cat("unexpected statement ", quote(name), "; the statements of this version are ",
                 kStatements)},
        at};
  }

  IfNode parse_if() {
    IfNode node;
    for (;;) {
      IfNode::Branch branch;
      branch.condition = in_.parse_tuple(/*with_condition=*/false);
      in_.skip_operator(":");
      expect_block_end();
      branch.body = parse_body({"elif", "else", "endif"}, "if");
      node.branches.push_back(std::move(branch));
      const std::string end = in_.take().text;
      if (end == "elif") continue;
      if (end == "else") {
        node.branches.push_back({nullptr, parse_block("endif", "if")});
      } else {
        expect_block_end();
      }
      return node;
    }
  }

  ForNode parse_for() {
    ForNode node;
    node.target = in_.parse_target(/*with_attributes=*/false);
    if (!in_.skip_name("in")) in_.fail_expected("\"in\"");
    node.iterable = in_.parse_tuple(/*with_condition=*/false);
    if (in_.skip_name("if")) node.condition = in_.parse_expression();
    if (in_.current().is_name("recursive")) {
      throw SyntaxFault{{Fault::Kind::kUnsupported, "recursive loops are not served"},
                        in_.current().at};
    }
    in_.skip_operator(":");
    expect_block_end();
    ++loops_;
    node.body = parse_body({"else", "endfor"}, "for");
    --loops_;
    if (in_.take().text == "else") {
      node.otherwise = parse_block("endfor", "for");
    } else {
      expect_block_end();
    }
    return node;
  }

  void parse_set(Position at, Block& body) {
    Target target = in_.parse_target(/*with_attributes=*/true);
    if (in_.skip_operator("=")) {
      body.push_back({at, SetNode{std::move(target), in_.parse_tuple()}});
      return expect_block_end();
    }
    SetBlockNode node{std::move(target), nullptr, {}};
    if (in_.skip_operator("|")) node.filter = in_.parse_filters_of_block();
    node.body = parse_block("endset", "set");
    body.push_back({at, std::move(node)});
  }

  WithNode parse_with() {
    WithNode node;
    while (in_.current().type != TokenType::kBlockEnd) {
      if (!node.sets.empty()) in_.expect_operator(",");
      Target target = in_.parse_target(/*with_attributes=*/false);
      in_.expect_operator("=");
      node.sets.push_back({std::move(target), in_.parse_expression()});
    }
    node.body = parse_block("endwith", "with");
    return node;
  }

  void parse_print(Position at, Block& body) {
    bool first = true;
    while (in_.current().type != TokenType::kBlockEnd) {
      if (!std::exchange(first, false)) in_.expect_operator(",");
      body.push_back({at, PrintNode{in_.parse_expression()}});
    }
    expect_block_end();
  }

  // (name, name=fallback)
  std::vector<Parameter> parse_parameters() {
    std::vector<Parameter> parameters;
    in_.expect_operator("(");
    while (!in_.current().is_operator(")")) {
      if (!parameters.empty()) in_.expect_operator(",");
      Parameter parameter{in_.expect_name(), nullptr};
      if (in_.skip_operator("=")) {
        parameter.fallback = in_.parse_expression();
      } else if (!parameters.empty() && parameters.back().fallback) {
        in_.fail_here("a parameter without a default follows one with a default");
      }
      parameters.push_back(std::move(parameter));
    }
    in_.expect_operator(")");
    return parameters;
  }

  // Signature and body of a macro, or of what a call block hands over.
  MacroNode parse_macro_body(std::string name, std::string_view end, std::string_view opened_by,
                             std::vector<Parameter> parameters) {
    MacroNode node;
    const auto outer = std::exchange(in_.special_names, {});
    const int loops = std::exchange(loops_, 0);  // break does not cross a macro
    node.name = std::move(name);
    node.parameters = std::move(parameters);
    node.body = parse_block(end, opened_by);
    loops_ = loops;
    node.uses_varargs = in_.special_names.varargs;
    node.uses_kwargs = in_.special_names.kwargs;
    node.uses_caller = in_.special_names.caller;
    in_.special_names = outer;
    return node;
  }

  MacroNode parse_macro() {
    std::string name = in_.expect_name();
    std::vector<Parameter> parameters = parse_parameters();
    return parse_macro_body(std::move(name), "endmacro", "macro", std::move(parameters));
  }

  CallBlockNode parse_call() {
    std::vector<Parameter> parameters;
    if (in_.current().is_operator("(")) parameters = parse_parameters();
    ExpressionPtr call = in_.parse_expression();
    if (call->kind != Expression::Kind::kCall) in_.fail_expected("a call");
    return {std::move(call), parse_macro_body("caller", "endcall", "call", std::move(parameters))};
  }

  FilterBlockNode parse_filter() {
    ExpressionPtr filter = in_.parse_filters_of_block();
    return {std::move(filter), parse_block("endfilter", "filter")};
  }

  ExpressionParser in_;
  int loops_ = 0;  // that are open here
};

}  // namespace

Block parse(std::string_view source) { return Parser(tokenize(source)).run(); }

}  // namespace cadre::jinja

// Walks the tree of a template and writes its text.
#pragma once

#include <ctime>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "generation/jinja/loop.h"
#include "generation/jinja/tree.h"

namespace cadre::jinja {

/// Names that a stretch of a template sees: a loop's body, a macro, the template as a whole.
class Scope {
 public:
  explicit Scope(Scope* parent) : parent_(parent) {}

  Scope* parent() const { return parent_; }
  /// Of this scope alone; null when it has no such name.
  const Value* find(std::string_view name) const;
  void set(std::string_view name, Value value);

  /// A macro was made here, which may be called after the scope's end.
  bool is_captured = false;

 private:
  Scope* parent_;
  std::vector<std::pair<std::string, Value>> names_;
};

class Evaluator {
 public:
  /// `now`: what strftime_now() tells.
  Evaluator(const Limits& limits, const std::tm& now) : budget_(limits), now_(now) {}
  Evaluator(const Evaluator&) = delete;
  Evaluator& operator=(const Evaluator&) = delete;

  /// Once. Throws Fault; position() then tells where.
  std::string run(const Block& template_body, const Dict& variables);
  Position position() const { return at_; }

  // For filters, tests, methods and functions:
  Budget& budget() { return budget_; }
  const std::tm& now() const { return now_; }
  Value apply_filter(std::string_view name, const Value& value, const Arguments& arguments);
  bool apply_test(std::string_view name, const Value& value, const Arguments& arguments);
  Value make_namespace(Dict names);

 private:
  enum class Flow : uint8_t { kGoOn, kBreak, kContinue };
  class Depth;
  class NewScope;
  class Capture;

  Flow run_block(const Block& block);
  Flow run_node(const TextNode& node);
  Flow run_node(const PrintNode& node);
  Flow run_node(const IfNode& node);
  Flow run_node(const ForNode& node);
  Flow run_node(const SetNode& node);
  Flow run_node(const SetBlockNode& node);
  Flow run_node(const WithNode& node);
  Flow run_node(const MacroNode& node);
  Flow run_node(const CallBlockNode& node);
  Flow run_node(const FilterBlockNode& node);
  Flow run_node(const GenerationNode& node);
  Flow run_node(const BreakNode&) { return Flow::kBreak; }
  Flow run_node(const ContinueNode&) { return Flow::kContinue; }
  bool run_items(const ForNode& node, const LoopPtr& loop);
  std::string text_of(const Block& block);
  void assign(const Target& target, const Value& value);
  Value filtered(const Expression& filter, std::string text);
  void emit(std::string_view text);

  Value evaluate(const Expression& expression);
  Value evaluate_node(const Expression& expression);
  Value evaluate_or_none(const ExpressionPtr& expression);
  Values evaluate_parts(const Expression& expression);
  Value name(const Expression& expression);
  Value dict(const Expression& expression);
  Value item(const Expression& expression);
  Value call(const Expression& expression);
  Value filter(const Expression& expression);
  bool test(const Expression& expression);
  Value math(const Expression& expression);
  Value concat(const Expression& expression);
  bool comparison(const Expression& expression);
  Value words(const Expression& expression, bool until);
  Value condition(const Expression& expression);
  Arguments evaluate_arguments(const std::vector<Argument>& arguments);

  Value call_value(const Value& callable, const Arguments& arguments);
  Value call_macro(const MacroNode& macro, Scope* made_in, const Arguments& arguments);
  void bind_parameters(const MacroNode& macro, const Arguments& arguments);
  void bind_special(const MacroNode& macro, const Arguments& arguments,
                    const std::vector<bool>& used);
  Value make_macro(const MacroNode& node);

  Budget budget_;
  std::tm now_;
  Position at_;
  int depth_ = 0;
  Scope* scope_ = nullptr;
  std::string* out_ = nullptr;
  const Value* block_text_ = nullptr;  // of the filter block or block set at hand
  std::vector<std::unique_ptr<Scope>> captured_;
  std::vector<std::unique_ptr<Namespace>> namespaces_;
};

}  // namespace cadre::jinja

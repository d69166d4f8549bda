// A template as a tree. Chains (a + b - c, a or b or c) are one node each, so that depth is what
// the author wrote.
#pragma once

#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "generation/jinja/callable.h"
#include "generation/jinja/value.h"

namespace cadre::jinja {

struct Expression;
using ExpressionPtr = std::unique_ptr<const Expression>;

enum class Operator : uint8_t {
  kAdd,
  kSubtract,
  kMultiply,
  kDivide,
  kFloorDivide,
  kModulo,
  kPower,
  kEqual,
  kNotEqual,
  kLess,
  kLessEqual,
  kGreater,
  kGreaterEqual,
  kIn,
  kNotIn,
};

enum class Spread : uint8_t { kNone, kList, kDict };

/// f(value), f(name=value), f(*value), f(**value)
struct Argument {
  std::string name;
  ExpressionPtr value;
  Spread spread = Spread::kNone;
};

struct Expression {
  enum class Kind : uint8_t {
    kConstant,
    kName,
    kTuple,
    kList,
    kDict,       // parts: key, value, key, value ...
    kAttribute,  // parts[0].name
    kItem,       // parts[0][parts[1]]
    kSlice,      // parts[0][parts[1]:parts[2]:parts[3]]; null where left out
    kCall,       // parts[0](arguments)
    kFilter,     // parts[0] | name(arguments); a null part stands for the block's text
    kTest,       // parts[0] is name(arguments)
    kNegative,
    kPositive,
    kNot,
    kMath,     // parts with operators between them, from left to right
    kConcat,   // parts joined with ~
    kCompare,  // parts with operators between them, as a chain
    kAnd,
    kOr,
    kCondition,  // parts[0] if parts[1] else parts[2]; null where left out
  };

  Kind kind = Kind::kConstant;
  Position at;
  int depth = 1;
  std::string name = {};
  Value value = {};
  std::vector<ExpressionPtr> parts = {};
  std::vector<Operator> operators = {};
  std::vector<Argument> arguments = {};
  Function filter = nullptr;  // null: not known, which matters when it is met
  Test test = nullptr;
};

struct Statement;
using Block = std::vector<Statement>;

/// What an assignment writes to: a name, namespace.attribute, or several of them.
struct Target {
  std::string name = {};
  std::string attribute = {};
  std::vector<Target> parts = {};  // of a tuple, which has no name
  Position at;
};

struct TextNode {
  std::string text;
};
struct PrintNode {
  ExpressionPtr value;
};
struct IfNode {
  struct Branch {
    ExpressionPtr condition;  // null: else
    Block body;
  };
  std::vector<Branch> branches;
};
struct ForNode {
  Target target;
  ExpressionPtr iterable;
  ExpressionPtr condition;  // may be null
  Block body;
  Block otherwise;
};
struct SetNode {
  Target target;
  ExpressionPtr value;
};
struct SetBlockNode {
  Target target;
  ExpressionPtr filter;  // may be null
  Block body;
};
struct WithNode {
  std::vector<SetNode> sets;
  Block body;
};
struct Parameter {
  std::string name;
  ExpressionPtr fallback;  // may be null
};
struct MacroNode {
  std::string name;
  std::vector<Parameter> parameters;
  Block body;
  bool uses_varargs = false;
  bool uses_kwargs = false;
  bool uses_caller = false;
};
struct CallBlockNode {
  ExpressionPtr call;
  MacroNode caller;
};
struct FilterBlockNode {
  ExpressionPtr filter;
  Block body;
};
/// {% generation %} of Transformers: its text, and a scope of its own.
struct GenerationNode {
  Block body;
};
struct BreakNode {};
struct ContinueNode {};

struct Statement {
  Position at;
  std::variant<TextNode, PrintNode, IfNode, ForNode, SetNode, SetBlockNode, WithNode, MacroNode,
               CallBlockNode, FilterBlockNode, GenerationNode, BreakNode, ContinueNode>
      node;
};

}  // namespace cadre::jinja

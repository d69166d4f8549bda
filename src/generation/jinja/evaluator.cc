// Statements. expressions.cc evaluates what stands in them.
#include "generation/jinja/evaluator.h"

#include <utility>

#include "generation/jinja/nesting.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {

const Value* Scope::find(std::string_view name) const {
  for (const auto& [known, value] : names_) {
    if (known == name) return &value;
  }
  return nullptr;
}

void Scope::set(std::string_view name, Value value) {
  for (auto& [known, old] : names_) {
    if (known != name) continue;
    old = std::move(value);
    return;
  }
  names_.emplace_back(name, std::move(value));
}

std::string Evaluator::run(const Block& template_body, const Dict& variables) {
  std::string out;
  out_ = &out;
  const NewScope scope(*this);
  for (const auto& [key, value] : variables.entries) scope_->set(key.string(), value);
  run_block(template_body);
  return out;
}

void Evaluator::emit(std::string_view text) {
  budget_.bytes(text.size());
  *out_ += text;
}

Evaluator::Flow Evaluator::run_block(const Block& block) {
  for (const Statement& statement : block) {
    at_ = statement.at;
    budget_.step();
    const Depth depth(*this);
    const Flow flow =
        std::visit([this](const auto& node) { return run_node(node); }, statement.node);
    if (flow != Flow::kGoOn) return flow;
  }
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const TextNode& node) {
  emit(node.text);
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const PrintNode& node) {
  const Value value = evaluate(*node.value);
  if (value.is_string()) {
    emit(value.string());
  } else {
    emit(to_text(value, budget_));
  }
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const IfNode& node) {
  for (const IfNode::Branch& branch : node.branches) {
    if (!branch.condition || truth(evaluate(*branch.condition))) return run_block(branch.body);
  }
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const ForNode& node) {
  Values items = iterate(evaluate(*node.iterable), budget_);
  std::function<bool(const Value&)> passes;
  Scope* const outside = scope_;
  if (node.condition) {
    passes = [this, &node, outside](const Value& item) {
      Scope* const inside = std::exchange(scope_, outside);
      bool passed = false;
      {
        const NewScope scope(*this);
        assign(node.target, item);
        passed = truth(evaluate(*node.condition));
      }
      scope_ = inside;
      return passed;
    };
  }
  const auto loop = std::make_shared<LoopState>(std::move(items), std::move(passes));
  if (run_items(node, loop)) return Flow::kGoOn;
  const NewScope scope(*this);
  return run_block(node.otherwise);
}

// False when the else part runs: as in Jinja, when no round came to the end of the body.
bool Evaluator::run_items(const ForNode& node, const LoopPtr& loop) {
  bool ran = false;
  while (std::optional<Value> item = loop->advance()) {
    budget_.step();
    const NewScope scope(*this);
    scope_->set("loop", loop);
    assign(node.target, *item);
    const Flow flow = run_block(node.body);
    if (flow == Flow::kBreak) break;
    ran |= flow == Flow::kGoOn;
  }
  return ran;
}

std::string Evaluator::text_of(const Block& block) {
  const Capture capture(*this);
  const NewScope scope(*this);
  run_block(block);
  return std::move(*out_);
}

void Evaluator::assign(const Target& target, const Value& value) {
  at_ = target.at;
  if (!target.parts.empty()) {
    const Values items = iterate(value, budget_);
    if (items.size() != target.parts.size()) {
      fail("expected ", target.parts.size(), " values to assign, got ", items.size());
    }
    for (size_t i = 0; i < items.size(); ++i) assign(target.parts[i], items[i]);
  } else if (target.attribute.empty()) {
    scope_->set(target.name, value);
  } else {
    const Scope* scope = scope_;
    const Value* owner = scope->find(target.name);
    while (owner == nullptr && (scope = scope->parent()) != nullptr) {
      owner = scope->find(target.name);
    }
    Namespace* names = owner == nullptr ? nullptr : owner->names();
    if (names == nullptr) {
      fail(target.name, ".", target.attribute, " cannot be set: ", target.name,
           " is no namespace()");
    }
    budget_.bytes(128);
    names->names.set(Value(target.attribute), value);
  }
}

Evaluator::Flow Evaluator::run_node(const SetNode& node) {
  assign(node.target, evaluate(*node.value));
  return Flow::kGoOn;
}

// Runs the filters of a block over its text.
Value Evaluator::filtered(const Expression& filter, std::string text) {
  const Value value(std::move(text));
  const Value* const outer = std::exchange(block_text_, &value);
  Value result = evaluate(filter);
  block_text_ = outer;
  return result;
}

Evaluator::Flow Evaluator::run_node(const SetBlockNode& node) {
  std::string text = text_of(node.body);
  assign(node.target,
         node.filter ? filtered(*node.filter, std::move(text)) : Value(std::move(text)));
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const WithNode& node) {
  Values values;  // none of them sees another
  for (const SetNode& set : node.sets) values.push_back(evaluate(*set.value));
  const NewScope scope(*this);
  for (size_t i = 0; i < values.size(); ++i) assign(node.sets[i].target, values[i]);
  return run_block(node.body);
}

Evaluator::Flow Evaluator::run_node(const MacroNode& node) {
  scope_->set(node.name, make_macro(node));
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const CallBlockNode& node) {
  const Value callable = evaluate(*node.call->parts.front());
  Arguments arguments = evaluate_arguments(node.call->arguments);
  arguments.named.emplace_back("caller", make_macro(node.caller));
  emit(to_text(call_value(callable, arguments), budget_));
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const FilterBlockNode& node) {
  emit(to_text(filtered(*node.filter, text_of(node.body)), budget_));
  return Flow::kGoOn;
}

Evaluator::Flow Evaluator::run_node(const GenerationNode& node) {
  const NewScope scope(*this);
  return run_block(node.body);
}

Value Evaluator::make_macro(const MacroNode& node) {
  for (Scope* scope = scope_; scope != nullptr && !scope->is_captured; scope = scope->parent()) {
    budget_.bytes(256);  // it stays in memory
    scope->is_captured = true;
  }
  Callable macro{.name = node.name, .macro = &node, .scope = scope_};
  return CallablePtr(std::make_shared<const Callable>(std::move(macro)));
}

Value Evaluator::make_namespace(Dict names) {
  budget_.bytes(256 + 128 * names.entries.size());
  namespaces_.push_back(std::make_unique<Namespace>());
  namespaces_.back()->names = std::move(names);
  return namespaces_.back().get();
}

Value Evaluator::call_macro(const MacroNode& macro, Scope* made_in, const Arguments& arguments) {
  const Depth depth(*this);
  Scope* const caller = std::exchange(scope_, made_in);
  std::string text;
  {
    const Capture capture(*this);
    const NewScope scope(*this);
    bind_parameters(macro, arguments);
    run_block(macro.body);
    text = std::move(*out_);
  }
  scope_ = caller;
  return text;
}

void Evaluator::bind_parameters(const MacroNode& macro, const Arguments& arguments) {
  std::vector<bool> used(arguments.named.size(), false);
  for (size_t i = 0; i < macro.parameters.size(); ++i) {
    const Parameter& parameter = macro.parameters[i];
    std::optional<Value> value;
    if (i < arguments.positional.size()) value = arguments.positional[i];
    for (size_t j = 0; !value && j < arguments.named.size(); ++j) {
      if (arguments.named[j].first != parameter.name) continue;
      value = arguments.named[j].second;
      used[j] = true;
    }
    if (!value && parameter.fallback) value = evaluate(*parameter.fallback);
    scope_->set(parameter.name,
                value ? *std::move(value)
                      : make_undefined("parameter '", parameter.name, "' was not provided"));
  }
  bind_special(macro, arguments, used);
}

// caller, varargs and kwargs, for macros that name them; for others what would go there is too
// much.
void Evaluator::bind_special(const MacroNode& macro, const Arguments& arguments,
                             const std::vector<bool>& used) {
  Dict kwargs;
  Value caller = make_undefined("no caller defined");
  for (size_t i = 0; i < arguments.named.size(); ++i) {
    const auto& [name, value] = arguments.named[i];
    if (used[i]) continue;
    if (name == "caller" && macro.uses_caller) {
      caller = value;
    } else if (macro.uses_kwargs) {
      kwargs.set(Value(name), value);
    } else {
      fail("the macro ", macro.name, " takes no argument named ", quote(name));
    }
  }
  const size_t count = macro.parameters.size();
  const Values& given = arguments.positional;
  if (macro.uses_caller) scope_->set("caller", caller);
  if (macro.uses_kwargs) scope_->set("kwargs", make_dict(std::move(kwargs)));
  if (macro.uses_varargs) {
    Values rest(given.begin() + static_cast<ptrdiff_t>(std::min(count, given.size())), given.end());
    scope_->set("varargs", make_array(std::move(rest), ArrayKind::kTuple));
  } else if (given.size() > count) {
    fail("the macro ", macro.name, " takes ", count, " arguments, got ", given.size());
  }
}

}  // namespace cadre::jinja

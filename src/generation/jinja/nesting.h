// The evaluator's guards: each puts something in place and takes it back when it ends, also after a
// fault.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "generation/jinja/evaluator.h"

namespace cadre::jinja {

/// One level of statements, expressions and calls inside each other.
class Evaluator::Depth {
 public:
  explicit Depth(Evaluator& evaluator) : evaluator_(evaluator) {
    if (evaluator.depth_ >= evaluator.budget_.max_depth()) {
      fail("the template calls itself or nests deeper than ", evaluator.budget_.max_depth(),
           " levels");
    }
    ++evaluator.depth_;
  }
  ~Depth() { --evaluator_.depth_; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  Evaluator& evaluator_;
};

/// A scope inside the current one. It is kept beyond its end when a macro was made in it.
class Evaluator::NewScope {
 public:
  explicit NewScope(Evaluator& evaluator)
      : evaluator_(evaluator),
        outer_(evaluator.scope_),
        scope_(std::make_unique<Scope>(evaluator.scope_)) {
    evaluator.scope_ = scope_.get();
  }
  ~NewScope() {
    evaluator_.scope_ = outer_;
    if (scope_->is_captured) evaluator_.captured_.push_back(std::move(scope_));
  }
  NewScope(const NewScope&) = delete;
  NewScope& operator=(const NewScope&) = delete;

 private:
  Evaluator& evaluator_;
  Scope* outer_;
  std::unique_ptr<Scope> scope_;
};

/// What is written goes to a text of its own.
class Evaluator::Capture {
 public:
  explicit Capture(Evaluator& evaluator)
      : evaluator_(evaluator), outer_(std::exchange(evaluator.out_, &text_)) {}
  ~Capture() { evaluator_.out_ = outer_; }
  Capture(const Capture&) = delete;
  Capture& operator=(const Capture&) = delete;

 private:
  Evaluator& evaluator_;
  std::string text_;
  std::string* outer_;
};

}  // namespace cadre::jinja

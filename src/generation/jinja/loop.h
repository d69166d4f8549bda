// The variable `loop` of a for loop, which also hands out the loop's items.
#pragma once

#include <deque>
#include <functional>
#include <optional>
#include <string_view>

#include "generation/jinja/value.h"

namespace cadre::jinja {

class LoopState {
 public:
  /// `passes` (may be empty) chooses items, each right before it is needed: the loop's body may
  /// have changed what it looks at.
  LoopState(Values items, std::function<bool(const Value&)> passes)
      : items_(std::move(items)), passes_(std::move(passes)) {}

  /// The next item; empty at the end.
  std::optional<Value> advance();

  /// loop.index and the like; undefined for another name. loop.changed() is not served: it would
  /// keep values that may hold the loop.
  Value attribute(std::string_view name);
  int64_t index0() const { return index0_; }

 private:
  std::optional<Value> fetch();
  const Value* peek();
  int64_t length();

  Values items_;
  size_t next_ = 0;  // of items_
  std::function<bool(const Value&)> passes_;
  std::deque<Value> ahead_;  // chosen but not yet handed out
  int64_t index0_ = -1;
  Value previous_;
  Value current_;
};

}  // namespace cadre::jinja

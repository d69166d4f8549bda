#include "generation/jinja/loop.h"

#include <utility>

namespace cadre::jinja {

std::optional<Value> LoopState::fetch() {
  while (next_ < items_.size()) {
    Value item = items_[next_++];
    if (!passes_ || passes_(item)) return item;
  }
  return {};
}

const Value* LoopState::peek() {
  if (ahead_.empty()) {
    std::optional<Value> item = fetch();
    if (!item) return nullptr;
    ahead_.push_back(*std::move(item));
  }
  return &ahead_.front();
}

std::optional<Value> LoopState::advance() {
  if (peek() == nullptr) return {};
  if (index0_ >= 0) previous_ = std::move(current_);
  current_ = std::move(ahead_.front());
  ahead_.pop_front();
  ++index0_;
  return current_;
}

int64_t LoopState::length() {
  while (std::optional<Value> item = fetch()) ahead_.push_back(*std::move(item));
  return index0_ + 1 + static_cast<int64_t>(ahead_.size());
}

Value LoopState::attribute(std::string_view name) {
  if (name == "index") return index0_ + 1;
  if (name == "index0") return index0_;
  if (name == "first") return index0_ == 0;
  if (name == "last") return peek() == nullptr;
  if (name == "length") return length();
  if (name == "revindex") return length() - index0_;
  if (name == "revindex0") return length() - index0_ - 1;
  if (name == "depth") return int64_t{1};  // counts recursive loops only
  if (name == "depth0") return int64_t{0};
  if (name == "previtem") {
    return index0_ == 0 ? make_undefined("there is no previous item") : previous_;
  }
  if (name == "nextitem") {
    const Value* next = peek();
    return next == nullptr ? make_undefined("there is no next item") : *next;
  }
  return make_undefined("a loop has no attribute ", quote(name));
}

}  // namespace cadre::jinja

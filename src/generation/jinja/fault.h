// What stops a template: faults with their kind, places in the text, and the budget that bounds
// what a template from outside may cost.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "core/str_cat.h"

namespace cadre::jinja {

struct Position {
  uint32_t line = 1;
  uint32_t column = 1;  // in characters
};

/// Thrown inside the interpreter; Template turns it into a cadre::Error with file, line and column.
struct Fault {
  enum class Kind : uint8_t {
    kTemplate,     // wrong syntax, a value of the wrong type, a limit passed
    kUnsupported,  // a part of Jinja that this subset leaves out
    kRaised,       // the template itself refused the messages: raise_exception()
  };
  Kind kind = Kind::kTemplate;
  std::string message;
};

template <typename... Args>
[[noreturn]] void fail(const Args&... args) {
  throw Fault{Fault::Kind::kTemplate, str_cat(args...)};
}

template <typename... Args>
[[noreturn]] void fail_unsupported(const Args&... args) {
  throw Fault{Fault::Kind::kUnsupported, str_cat(args...)};
}

/// What one rendering may cost. A conversation of 100000 tokens takes well under a hundredth.
struct Limits {
  int64_t steps = 20'000'000;          // nodes evaluated, items visited
  int64_t bytes = int64_t{256} << 20;  // text and lists made or searched
  int depth = 1000;                    // statements and expressions inside each other
};

/// Counts down from the limits.
class Budget {
 public:
  explicit Budget(const Limits& limits) : limits_(limits) {}

  void step(size_t count = 1) {
    steps_ += static_cast<int64_t>(count);
    if (steps_ > limits_.steps) {
      fail("the template takes more than ", limits_.steps, " steps; it is no usable template");
    }
  }

  void bytes(size_t count) {
    if (count > static_cast<size_t>(limits_.bytes - bytes_)) {
      fail("the template handles more than ", limits_.bytes,
           " bytes of text; it is no usable template, or the conversation is too long");
    }
    bytes_ += static_cast<int64_t>(count);
  }

  /// Before `count` items are put into a list.
  void items(size_t count) {
    constexpr size_t kItemBytes = 32;
    step(count);
    bytes(count * kItemBytes);  // no overflow: step() bounds the count
  }

  int max_depth() const { return limits_.depth; }

 private:
  Limits limits_;
  int64_t steps_ = 0;
  int64_t bytes_ = 0;
};

}  // namespace cadre::jinja

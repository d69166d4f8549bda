// libjpeg and libpng report errors through a callback that must not return: it jumps.
#pragma once

#include <csetjmp>
#include <cstdio>

namespace cadre {

class JumpGuard {
 public:
  /// Runs calls into the C library; false when fail() was called in them. `step` and what it calls
  /// hold nothing that needs a destructor.
  template <typename Step>
  bool run(const Step& step) {
    if (setjmp(target_) != 0) return false;
    step();
    return true;
  }

  /// Only from within run().
  [[noreturn]] void fail(const char* message) {
    std::snprintf(message_, sizeof message_, "%s", message);
    std::longjmp(target_, 1);
  }

  const char* message() const { return message_; }

 private:
  std::jmp_buf target_;
  char message_[256] = "";
};

}  // namespace cadre

// Signals. Ctrl-C: while an InterruptGuard lives, SIGINT, SIGTERM and SIGHUP (the terminal was
// closed) are only noted, so that the work at hand can stop at a clean point; a second one of a
// kind ends the process at once. Without a guard they end the process as usual.
#pragma once

#include <array>
#include <csignal>

namespace cadre::cli {

/// Once, at the start: SIGPIPE and SIGXFSZ become errors of write(2); SIGBUS, which a mapped file
/// that shrinks raises, ends the process with one line and kExitBadInput.
void prepare_signals();

class InterruptGuard {
 public:
  InterruptGuard();
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> previous_{};
};

/// The signal that asked the command to stop; 0 when none did.
int interrupt_signal();

}  // namespace cadre::cli

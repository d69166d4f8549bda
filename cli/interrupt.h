// Signals. Ctrl-C: while an InterruptGuard lives, SIGINT, SIGTERM and SIGHUP (the terminal was
// closed) are only noted, so that the work at hand can stop at a clean point; a second one of a
// kind ends the process at once. Without a guard they end the process as usual.
#pragma once

#include <array>
#include <csignal>
#include <cstdint>

namespace cadre::cli {

/// Once, at the start: SIGPIPE and SIGXFSZ become errors of write(2); SIGBUS, which a mapped file
/// that shrinks raises, ends the process with one line and kExitBadInput.
void prepare_signals();

class InterruptGuard {
 public:
  /// What a second Ctrl-C does: a command of its own may just end, a session goes on.
  enum class Again : uint8_t { kEnds, kIsNoted };

  explicit InterruptGuard(Again again = Again::kEnds);
  ~InterruptGuard();
  InterruptGuard(const InterruptGuard&) = delete;
  InterruptGuard& operator=(const InterruptGuard&) = delete;

 private:
  static constexpr std::array<int, 3> kSignals = {SIGINT, SIGTERM, SIGHUP};
  std::array<struct sigaction, kSignals.size()> previous_{};
};

/// The signal that asked the command to stop; 0 when none did.
int interrupt_signal();

/// As if no signal had come: a session goes on after Ctrl-C.
void forget_interrupt();

/// Becomes readable with the next signal that a guard of Again::kIsNoted notes, so that poll(2) can
/// wait for input and signals without a gap. The same one every time.
int interrupt_descriptor();

}  // namespace cadre::cli

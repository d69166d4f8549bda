#include "interrupt.h"

#include <unistd.h>

#include <atomic>

#include "exit_codes.h"

namespace cadre::cli {

namespace {

volatile std::sig_atomic_t g_signal = 0;

// Only what is allowed in a signal handler.
extern "C" void report_bus_error(int /*signal*/) {
  static constexpr char kText[] =
      "cadre: expected the model's files to stay as they are, one became shorter or unreadable "
      "while in use (SIGBUS); fetch the model again\n";
  static std::atomic_flag is_said = ATOMIC_FLAG_INIT;  // lock-free by its definition
  while (is_said.test_and_set()) ::pause();            // another thread's _exit is on its way
  if (::write(STDERR_FILENO, kText, sizeof kText - 1) < 0) _exit(kExitBadInput);
  _exit(kExitBadInput);
}

extern "C" void note_signal(int signal) { g_signal = signal; }

}  // namespace

void prepare_signals() {
  // A reader that has seen enough (`cadre generate ... | head`) is no failure; writes report it.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit: writes fail with EFBIG
  std::signal(SIGBUS, report_bus_error);
}

InterruptGuard::InterruptGuard() {
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  for (size_t i = 0; i < kSignals.size(); ++i) {
    sigaction(kSignals[i], &action, &previous_[i]);
    // Started by nohup, or in the background by a shell without job control: it stays ignored.
    if (previous_[i].sa_handler == SIG_IGN) sigaction(kSignals[i], &previous_[i], nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

int interrupt_signal() { return g_signal; }

}  // namespace cadre::cli

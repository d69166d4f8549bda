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

InterruptGuard::InterruptGuard() : previous_int_{}, previous_term_{} {
  struct sigaction action {};
  action.sa_handler = note_signal;
  action.sa_flags = static_cast<int>(SA_RESETHAND);
  sigaction(SIGINT, &action, &previous_int_);
  sigaction(SIGTERM, &action, &previous_term_);
  // Started in the background by a shell without job control: SIGINT stays ignored.
  if (previous_int_.sa_handler == SIG_IGN) sigaction(SIGINT, &previous_int_, nullptr);
}

InterruptGuard::~InterruptGuard() {
  sigaction(SIGINT, &previous_int_, nullptr);
  sigaction(SIGTERM, &previous_term_, nullptr);
}

int interrupt_signal() { return g_signal; }

}  // namespace cadre::cli

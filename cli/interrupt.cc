#include "interrupt.h"

#include <fcntl.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "exit_codes.h"
#include "io/file_handle.h"

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

// The ends of a pipe that wakes poll(2): reading, writing; -1 before it is asked for.
volatile std::sig_atomic_t g_wake_read = -1;
volatile std::sig_atomic_t g_wake_write = -1;

extern "C" void note_signal(int signal) {
  const int error = errno;
  g_signal = signal;
  // The pipe does not block: when it is full, it is readable already.
  if (g_wake_write >= 0 && ::write(g_wake_write, "", 1) < 0) errno = error;
}

}  // namespace

void prepare_signals() {
  // A reader that has seen enough (`cadre generate ... | head`) is no failure; writes report it.
  std::signal(SIGPIPE, SIG_IGN);
  std::signal(SIGXFSZ, SIG_IGN);  // a file size limit: writes fail with EFBIG
  std::signal(SIGBUS, report_bus_error);
}

InterruptGuard::InterruptGuard(Again again) {
  if (again == Again::kIsNoted) interrupt_descriptor();  // before a signal can come
  for (size_t i = 0; i < kSignals.size(); ++i) {
    struct sigaction action {};
    action.sa_handler = note_signal;
    const bool stays = again == Again::kIsNoted && kSignals[i] == SIGINT;
    action.sa_flags = stays ? 0 : static_cast<int>(SA_RESETHAND);
    sigaction(kSignals[i], &action, &previous_[i]);
    // Started by nohup, or in the background by a shell without job control: it stays ignored.
    if (previous_[i].sa_handler == SIG_IGN) sigaction(kSignals[i], &previous_[i], nullptr);
  }
}

InterruptGuard::~InterruptGuard() {
  for (size_t i = 0; i < kSignals.size(); ++i) sigaction(kSignals[i], &previous_[i], nullptr);
}

int interrupt_signal() { return g_signal; }

void forget_interrupt() {
  g_signal = 0;
  char drained[16];
  while (g_wake_read >= 0 && ::read(g_wake_read, drained, sizeof drained) > 0) {
  }
}

int interrupt_descriptor() {
  if (g_wake_read < 0) {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) {
      throw Error(str_cat("cannot make a pipe: ", errno_text(errno)));
    }
    g_wake_read = ends[0];
    g_wake_write = ends[1];
  }
  return g_wake_read;
}

}  // namespace cadre::cli

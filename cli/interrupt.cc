#include "interrupt.h"

namespace cadre::cli {

namespace {

volatile std::sig_atomic_t g_signal = 0;

extern "C" void note_signal(int signal) { g_signal = signal; }

}  // namespace

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

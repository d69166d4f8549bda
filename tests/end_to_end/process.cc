#include "end_to_end/process.h"

#include <fcntl.h>
#include <poll.h>
#include <pty.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <stdexcept>

namespace cadre::test {

namespace {

void require(bool ok, const char* what) {
  if (!ok) throw std::runtime_error(std::string("Process: ") + what + " failed");
}

std::array<int, 2> make_pipe() {
  std::array<int, 2> ends{};
  require(pipe2(ends.data(), O_CLOEXEC) == 0, "pipe2");
  return ends;
}

std::array<int, 2> make_terminal() {
  std::array<int, 2> ends{};
  winsize size{};
  size.ws_row = 24;
  size.ws_col = 80;
  require(openpty(&ends[0], &ends[1], nullptr, nullptr, &size) == 0, "openpty");
  for (const int end : ends) fcntl(end, F_SETFD, FD_CLOEXEC);
  return ends;
}

void close_end(int& descriptor) {
  if (descriptor >= 0) close(descriptor);
  descriptor = -1;
}

/// What decides how the command behaves comes from the test alone.
void set_environment(const std::map<std::string, std::string>& variables) {
  for (const char* name : {"CADRE_ASSETS", "CADRE_EXPERTS_IMPLEMENTATION", "NO_COLOR",
                           "HF_HUB_CACHE", "HF_HOME", "XDG_CACHE_HOME"}) {
    unsetenv(name);
  }
  setenv("CADRE_DEVICE", "cpu", 1);  // also where there is a GPU
  setenv("TERM", "xterm", 1);
  for (const auto& [name, value] : variables) setenv(name.c_str(), value.c_str(), 1);
}

}  // namespace

Process::Process(const std::vector<std::string>& arguments, const RunOptions& options) {
  if (options.interactive) {
    start_at_terminal(arguments, options);
    return;
  }
  std::array<int, 2> in = make_pipe();
  std::array<int, 2> out = make_pipe();
  std::array<int, 2> err = options.terminal ? make_terminal() : make_pipe();
  pid_ = fork();
  require(pid_ >= 0, "fork");
  if (pid_ == 0) start_child(arguments, options, in[0], out[1], err[1]);
  for (int* end : {&in[0], &out[1], &err[1]}) close_end(*end);
  out_ = out[0];
  err_ = err[0];
  std::signal(SIGPIPE, SIG_IGN);  // a command that does not read its input
  // Inputs of tests fit in a pipe's buffer.
  [[maybe_unused]] const ssize_t ignored = write(in[1], options.input.data(), options.input.size());
  close_end(in[1]);
}

// The child leads a session of its own, whose terminal turns Ctrl-C into a signal.
void Process::start_at_terminal(const std::vector<std::string>& arguments,
                                const RunOptions& options) {
  std::array<int, 2> terminal = make_terminal();
  pid_ = fork();
  require(pid_ >= 0, "fork");
  if (pid_ == 0) {
    setsid();
    ioctl(terminal[1], TIOCSCTTY, 0);
    start_child(arguments, options, terminal[1], terminal[1], terminal[1]);
  }
  close_end(terminal[1]);
  out_ = terminal[0];
}

void Process::start_child(const std::vector<std::string>& arguments, const RunOptions& options,
                          int in_read, int out_write, int err_write) {
  if (!options.stdout_file.empty()) {
    out_write = open(options.stdout_file.c_str(), O_WRONLY | O_CREAT | O_TRUNC, 0666);
  }
  dup2(in_read, STDIN_FILENO);
  dup2(out_write, STDOUT_FILENO);
  dup2(err_write, STDERR_FILENO);
  std::signal(SIGPIPE, SIG_DFL);
  set_environment(options.environment);
  std::vector<std::string> copy = arguments;
  std::vector<char*> argv = {const_cast<char*>(CADRE_COMMAND)};
  for (std::string& argument : copy) argv.push_back(argument.data());
  argv.push_back(nullptr);
  execv(CADRE_COMMAND, argv.data());
  _exit(127);
}

Process::~Process() {
  if (pid_ > 0) {
    kill(pid_, SIGKILL);
    waitpid(pid_, nullptr, 0);
  }
  close_end(out_);
  close_end(err_);
}

bool Process::read_some() {
  std::array<pollfd, 2> polled = {pollfd{out_, POLLIN, 0}, pollfd{err_, POLLIN, 0}};
  if (out_ < 0 && err_ < 0) return false;
  while (poll(polled.data(), polled.size(), -1) < 0) require(errno == EINTR, "poll");
  const auto take = [](const pollfd& stream, int& descriptor, std::string& text) {
    if (stream.revents == 0) return;
    std::array<char, 1 << 16> buffer;
    const ssize_t count = read(descriptor, buffer.data(), buffer.size());
    if (count > 0) {
      text.append(buffer.data(), static_cast<size_t>(count));
    } else {
      close_end(descriptor);  // a terminal without a writer answers EIO
    }
  };
  take(polled[0], out_, result_.out);
  take(polled[1], err_, result_.err);
  return true;
}

void Process::wait_for_output(size_t bytes) {
  while (out_ >= 0 && result_.out.size() < bytes && read_some()) {
  }
}

void Process::wait_for_text(const std::string& text) {
  size_t at = 0;
  while ((at = result_.out.find(text, seen_)) == result_.out.npos) {
    if (out_ < 0 || !read_some()) {
      throw std::runtime_error("the command ended without saying \"" + text + "\": " + result_.out);
    }
  }
  seen_ = at + text.size();
}

void Process::send(const std::string& keys) {
  require(write(out_, keys.data(), keys.size()) == static_cast<ssize_t>(keys.size()), "write");
}

void Process::send_signal(int signal) { kill(pid_, signal); }

void Process::close_output() { close_end(out_); }

Result Process::wait() {
  while (read_some()) {
  }
  int status = 0;
  rusage usage{};
  require(wait4(pid_, &status, 0, &usage) == pid_, "wait4");
  pid_ = -1;
  if (WIFEXITED(status)) result_.exit_code = WEXITSTATUS(status);
  if (WIFSIGNALED(status)) result_.signal = WTERMSIG(status);
  result_.peak_bytes = static_cast<size_t>(usage.ru_maxrss) * 1024;
  return result_;
}

Result run_cadre(const std::vector<std::string>& arguments, const RunOptions& options) {
  return Process(arguments, options).wait();
}

}  // namespace cadre::test

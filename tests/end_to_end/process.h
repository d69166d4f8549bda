// Runs the built `cadre` command as a user would and keeps what it said.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <map>
#include <string>
#include <vector>

namespace cadre::test {

struct RunOptions {
  std::string input{};                               // standard input; then it is closed
  std::map<std::string, std::string> environment{};  // on top of a neutral one
  std::string stdout_file{};                         // standard output goes there
  bool terminal = false;                             // standard error is a terminal of 80 columns
  // All three are one terminal, as when a person types: send() writes there, and all that the
  // command says (and the echo) is in `out`.
  bool interactive = false;
};

struct Result {
  int exit_code = -1;  // -1 when a signal ended it
  int signal = 0;
  std::string out;
  std::string err;
  size_t peak_bytes = 0;  // largest resident set
};

/// A running command. What it says is read while a method below waits.
class Process {
 public:
  explicit Process(const std::vector<std::string>& arguments, const RunOptions& options = {});
  ~Process();
  Process(const Process&) = delete;
  Process& operator=(const Process&) = delete;

  /// Waits until at least `bytes` came on standard output or it was closed.
  void wait_for_output(size_t bytes);
  /// Waits until `text` came on standard output after what an earlier call waited for; the test
  /// fails when the command ends without.
  void wait_for_text(const std::string& text);
  /// Types at an interactive command's terminal: "\x03" is Ctrl-C, "\x04" Ctrl-D.
  void send(const std::string& keys);
  void send_signal(int signal);
  /// The reader goes away, as `head` does.
  void close_output();
  Result wait();

 private:
  void start_child(const std::vector<std::string>& arguments, const RunOptions& options,
                   int in_read, int out_write, int err_write);
  void start_at_terminal(const std::vector<std::string>& arguments, const RunOptions& options);
  /// Reads what is there; false when both streams are closed.
  bool read_some();

  pid_t pid_ = -1;
  int out_ = -1;
  int err_ = -1;
  size_t seen_ = 0;  // of result_.out, by wait_for_text()
  Result result_;
};

/// Runs `cadre arguments...` to its end.
Result run_cadre(const std::vector<std::string>& arguments, const RunOptions& options = {});

}  // namespace cadre::test

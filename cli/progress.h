// A progress bar on a terminal's standard error: bar, percent, rate and time to go. A step that
// takes less than a second shows nothing; the bar is wiped when its step is done.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>

#include "cadre/model.h"

namespace cadre::cli {

/// Where and how bars are drawn. Tests bring their own terminal and clock.
struct ProgressTerminal {
  bool enabled = false;
  bool colour = false;
  int columns = 80;
  std::function<void(std::string_view)> write;
  std::function<double()> seconds;  // a clock that only goes forward

  /// Standard error; not enabled when that is no terminal, TERM is "dumb" or `quiet`. Without
  /// colour when NO_COLOR is set and not empty.
  static ProgressTerminal standard_error(bool quiet);
};

/// One line that is drawn over and over. Not for several threads at once.
class Progress {
 public:
  explicit Progress(ProgressTerminal terminal, std::string unit = "");
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  /// How far the step `what` has come; another `what` than before begins a new bar.
  void update(std::string_view what, int64_t done, int64_t total);
  /// Wipes the bar.
  void clear();
  /// update() as a callback; this object must outlive it.
  ProgressCallback callback();

 private:
  std::string line(double elapsed, int64_t done, int64_t total) const;

  ProgressTerminal terminal_;
  std::string unit_;
  std::string what_;
  double start_ = 0;
  double last_drawn_ = 0;
  bool visible_ = false;
};

}  // namespace cadre::cli

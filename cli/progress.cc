#include "progress.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>

#include "core/str_cat.h"

namespace cadre::cli {

namespace {

constexpr double kQuietSeconds = 1.0;   // before a bar appears
constexpr double kRedrawSeconds = 0.1;  // between two drawings
constexpr int kBarCells = 24;
constexpr std::string_view kWipe = "\r\x1b[K";

bool is_set(const char* variable) {
  const char* value = std::getenv(variable);
  return value != nullptr && *value != '\0';
}

std::string clock_text(double seconds) {
  const auto total = static_cast<long long>(std::llround(seconds));
  char text[48];
  if (total >= 3600) {
    std::snprintf(text, sizeof text, "%lld:%02lld:%02lld", total / 3600, total / 60 % 60,
                  total % 60);
  } else {
    std::snprintf(text, sizeof text, "%lld:%02lld", total / 60, total % 60);
  }
  return text;
}

std::string rate_text(double rate, const std::string& unit) {
  if (unit == "bytes") return format_bytes(static_cast<size_t>(rate)) + "/s";
  char text[48];
  std::snprintf(text, sizeof text, rate < 10 ? "%.2f" : "%.0f", rate);
  return unit.empty() ? str_cat(text, "/s") : str_cat(text, " ", unit, "/s");
}

}  // namespace

ProgressTerminal ProgressTerminal::standard_error(bool quiet) {
  ProgressTerminal terminal;
  const char* term = std::getenv("TERM");
  const bool dumb = term != nullptr && std::string_view(term) == "dumb";
  terminal.enabled = !quiet && !dumb && isatty(STDERR_FILENO) == 1;
  terminal.colour = !is_set("NO_COLOR");
  winsize size{};
  if (ioctl(STDERR_FILENO, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) {
    terminal.columns = size.ws_col;
  }
  terminal.write = [](std::string_view text) {
    [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
  };
  terminal.seconds = [] {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch())
        .count();
  };
  return terminal;
}

Progress::Progress(ProgressTerminal terminal, std::string unit)
    : terminal_(std::move(terminal)), unit_(std::move(unit)) {
  if (terminal_.enabled) start_ = terminal_.seconds();
}

Progress::~Progress() { clear(); }

void Progress::update(std::string_view what, int64_t done, int64_t total) {
  if (!terminal_.enabled) return;
  const double now = terminal_.seconds();
  if (what != what_) {
    clear();
    // The first step began when this object was made, a later one when it was first heard of.
    if (!what_.empty()) start_ = now;
    what_ = what;
  }
  if (done >= total) {
    clear();
    return;
  }
  if (now - start_ < kQuietSeconds || (visible_ && now - last_drawn_ < kRedrawSeconds)) return;
  terminal_.write(str_cat(kWipe, line(now - start_, done, total)));
  last_drawn_ = now;
  visible_ = true;
}

void Progress::clear() {
  if (!visible_) return;
  terminal_.write(kWipe);
  visible_ = false;
}

ProgressCallback Progress::callback() {
  return [this](std::string_view what, int64_t done, int64_t total) { update(what, done, total); };
}

std::string Progress::line(double elapsed, int64_t done, int64_t total) const {
  const double share = static_cast<double>(std::max<int64_t>(done, 0)) / static_cast<double>(total);
  const double rate = static_cast<double>(done) / elapsed;
  const double left = rate > 0 ? static_cast<double>(total - done) / rate : 0;
  const auto filled = static_cast<size_t>(share * kBarCells);
  char percent[16];
  std::snprintf(percent, sizeof percent, "%3d%%", static_cast<int>(share * 100));
  const std::string tail = str_cat(" ", percent, "  ", rate_text(rate, unit_), "  ETA ",
                                   rate > 0 ? clock_text(left) : "-");
  const size_t columns = static_cast<size_t>(std::max(terminal_.columns, 2)) - 1;
  // A narrow terminal loses the bar first, then the end of the text.
  if (what_.size() + kBarCells + 3 + tail.size() > columns)
    return (what_ + tail).substr(0, columns);
  const std::string bar(filled, '#');
  const std::string rest(kBarCells - filled, '-');
  const std::string drawn = terminal_.colour ? str_cat("\x1b[36m", bar, "\x1b[0m") : bar;
  return str_cat(what_, " [", drawn, rest, "]", tail);
}

}  // namespace cadre::cli

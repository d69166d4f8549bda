#include "line_reader.h"

#include <poll.h>
#include <unistd.h>

#include <array>
#include <cerrno>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "interrupt.h"
#include "io/file_handle.h"
#include "output.h"

namespace cadre::cli {

LineReader::Event LineReader::read_one(std::string& line) {
  for (;;) {
    if (const size_t end = pending_.find('\n'); end != pending_.npos) {
      line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      return Event::kLine;
    }
    if (at_end_) {
      if (pending_.empty()) return Event::kEnd;
      line = std::exchange(pending_, {});
      return Event::kLine;
    }
    std::array<pollfd, 2> sources = {pollfd{STDIN_FILENO, POLLIN, 0},
                                     pollfd{interrupt_descriptor(), POLLIN, 0}};
    if (::poll(sources.data(), sources.size(), -1) < 0 && errno != EINTR) {
      throw Error(str_cat("standard input: cannot wait for it: ", errno_text(errno)));
    }
    if (interrupt_signal() != 0) {
      pending_.clear();
      return Event::kInterrupted;
    }
    if (sources[0].revents == 0) continue;
    std::array<char, 4096> buffer;
    const ssize_t count = ::read(STDIN_FILENO, buffer.data(), buffer.size());
    if (count > 0) {
      pending_.append(buffer.data(), static_cast<size_t>(count));
    } else if (count == 0) {
      at_end_ = true;
    } else if (errno != EINTR) {
      throw CheckpointError(
          str_cat("standard input: expected text, but it cannot be read: ", errno_text(errno)));
    }
  }
}

LineReader::Event LineReader::read(const std::string& first, const std::string& next,
                                   std::string& line) {
  line.clear();
  for (std::string part;;) {
    show(line.empty() ? first : next);
    const Event event = read_one(part);
    if (event == Event::kInterrupted || (event == Event::kEnd && line.empty())) return event;
    if (event == Event::kEnd) return Event::kLine;
    if (!part.ends_with('\\')) {
      line += part;
      return Event::kLine;
    }
    part.back() = '\n';
    line += part;
  }
}

}  // namespace cadre::cli

// Lines of standard input, from a person at a terminal or from a pipe.
#pragma once

#include <cstdint>
#include <string>

namespace cadre::cli {

class LineReader {
 public:
  enum class Event : uint8_t { kLine, kInterrupted, kEnd };

  /// Waits for the next line, without its end. A line that ends with a backslash goes on in the
  /// next one, with a line end between them. kInterrupted: a signal was noted meanwhile (see
  /// interrupt.h) and what had been typed of the line is gone. kEnd: the input is at its end; a
  /// last line without an end counts. `first` and `next` are the prompts of a line and of what goes
  /// on; they are shown on standard error.
  Event read(const std::string& first, const std::string& next, std::string& line);

 private:
  Event read_one(std::string& line);

  std::string pending_;  // read, but not yet handed out
  bool at_end_ = false;
};

}  // namespace cadre::cli

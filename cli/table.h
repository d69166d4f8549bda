// Columns of text, aligned.
#pragma once

#include <cstddef>
#include <optional>
#include <string>
#include <vector>

namespace cadre::cli {

class Table {
 public:
  /// An empty header makes a table without a heading line.
  explicit Table(std::vector<std::string> header);
  /// As many cells as the first row that was given; numbers are aligned to the right by the caller
  /// marking their column with right_align().
  void add_row(std::vector<std::string> cells);
  void right_align(size_t column);
  /// Every line ends with a newline; no spaces before it.
  std::string to_string() const;

 private:
  std::vector<std::vector<std::string>> rows_;  // the header first, when there is one
  std::vector<bool> right_;
};

/// A number by a printf format for one double; "-" when it is empty.
std::string format_number(const char* format, std::optional<double> number);

/// "1234567" as "1,234,567".
std::string with_thousands(size_t number);

}  // namespace cadre::cli

#include "table.h"

#include <algorithm>
#include <cstdio>

namespace cadre::cli {

Table::Table(std::vector<std::string> header) {
  if (!header.empty()) rows_.push_back(std::move(header));
}

void Table::add_row(std::vector<std::string> cells) { rows_.push_back(std::move(cells)); }

void Table::right_align(size_t column) {
  if (right_.size() <= column) right_.resize(column + 1);
  right_[column] = true;
}

std::string Table::to_string() const {
  std::vector<size_t> widths;
  for (const auto& row : rows_) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string padding(widths[i] - row[i].size(), ' ');
      const bool right = i < right_.size() && right_[i];
      if (i > 0) line += "  ";
      if (right) line += padding;
      line += row[i];
      if (!right) line += padding;
    }
    line.erase(line.find_last_not_of(' ') + 1);
    text += line + "\n";
  }
  return text;
}

std::string format_number(const char* format, std::optional<double> number) {
  if (!number) return "-";
  char text[64];
#pragma GCC diagnostic push
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
  std::snprintf(text, sizeof text, format, *number);
#pragma GCC diagnostic pop
  return text;
}

std::string with_thousands(size_t number) {
  const std::string digits = std::to_string(number);
  std::string text;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

}  // namespace cadre::cli

#include "help.h"

#include <sstream>

namespace cadre::cli {

namespace {

constexpr size_t kPageColumns = 80;
constexpr size_t kNameColumns = 30;

}  // namespace

HelpFormatter::HelpFormatter() { column_width(kNameColumns); }

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (option->get_items_expected_max() == 0) return "";  // a flag
  // A positional's name says what it is already.
  std::string text = option->get_positional() ? "" : " " + option->get_type_name();
  if (!option->get_default_str().empty()) text += " (" + option->get_default_str() + ")";
  if (option->get_required()) text += " (required)";
  return text;
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return wrap(option->get_description(), kPageColumns - kNameColumns);
}

std::string HelpFormatter::make_footer(const CLI::App* app) const {
  std::istringstream lines(app->get_footer());
  std::string line;
  std::string footer;
  while (std::getline(lines, line)) {
    const bool is_command = line.starts_with(" ") || line.starts_with("Example");
    footer += (is_command ? line : wrap(line, kPageColumns)) + "\n";
  }
  return footer;
}

std::string HelpFormatter::make_help(const CLI::App* app, std::string name,
                                     CLI::AppFormatMode mode) const {
  std::string help = CLI::Formatter::make_help(app, std::move(name), mode);
  // CLI11 leaves two empty lines between groups.
  for (size_t at; (at = help.find("\n\n\n")) != help.npos;) help.erase(at, 1);
  return help;
}

std::string wrap(const std::string& text, size_t columns) {
  std::istringstream words(text);
  std::string word;
  std::string wrapped;
  size_t length = 0;  // of the last line
  while (words >> word) {
    const bool fits = length + 1 + word.size() <= columns;
    if (length > 0) wrapped += fits ? ' ' : '\n';
    length = length > 0 && fits ? length + 1 + word.size() : word.size();
    wrapped += word;
  }
  return wrapped;
}

}  // namespace cadre::cli

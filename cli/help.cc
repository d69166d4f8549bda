#include "help.h"

#include <sstream>

namespace cadre::cli {

namespace {

constexpr size_t kPageColumns = 100;
constexpr size_t kNameColumns = 34;

}  // namespace

HelpFormatter::HelpFormatter() { column_width(kNameColumns); }

std::string HelpFormatter::make_option_opts(const CLI::Option* option) const {
  if (option->get_items_expected_max() == 0) return "";  // a flag
  std::string text = " " + option->get_type_name();
  if (!option->get_default_str().empty()) text += " (" + option->get_default_str() + ")";
  if (option->get_required()) text += " (required)";
  return text;
}

std::string HelpFormatter::make_option_desc(const CLI::Option* option) const {
  return wrap(option->get_description(), kPageColumns - kNameColumns);
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

// How --help looks: all text wrapped to a terminal of 80 columns, no internals.
#pragma once

#include <CLI/App.hpp>
#include <CLI/Formatter.hpp>
#include <string>

namespace cadre::cli {

class HelpFormatter : public CLI::Formatter {
 public:
  HelpFormatter();
  std::string make_option_opts(const CLI::Option* option) const override;
  std::string make_option_desc(const CLI::Option* option) const override;
  /// Lines that start with "Example" or a space are command lines and stay whole.
  std::string make_footer(const CLI::App* app) const override;
  std::string make_help(const CLI::App* app, std::string name,
                        CLI::AppFormatMode mode) const override;
};

/// `text` in lines of at most `columns` characters, broken at spaces.
std::string wrap(const std::string& text, size_t columns);

}  // namespace cadre::cli

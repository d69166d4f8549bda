// How --help looks: descriptions wrapped to the page, no internals.
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
};

/// `text` in lines of at most `columns` characters, broken at spaces.
std::string wrap(const std::string& text, size_t columns);

}  // namespace cadre::cli

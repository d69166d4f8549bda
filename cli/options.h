// Options of the command line: those that every subcommand takes, each declared once, and the
// helpers that declare a checked one. A value that can never be right throws InvalidArgument naming
// the option, what it takes and what came.
#pragma once

#include <CLI/App.hpp>
#include <charconv>
#include <cstdint>
#include <limits>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/error.h"
#include "cadre/model.h"
#include "core/str_cat.h"

namespace cadre::cli {

struct CommonOptions {
  std::string model;  // a folder or hub id; empty: the bundled model
  ExpertsImplementation experts;
  LoadOptions load;           // without experts_implementation and progress
  bool device_given = false;  // --device; else main() puts in default_device()
  uint64_t seed = 0;
  bool quiet = false;
  bool json = false;
  bool no_graph = false;  // acts on GPUs
};

/// Who declares --experts: all commands take one backend, benchmarks take several.
enum class ExpertsOption : uint8_t { kCommon, kOwn };

/// Every command takes all of them.
void add_common_options(CLI::App& command, CommonOptions& common,
                        ExpertsOption experts = ExpertsOption::kCommon);

/// Leaves options that do nothing for a command out of its help.
void hide_options(CLI::App& command, const std::vector<std::string>& names);

/// An option or argument of text. An empty text, such as an unset shell variable gives, is refused.
CLI::Option* add_text(CLI::App& command, const std::string& name, std::string& value,
                      const std::string& type_name, const std::string& help);

/// The same, repeatable: `values` gets one text for each time that it is given.
CLI::Option* add_texts(CLI::App& command, const std::string& name, std::vector<std::string>& values,
                       const std::string& type_name, const std::string& help);

/// MODEL as an argument, which may stand in place of --model.
void add_model_argument(CLI::App& command, std::string& model);
/// `common` with that argument as its model. Throws InvalidArgument when both were given.
CommonOptions with_model(CommonOptions common, const std::string& argument);

/// An option that takes one of `choices`; `use` gets the choice.
void add_choice(CLI::App& command, const std::string& name, std::vector<std::string> choices,
                const std::function<void(const std::string&)>& use, const std::string& help);

/// Reads a whole number or a decimal one; the text must hold nothing else.
template <typename T>
T parse_number(std::string_view name, std::string_view text, T min, T max) {
  T value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error == std::errc() && end == text.data() + text.size() && value >= min && value <= max) {
    return value;
  }
  const char* kind = std::numeric_limits<T>::is_integer ? "a whole number" : "a number";
  const std::string range = max == std::numeric_limits<T>::max()
                                ? str_cat(min, " or more")
                                : str_cat("from ", min, " to ", max);
  throw InvalidArgument(str_cat(name, ": expected ", kind, ", ", range, ", got \"", text, "\""));
}

/// An option that takes a number in [min, max]; `value` is the default that the help shows.
template <typename T>
CLI::Option* add_number(CLI::App& command, const std::string& name, T& value, T min, T max,
                        const std::string& help) {
  return command
      .add_option_function<std::string>(
          name,
          [name, &value, min, max](const std::string& text) {
            value = parse_number<T>(name, text, min, max);
          },
          help)
      ->type_name("N")
      ->default_str(str_cat(value));
}

/// An option that takes numbers in [min, max], separated by commas; `values` is the default that
/// the help shows.
void add_numbers(CLI::App& command, const std::string& name, std::vector<int64_t>& values,
                 int64_t min, int64_t max, const std::string& help);

/// --experts of a benchmark: `names` gets the backends named, separated by commas; "all" becomes an
/// empty list.
void add_backends_option(CLI::App& command, std::vector<std::string>& names);

/// "a,b" as {"a", "b"}; always one item at least.
std::vector<std::string> split_list(const std::string& text);

/// `text` is a backend's name or a JSON object of sub-config to name; `source` is the option or
/// variable it came from. Unknown names are refused, with the nearest one.
ExpertsImplementation parse_experts(std::string_view source, std::string_view text);

/// What --experts said, else what $CADRE_EXPERTS_IMPLEMENTATION says, else empty: the model's own
/// choice.
ExpertsImplementation chosen_experts(const CommonOptions& common);

/// Where models run without --device: what $CADRE_DEVICE says, else the first GPU that this build
/// serves, else the CPU.
Device default_device();

/// The named model, else the bundled one. Throws InvalidArgument for a revision of a folder.
std::string model_path(const CommonOptions& common);

/// For from_pretrained and inspect_model.
LoadOptions load_options(const CommonOptions& common);

}  // namespace cadre::cli

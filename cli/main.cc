// The `cadre` command: declares the subcommands, reads the command line, runs one of them and turns
// what it throws into one message and an exit status.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <algorithm>
#include <string>
#include <vector>

#include "cadre/version.h"
#include "commands.h"
#include "exit_codes.h"
#include "help.h"
#include "interrupt.h"
#include "output.h"
#include "suggest.h"

namespace cadre::cli {

namespace {

constexpr const char* kAbout =
    "Runs Mixture-of-Experts language models, the experts on interchangeable backends.";
constexpr const char* kFooter =
    "cadre help COMMAND or cadre COMMAND --help tells its options.\n"
    "Environment: CADRE_DEVICE is what --device defaults to, CADRE_EXPERTS_IMPLEMENTATION what "
    "--experts does; CADRE_CPU_ISA names "
    "the CPU's instruction set (portable, avx2, avx512, avx512_bf16 or amx; default: the best one, "
    "which cadre backends shows); CADRE_ASSETS is the folder of the bundled model.\n"
    "Exit status: 0 done, 2 wrong usage, 3 bad checkpoint or input, 4 not supported here, 5 device "
    "or memory failure, 1 anything else, 130 stopped by Ctrl-C.\n"
    "Example: cadre generate \"In the beginning\" --max-new-tokens 20";

/// The subcommand that the user chose, down to the last word; `app` itself before there is one.
const CLI::App& chosen_command(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? app : chosen_command(*chosen.back());
}

/// "cadre bench experts", or "cadre" before a subcommand is known.
std::string name_of_call(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  if (chosen.empty()) return app.get_name();
  return str_cat(app.get_name(), " ", name_of_call(*chosen.back()));
}

std::vector<std::string> option_names(const CLI::App& command) {
  std::vector<std::string> names;
  for (const CLI::Option* option : command.get_options()) {
    for (const std::string& name : option->get_lnames()) names.push_back("--" + name);
  }
  return names;
}

std::vector<std::string> subcommand_names(const CLI::App& app) {
  std::vector<std::string> names;
  for (const CLI::App* command : app.get_subcommands([](const CLI::App*) { return true; })) {
    names.push_back(command->get_name());
  }
  return names;
}

bool takes_positionals(const CLI::App& command) {
  return !command.get_options([](const CLI::Option* option) { return option->get_positional(); })
              .empty();
}

std::string describe_unknown(const CLI::App& app, const std::string& word) {
  const CLI::App& command = chosen_command(app);
  if (word.starts_with("-")) {
    const std::string name = word.substr(0, word.find('='));
    return str_cat("unknown option ", name, did_you_mean(name, option_names(command)),
                   takes_positionals(command)
                       ? "; an argument that begins with \"-\" goes last, after \"--\""
                       : "");
  }
  const std::vector<std::string> names = subcommand_names(command);
  if (names.empty()) {
    const bool takes_text = command.get_option_no_throw("PROMPT") != nullptr;
    return str_cat("unexpected argument \"", word, "\"",
                   takes_text ? "; put quotes around text of several words" : "");
  }
  return str_cat("unknown command \"", word, "\", expected one of ", join(names),
                 did_you_mean(word, names));
}

/// An option given more often than it may be; null when there is none.
const CLI::Option* repeated_option(const CLI::App& command) {
  for (const CLI::Option* option : command.get_options()) {
    const int most = std::max(1, option->get_items_expected_max());
    if (option->results().size() > static_cast<size_t>(most)) return option;
  }
  return nullptr;
}

/// CLI11's errors in our own words.
std::string describe(const CLI::App& app, const CLI::ParseError& error) {
  const std::string text = error.what();
  const CLI::App& command = chosen_command(app);
  if (dynamic_cast<const CLI::ArgumentMismatch*>(&error) != nullptr) {
    if (const CLI::Option* option = repeated_option(command)) {
      return str_cat(option->get_name(), ": expected once, got it ", option->results().size(),
                     " times; leave out all but one");
    }
    return str_cat(text.substr(0, text.find(':')), ": expected a value after it, got nothing");
  }
  if (const size_t at = text.find(" excludes "); at != text.npos) {
    return str_cat(text.substr(0, at), " and ", text.substr(at + 10),
                   " do not go together; leave out one");
  }
  if (text.starts_with("A subcommand")) {
    return str_cat("expected a subcommand, one of ", join(subcommand_names(command)));
  }
  return text;
}

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> unknown = app.remaining(true);
  const std::string what =
      unknown.empty() ? describe(app, error) : describe_unknown(app, unknown.front());
  const std::string call = name_of_call(app);
  note(str_cat(call, ": ", what, "; see ", call, " --help"), false);
  return kExitUsage;
}

/// Our errors, without a prefix that repeats the command's name.
void report_error(const CLI::App& app, std::string_view what) {
  const std::string call = name_of_call(app);
  const std::string repeated = call.substr(call.rfind(' ') + 1) + ": ";
  if (what.starts_with(repeated)) what.remove_prefix(repeated.size());
  note(str_cat(call, ": ", what), false);
}

/// The command line without the command itself; `help COMMAND` becomes `COMMAND --help`.
std::vector<std::string> arguments_of(int argc, char** argv) {
  std::vector<std::string> arguments(argv + std::min(argc, 1), argv + argc);
  if (!arguments.empty() && arguments.front() == "help") {
    arguments.erase(arguments.begin());
    arguments.push_back("--help");
  }
  return arguments;
}

/// `--option=` would take the next word as its value; it comes from a shell variable that is unset.
void refuse_empty_values(const std::vector<std::string>& arguments) {
  for (const std::string& argument : arguments) {
    if (argument == "--") return;
    if (!argument.starts_with("--") || argument.find('=') + 1 != argument.size()) continue;
    throw InvalidArgument(str_cat(argument.substr(0, argument.size() - 1),
                                  ": expected a value after \"=\", got nothing; is a shell "
                                  "variable unset?"));
  }
}

int run_command_line(CLI::App& app, CommonOptions& common, const Runner& run,
                     std::vector<std::string> arguments) {
  refuse_empty_values(arguments);
  std::reverse(arguments.begin(), arguments.end());  // CLI11 takes a stack
  try {
    app.parse(std::move(arguments));
    if (!common.device_given) common.load.device = default_device();
    return run();
  } catch (const CLI::CallForHelp& help) {
    if (app.get_subcommands().empty() && !app.remaining().empty()) return usage_error(app, help);
    write_stdout(app.help());
    return kExitDone;
  } catch (const CLI::CallForVersion& version) {
    write_stdout(str_cat(version.what(), "\n"));
    return kExitDone;
  } catch (const CLI::ParseError& error) {
    return usage_error(app, error);
  }
}

int run(int argc, char** argv) {
  CommonOptions common;
  Runner run;
  CLI::App app(kAbout, "cadre");
  app.footer(kFooter);
  app.set_version_flag("--version", str_cat("cadre ", version()));
  app.require_subcommand(1);
  app.formatter(std::make_shared<HelpFormatter>());
  add_generate(app, common, run);
  add_chat(app, common, run);
  add_forward(app, common, run);
  add_experts(app, common, run);
  add_backends(app, common, run);
  add_inspect(app, common, run);
  add_eval(app, common, run);
  add_verify(app, common, run);
  add_quantize(app, common, run);
  add_bench(app, common, run);
  try {
    return run_command_line(app, common, run, arguments_of(argc, argv));
  } catch (const std::bad_alloc&) {
    report_error(app, "out of memory; use a smaller model, batch or context");
    return kExitDevice;
  } catch (const std::exception& error) {
    report_error(app, error.what());
    return exit_code_of(error);
  }
}

}  // namespace

}  // namespace cadre::cli

int main(int argc, char** argv) {
  cadre::cli::prepare_signals();
  return cadre::cli::run(argc, argv);
}

// The `cadre` command: declares the subcommands, reads the command line, runs one of them and turns
// what it throws into one message and an exit status.
#include <CLI/App.hpp>
#include <CLI/Config.hpp>
#include <csignal>
#include <string>
#include <vector>

#include "cadre/version.h"
#include "commands.h"
#include "exit_codes.h"
#include "help.h"
#include "output.h"
#include "suggest.h"

namespace cadre::cli {

namespace {

constexpr const char* kAbout =
    "Runs Mixture-of-Experts language models; their experts run on interchangeable backends.";
constexpr const char* kFooter =
    "Exit status: 0 done, 2 wrong usage, 3 bad checkpoint or input, 4 not supported here, 5 device "
    "or\nmemory failure, 1 anything else, 130 stopped by Ctrl-C.\n"
    "Example: cadre generate \"In the beginning\" --max-new-tokens 20";

/// "cadre generate", or "cadre" before a subcommand is known.
std::string name_of_call(const CLI::App& app) {
  const auto chosen = app.get_subcommands();
  return chosen.empty() ? "cadre" : "cadre " + chosen.back()->get_name();
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

std::string describe_unknown(const CLI::App& app, const std::string& word) {
  const auto chosen = app.get_subcommands();
  if (word.starts_with("-")) {
    const CLI::App& command = chosen.empty() ? app : *chosen.back();
    const std::string name = word.substr(0, word.find('='));
    return str_cat("unknown option ", name, did_you_mean(name, option_names(command)));
  }
  if (!chosen.empty()) {
    return str_cat("unexpected argument \"", word, "\"; put quotes around text of several words");
  }
  const std::vector<std::string> names = subcommand_names(app);
  return str_cat("unknown command \"", word, "\", expected one of ", join(names),
                 did_you_mean(word, names));
}

int usage_error(const CLI::App& app, const CLI::ParseError& error) {
  const std::vector<std::string> unknown = app.remaining(true);
  const std::string what = unknown.empty() ? error.what() : describe_unknown(app, unknown.front());
  const std::string call = name_of_call(app);
  note(str_cat(call, ": ", what, "; see ", call, " --help"), false);
  return kExitUsage;
}

int run_command_line(CLI::App& app, const Runner& run, int argc, char** argv) {
  try {
    app.parse(argc, argv);
    return run();
  } catch (const CLI::CallForHelp&) {
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
  add_forward(app, common, run);
  add_experts(app, common, run);
  add_backends(app, common, run);
  add_inspect(app, common, run);
  add_eval(app, common, run);
  try {
    return run_command_line(app, run, argc, argv);
  } catch (const std::bad_alloc&) {
    note(str_cat(name_of_call(app), ": out of memory; use a smaller model, batch or context"),
         false);
    return kExitDevice;
  } catch (const std::exception& error) {
    note(str_cat(name_of_call(app), ": ", error.what()), false);
    return exit_code_of(error);
  }
}

}  // namespace

}  // namespace cadre::cli

int main(int argc, char** argv) {
  // A reader that has seen enough (`cadre generate ... | head`) is no failure; writes report it.
  std::signal(SIGPIPE, SIG_IGN);
  return cadre::cli::run(argc, argv);
}

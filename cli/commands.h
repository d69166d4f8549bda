// The subcommands. Each add_ function declares one: its options, its help and, when it is the one
// that the user chose, what to run.
#pragma once

#include <CLI/App.hpp>
#include <functional>

#include "options.h"

namespace cadre::cli {

/// Runs the chosen subcommand; returns the exit status.
using Runner = std::function<int()>;

void add_generate(CLI::App& app, CommonOptions& common, Runner& run);
void add_chat(CLI::App& app, CommonOptions& common, Runner& run);
void add_forward(CLI::App& app, CommonOptions& common, Runner& run);
void add_experts(CLI::App& app, CommonOptions& common, Runner& run);
void add_backends(CLI::App& app, CommonOptions& common, Runner& run);
void add_inspect(CLI::App& app, CommonOptions& common, Runner& run);
void add_eval(CLI::App& app, CommonOptions& common, Runner& run);
void add_quantize(CLI::App& app, CommonOptions& common, Runner& run);
void add_verify(CLI::App& app, CommonOptions& common, Runner& run);
/// With its own subcommands:
void add_bench(CLI::App& app, CommonOptions& common, Runner& run);
void add_bench_experts(CLI::App& bench, CommonOptions& common, Runner& run);
void add_bench_generate(CLI::App& bench, CommonOptions& common, Runner& run);
void add_bench_ceilings(CLI::App& bench, CommonOptions& common, Runner& run);

}  // namespace cadre::cli

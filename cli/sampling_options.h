// The options of the random draw, which all commands that generate text take.
#pragma once

#include <CLI/App.hpp>
#include <string_view>
#include <vector>

#include "cadre/sampling.h"

namespace cadre::cli {

/// Declares them; they set `sampling`.
std::vector<CLI::Option*> add_sampling_options(CLI::App& command, SamplingOptions& sampling);

/// Says on standard error that cuts of the draw do nothing without a temperature.
void note_idle_cuts(std::string_view command, const SamplingOptions& sampling, bool quiet);

}  // namespace cadre::cli

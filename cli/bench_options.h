// What the benchmarks share.
#pragma once

#include <CLI/App.hpp>
#include <cstddef>
#include <cstdint>
#include <limits>

#include "options.h"

namespace cadre::cli {

struct BenchOptions {
  int64_t repeats = 20;
  int64_t memory_mib = 1024;

  size_t memory_bytes() const { return static_cast<size_t>(memory_mib) << 20; }
};

inline void add_bench_options(CLI::App& command, BenchOptions& options) {
  add_number(command, "--repeats", options.repeats, int64_t{1}, int64_t{1000000},
             "Measurements of each row; their median is reported");
  add_number(command, "--memory", options.memory_mib, int64_t{1}, int64_t{1} << 24,
             "MiB that weights and ceilings are read from in turns: more than the caches hold, so "
             "that both come from memory");
}

}  // namespace cadre::cli

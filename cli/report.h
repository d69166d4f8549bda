// Rows of `cadre bench experts` as one HTML page that needs nothing else: the table, and plots of
// time and share of the limit over tokens.
#pragma once

#include <cstddef>
#include <string>
#include <vector>

#include "cadre/experts.h"
#include "machine.h"
#include "statistics.h"

namespace cadre::cli {

struct ExpertsRow {
  std::string shape;
  ExpertsConfig config;
  int64_t tokens = 0;
  std::string experts;  // the backend
  Device device;
  DType dtype = DType::kF32;
  std::string format;  // of the weights
  ActivationScheme activations = ActivationScheme::kNone;
  bool packed = false;  // experts in packed form
  size_t pages = 0;     // bytes of the pages that weights and read ceiling lie on; 0 on a GPU
  bool graph = false;   // GPU: recorded once and replayed
  std::string routing;
  CallStatistics calls;
  int64_t active_experts = 0;  // median
  double rel_error = 0;
  double bound = 0;
};

std::string report_page(const Machine& machine, const std::vector<ExpertsRow>& rows);

/// `text` with the characters that HTML takes for its own replaced.
std::string escape_html(std::string_view text);

}  // namespace cadre::cli

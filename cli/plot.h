// Lines over a logarithmic x axis, as an SVG element for an HTML page. Colours are the page's CSS
// variables --s0 to --s5.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace cadre::cli {

struct PlotPoint {
  double x = 0;  // positive
  double y = 0;  // positive on a logarithmic axis
};

struct PlotSeries {
  std::string name;
  std::vector<PlotPoint> points;
};

enum class Scale : uint8_t { kLinear, kLog };

struct Plot {
  std::string x_label;
  std::string unit;  // of y
  Scale y_scale = Scale::kLog;
  double min_top = 0;  // a linear axis reaches at least to here
  std::vector<PlotSeries> series;
};

/// Always a whole element, also without points.
std::string to_svg(const Plot& plot);

}  // namespace cadre::cli

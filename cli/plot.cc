#include "plot.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>

#include "core/str_cat.h"
#include "report.h"
#include "table.h"

namespace cadre::cli {

namespace {

constexpr double kWidth = 560, kHeight = 320;
constexpr double kLeft = 56, kRight = 100, kTop = 14, kBottom = 40;
constexpr size_t kNumColours = 6;
constexpr double kLabelDistance = 15;  // between names of lines

/// From a value to a place.
struct Axis {
  Scale scale = Scale::kLog;
  double low = 0;
  double high = 1;
  double from = 0;  // place of low
  double to = 1;    // place of high

  double place(double value) const {
    const double share = scale == Scale::kLog ? std::log(value / low) / std::log(high / low)
                                              : (value - low) / (high - low);
    return from + share * (to - from);
  }
};

struct Range {
  double low = std::numeric_limits<double>::infinity();
  double high = 0;

  void add(double value) {
    low = std::min(low, value);
    high = std::max(high, value);
  }
  bool empty() const { return low > high; }
};

std::string number(double value) { return format_number("%.1f", value); }
std::string tick_text(double value) { return format_number("%.6g", value); }

Axis x_axis(const Plot& plot) {
  Range range;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& point : series.points) range.add(point.x);
  }
  if (range.empty()) range = {1, 10};
  if (range.low == range.high) range = {range.low / 2, range.high * 2};
  return {Scale::kLog, range.low, range.high, kLeft + 8, kWidth - kRight};
}

Axis y_axis(const Plot& plot) {
  Range range;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& point : series.points) range.add(point.y);
  }
  Axis axis{plot.y_scale, 0, 1, kHeight - kBottom, kTop};
  if (plot.y_scale == Scale::kLinear) {
    axis.high = std::max(plot.min_top, range.high * 1.05);
    return axis;
  }
  if (range.empty()) range = {1, 10};
  axis.low = range.low / 1.3;
  axis.high = range.high * 1.3;
  return axis;
}

std::vector<double> ticks_of(const Axis& axis) {
  std::vector<double> ticks;
  if (axis.scale == Scale::kLinear) {
    for (int i = 0; i <= 5; ++i) ticks.push_back(axis.high * i / 5);
    return ticks;
  }
  const double decades = std::log10(axis.high / axis.low);
  const std::vector<double> steps = decades > 3   ? std::vector<double>{1}
                                    : decades > 1 ? std::vector<double>{1, 2, 5}
                                                  : std::vector<double>{1, 1.5, 2, 3, 4, 5, 7};
  for (double decade = std::pow(10, std::floor(std::log10(axis.low))); decade <= axis.high;
       decade *= 10) {
    for (const double step : steps) {
      const double tick = decade * step;
      if (tick >= axis.low && tick <= axis.high) ticks.push_back(tick);
    }
  }
  return ticks;
}

/// The x of all points, without those too near to the one before.
std::vector<double> x_ticks(const Plot& plot, const Axis& axis) {
  std::vector<double> values;
  for (const PlotSeries& series : plot.series) {
    for (const PlotPoint& point : series.points) values.push_back(point.x);
  }
  std::sort(values.begin(), values.end());
  std::vector<double> ticks;
  for (const double value : values) {
    if (ticks.empty() || axis.place(value) - axis.place(ticks.back()) > 28) ticks.push_back(value);
  }
  return ticks;
}

std::string line(const char* kind, double x1, double y1, double x2, double y2) {
  return str_cat("<line class=\"", kind, "\" x1=\"", number(x1), "\" y1=\"", number(y1), "\" x2=\"",
                 number(x2), "\" y2=\"", number(y2), "\"/>\n");
}

std::string text(double x, double y, const char* anchor, const std::string& content) {
  return str_cat("<text x=\"", number(x), "\" y=\"", number(y), "\" text-anchor=\"", anchor, "\">",
                 escape_html(content), "</text>\n");
}

std::string axes(const Plot& plot, const Axis& x, const Axis& y) {
  const double bottom = kHeight - kBottom;
  std::string svg;
  for (const double tick : ticks_of(y)) {
    svg += line("grid", kLeft, y.place(tick), kWidth - kRight, y.place(tick));
    svg += text(kLeft - 6, y.place(tick) + 4, "end", tick_text(tick));
  }
  for (const double tick : x_ticks(plot, x)) {
    svg += line("axis", x.place(tick), bottom, x.place(tick), bottom + 4);
    svg += text(x.place(tick), bottom + 18, "middle", tick_text(tick));
  }
  svg += line("axis", kLeft, bottom, kWidth - kRight, bottom);
  svg += text((kLeft + kWidth - kRight) / 2, kHeight - 6, "middle", plot.x_label);
  svg += text(4, kTop + 4, "start", plot.unit);
  return svg;
}

std::string colour_of(size_t index) { return str_cat("var(--s", index % kNumColours, ")"); }

std::string curve(const PlotSeries& series, size_t index, const std::string& unit, const Axis& x,
                  const Axis& y) {
  std::string points;
  std::string dots;
  for (const PlotPoint& point : series.points) {
    const std::string at_x = number(x.place(point.x));
    const std::string at_y = number(y.place(point.y));
    points += str_cat(points.empty() ? "" : " ", at_x, ",", at_y);
    dots +=
        str_cat("<circle cx=\"", at_x, "\" cy=\"", at_y, "\" r=\"3.5\" fill=\"", colour_of(index),
                "\"><title>", escape_html(series.name), ", ", tick_text(point.x), ": ",
                format_number("%.4g", point.y), " ", escape_html(unit), "</title></circle>\n");
  }
  return str_cat("<polyline class=\"series\" stroke=\"", colour_of(index), "\" points=\"", points,
                 "\"/>\n", dots);
}

/// The lines' names at their right ends, moved apart where they would overlap.
std::string labels(const Plot& plot, const Axis& x, const Axis& y) {
  struct Label {
    double y;
    size_t index;
  };
  std::vector<Label> all;
  for (size_t i = 0; i < plot.series.size(); ++i) {
    const auto& points = plot.series[i].points;
    if (!points.empty()) all.push_back({y.place(points.back().y) + 4, i});
  }
  std::sort(all.begin(), all.end(), [](const Label& a, const Label& b) { return a.y < b.y; });
  std::string svg;
  double lowest = 0;
  for (const Label& label : all) {
    const double at = std::max(label.y, lowest);
    lowest = at + kLabelDistance;
    const PlotSeries& series = plot.series[label.index];
    svg += str_cat("<text class=\"label\" x=\"", number(x.place(series.points.back().x) + 9),
                   "\" y=\"", number(at), "\" style=\"fill: ", colour_of(label.index), "\">",
                   escape_html(series.name), "</text>\n");
  }
  return svg;
}

}  // namespace

std::string to_svg(const Plot& plot) {
  const Axis x = x_axis(plot);
  const Axis y = y_axis(plot);
  std::string svg =
      str_cat("<svg viewBox=\"0 0 ", kWidth, " ", kHeight, "\" role=\"img\">\n", axes(plot, x, y));
  for (size_t i = 0; i < plot.series.size(); ++i) {
    svg += curve(plot.series[i], i, plot.unit, x, y);
  }
  return svg + labels(plot, x, y) + "</svg>\n";
}

}  // namespace cadre::cli

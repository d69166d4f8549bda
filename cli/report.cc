#include "report.h"

#include <algorithm>
#include <cmath>

#include "cadre/version.h"
#include "core/str_cat.h"
#include "paged_memory.h"
#include "plot.h"
#include "table.h"

namespace cadre::cli {

namespace {

constexpr const char* kHead = R"(<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>cadre bench experts</title>
<style>
:root { color-scheme: light dark; --page: #ffffff; --text: #1c2024; --muted: #5f6b76;
  --line: #d9dee3; --s0: #1f6fd1; --s1: #c2410c; --s2: #15803d; --s3: #7c3aed; --s4: #b0127b;
  --s5: #0e7490; }
@media (prefers-color-scheme: dark) { :root { --page: #14171a; --text: #e6e9ec; --muted: #9aa5b1;
  --line: #343b42; --s0: #6cb0ff; --s1: #ff9a5c; --s2: #5fd08a; --s3: #b794ff; --s4: #ff7ac6;
  --s5: #4fd1e0; } }
body { margin: 0 auto; padding: 1.5rem; max-width: 76rem; background: var(--page);
  color: var(--text); font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.4rem; margin: 0; } h2 { font-size: 1.1rem; margin: 2rem 0 .5rem; }
p { margin: .3rem 0; color: var(--muted); }
.plots { display: flex; flex-wrap: wrap; gap: 1rem; }
.plots figure { flex: 1 1 30rem; margin: 0; } figcaption { font-weight: 600; }
svg { width: 100%; height: auto; } svg text { fill: var(--muted); font: 12px system-ui, sans-serif; }
svg .label { font-weight: 600; } .grid { stroke: var(--line); } .axis { stroke: var(--muted); }
.series { fill: none; stroke-width: 2; }
.table { overflow-x: auto; }
table { border-collapse: collapse; margin-top: .5rem; font-variant-numeric: tabular-nums; }
th, td { padding: .2rem .5rem; font-size: .9rem; text-align: right; border-bottom: 1px solid var(--line);
  white-space: nowrap; } th { color: var(--muted); font-weight: 600; }
th:nth-child(2), td:nth-child(2) { text-align: left; }
</style>
</head>
<body>
)";

/// Rows that one pair of plots shows.
bool belong_together(const ExpertsRow& a, const ExpertsRow& b) {
  return a.shape == b.shape && a.dtype == b.dtype && a.format == b.format && a.packed == b.packed &&
         a.pages == b.pages && a.routing == b.routing && a.device == b.device;
}

std::vector<std::vector<ExpertsRow>> groups_of(const std::vector<ExpertsRow>& rows) {
  std::vector<std::vector<ExpertsRow>> groups;
  for (const ExpertsRow& row : rows) {
    const auto group = std::find_if(groups.begin(), groups.end(), [&](const auto& known) {
      return belong_together(known.front(), row);
    });
    if (group == groups.end()) {
      groups.push_back({row});
    } else {
      group->push_back(row);
    }
  }
  return groups;
}

/// A line for each backend; `value` is empty where there is no point.
template <typename Value>
std::vector<PlotSeries> series_of(const std::vector<ExpertsRow>& rows, const Value& value) {
  std::vector<PlotSeries> all;
  for (const ExpertsRow& row : rows) {
    auto series = std::find_if(all.begin(), all.end(),
                               [&](const PlotSeries& known) { return known.name == row.experts; });
    if (series == all.end()) series = all.insert(all.end(), {row.experts, {}});
    if (const std::optional<double> y = value(row)) {
      series->points.push_back({static_cast<double>(row.tokens), *y});
    }
  }
  return all;
}

std::string figure(const std::string& caption, const Plot& plot) {
  return str_cat("<figure><figcaption>", escape_html(caption), "</figcaption>\n", to_svg(plot),
                 "</figure>\n");
}

std::string plots_of(const std::vector<ExpertsRow>& rows) {
  Plot time{"tokens", "ms", Scale::kLog, 0, {}};
  time.series = series_of(rows, [](const ExpertsRow& row) {
    return std::optional<double>(row.calls.median_seconds * 1e3);
  });
  Plot share{"tokens", "%", Scale::kLinear, 100, {}};
  share.series = series_of(rows, [](const ExpertsRow& row) { return row.calls.percent_of_limit; });
  return str_cat("<div class=\"plots\">\n", figure("Time of one forward", time),
                 figure("Share of the limit", share), "</div>\n");
}

std::string cells_of(const std::vector<std::string>& cells, const char* tag) {
  std::string line = "<tr>";
  for (const std::string& cell : cells) {
    line += str_cat("<", tag, ">", escape_html(cell), "</", tag, ">");
  }
  return line + "</tr>\n";
}

std::string table_of(const std::vector<ExpertsRow>& rows) {
  std::string text = "<div class=\"table\"><table>\n";
  text += cells_of({"tokens", "experts", "us, median", "us, MAD", "TFLOP/s", "GB/s", "% of limit",
                    "active", "rel. error", "calls", "dropped", "read GB/s", "peak TFLOP/s"},
                   "th");
  for (const ExpertsRow& row : rows) {
    const CallStatistics& calls = row.calls;
    text += cells_of(
        {str_cat(row.tokens), row.experts, format_number("%.1f", calls.median_seconds * 1e6),
         format_number("%.1f", calls.deviation_seconds * 1e6),
         format_number("%.3f", calls.flops / 1e12),
         format_number("%.1f", calls.bytes_per_second / 1e9),
         format_number("%.1f", calls.percent_of_limit), str_cat(row.active_experts),
         format_number("%.1e", row.rel_error), str_cat(calls.num_calls), str_cat(calls.num_dropped),
         format_number("%.1f", calls.ceilings.bytes_per_second / 1e9),
         format_number("%.3f", calls.ceilings.flops / 1e12)},
        "td");
  }
  return text + "</table></div>\n";
}

std::string section_of(const std::vector<ExpertsRow>& rows) {
  const ExpertsRow& first = rows.front();
  const ExpertsConfig& c = first.config;
  return str_cat("<h2>", escape_html(first.shape), "</h2>\n<p>", c.num_experts, " experts, ",
                 c.top_k, " per token, hidden size ", c.hidden_size, ", intermediate size ",
                 c.intermediate_size, "; weights ", first.format, first.packed ? ", packed" : "",
                 first.pages > 0 ? str_cat(", on pages of ", name_of_pages(first.pages)) : "",
                 ", computing in ", first.dtype, ", routing ", first.routing, ", on ", first.device,
                 "</p>\n", plots_of(rows), table_of(rows));
}

}  // namespace

std::string escape_html(std::string_view text) {
  std::string escaped;
  for (const char c : text) {
    if (c == '&') {
      escaped += "&amp;";
    } else if (c == '<') {
      escaped += "&lt;";
    } else if (c == '>') {
      escaped += "&gt;";
    } else if (c == '"') {
      escaped += "&quot;";
    } else {
      escaped += c;
    }
  }
  return escaped;
}

std::string report_page(const Machine& machine, const std::vector<ExpertsRow>& rows) {
  std::string page = kHead;
  page += str_cat("<h1>cadre bench experts</h1>\n<p>", escape_html(to_string(machine)), "</p>\n");
  page +=
      "<p>The limit is the longer of two times: reading the weights of the experts that were hit, "
      "and the products, each at the ceiling measured before and after the call; reading is "
      "measured "
      "on pages of the size that the weights lie on. Calls between "
      "two ceilings that differ by more than 5 % are dropped.</p>\n";
  for (const std::vector<ExpertsRow>& group : groups_of(rows)) page += section_of(group);
  return page + "</body>\n</html>\n";
}

}  // namespace cadre::cli

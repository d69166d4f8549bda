#include "statistics.h"

#include <algorithm>
#include <cmath>

#include "core/check.h"

namespace cadre::cli {

namespace {

bool is_steady(const TimedCall& call) {
  const double before = limit_seconds(call.work, call.before);
  const double after = limit_seconds(call.work, call.after);
  return std::abs(before - after) <= kMaxCeilingDrift * std::min(before, after);
}

double percent_of_limit(const TimedCall& call) {
  const double limit =
      (limit_seconds(call.work, call.before) + limit_seconds(call.work, call.after)) / 2;
  return 100 * limit / call.seconds;
}

/// The median of what `value` says of each call.
template <typename Value>
double median_of(const std::vector<TimedCall>& calls, const Value& value) {
  std::vector<double> values;
  for (const TimedCall& call : calls) values.push_back(value(call));
  return median(std::move(values));
}

}  // namespace

double median(std::vector<double> values) {
  CADRE_ASSERT(!values.empty());
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  if (values.size() % 2 == 1) return values[middle];
  return (values[middle - 1] + values[middle]) / 2;
}

double median_deviation(const std::vector<double>& values) {
  const double middle = median(values);
  std::vector<double> deviations;
  for (const double value : values) deviations.push_back(std::abs(value - middle));
  return median(std::move(deviations));
}

double limit_seconds(const Work& work, const CeilingSample& ceilings) {
  return std::max(work.bytes / ceilings.bytes_per_second, work.flops / ceilings.flops);
}

CallStatistics summarize(const std::vector<TimedCall>& calls) {
  std::vector<TimedCall> kept;
  for (const TimedCall& call : calls) {
    if (is_steady(call)) kept.push_back(call);
  }
  CallStatistics result;
  result.num_calls = static_cast<int64_t>(calls.size());
  result.num_dropped = result.num_calls - static_cast<int64_t>(kept.size());
  if (!kept.empty()) result.percent_of_limit = median_of(kept, percent_of_limit);
  const std::vector<TimedCall>& used = kept.empty() ? calls : kept;
  std::vector<double> seconds;
  for (const TimedCall& call : used) seconds.push_back(call.seconds);
  result.deviation_seconds = median_deviation(seconds);
  result.median_seconds = median(std::move(seconds));
  result.bytes_per_second =
      median_of(used, [](const TimedCall& c) { return c.work.bytes / c.seconds; });
  result.flops = median_of(used, [](const TimedCall& c) { return c.work.flops / c.seconds; });
  result.ceilings.bytes_per_second = median_of(used, [](const TimedCall& c) {
    return (c.before.bytes_per_second + c.after.bytes_per_second) / 2;
  });
  result.ceilings.flops =
      median_of(used, [](const TimedCall& c) { return (c.before.flops + c.after.flops) / 2; });
  return result;
}

}  // namespace cadre::cli

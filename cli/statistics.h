// What many measurements of one thing say together.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

namespace cadre::cli {

/// The middle value, or the mean of the two in the middle. At least one value.
double median(std::vector<double> values);
/// The median distance from the median.
double median_deviation(const std::vector<double>& values);

/// What a device reached at one moment.
struct CeilingSample {
  double bytes_per_second = 0;
  double flops = 0;  // per second
};

/// What one call had to do at least.
struct Work {
  double bytes = 0;
  double flops = 0;
};

/// Seconds that the work takes at the ceilings: the slower of reading and multiplying.
double limit_seconds(const Work& work, const CeilingSample& ceilings);

/// A time between two looks at the ceilings.
struct TimedCall {
  double seconds = 0;
  Work work;
  CeilingSample before;
  CeilingSample after;
};

/// Calls whose two limits differ by more than this say nothing: the machine changed meanwhile.
inline constexpr double kMaxCeilingDrift = 0.05;

struct CallStatistics {
  double median_seconds = 0;
  double deviation_seconds = 0;            // median_deviation
  double bytes_per_second = 0;             // median
  double flops = 0;                        // per second, median
  std::optional<double> percent_of_limit;  // median over the calls kept; empty when none was
  CeilingSample ceilings;                  // medians
  int64_t num_calls = 0;
  int64_t num_dropped = 0;
};

/// Over the calls that are kept, or over all when none is. At least one call.
CallStatistics summarize(const std::vector<TimedCall>& calls);

}  // namespace cadre::cli

#include "statistics.h"

#include <gtest/gtest.h>

namespace cadre::cli {
namespace {

/// A call of `seconds` that reads 100 bytes between two read ceilings.
TimedCall reading(double seconds, double before, double after) {
  return {seconds, {100, 1}, {before, 1e9}, {after, 1e9}};
}

TEST(Statistics, MedianAndItsDeviation) {
  EXPECT_EQ(median({3}), 3);
  EXPECT_EQ(median({9, 1, 5}), 5);
  EXPECT_EQ(median({9, 1, 5, 7}), 6);
  EXPECT_EQ(median_deviation({1, 1, 2, 2, 4, 6, 9}), 1);  // the textbook's example
}

TEST(Statistics, TheLimitIsTheSlowerOfReadingAndMultiplying) {
  EXPECT_EQ(limit_seconds({100, 50}, {10, 100}), 10);
  EXPECT_EQ(limit_seconds({100, 5000}, {10, 100}), 50);
}

TEST(Statistics, TheShareIsTheMedianOfTheCallsOwnShares) {
  // Limits 10, 5 and 10 s: 50 %, 25 % and 40 %, while medians over medians would give 50 %.
  const CallStatistics result =
      summarize({reading(20, 10, 10), reading(20, 20, 20), reading(25, 10, 10)});
  EXPECT_DOUBLE_EQ(result.percent_of_limit.value(), 40);
  EXPECT_EQ(result.median_seconds, 20);
  EXPECT_EQ(result.deviation_seconds, 0);
  EXPECT_EQ(result.bytes_per_second, 5);
  EXPECT_EQ(result.ceilings.bytes_per_second, 10);
  EXPECT_EQ(result.num_calls, 3);
  EXPECT_EQ(result.num_dropped, 0);
}

TEST(Statistics, CallsBetweenUnequalCeilingsAreDroppedAndCounted) {
  const CallStatistics result =
      summarize({reading(20, 10, 10.4), reading(1, 10, 10.6), reading(1, 10.6, 10)});
  EXPECT_EQ(result.num_calls, 3);
  EXPECT_EQ(result.num_dropped, 2);
  EXPECT_EQ(result.median_seconds, 20);
  EXPECT_NEAR(result.percent_of_limit.value(), 49, 0.1);  // (10 + 9.615) / 2 of 20 s
}

TEST(Statistics, ACeilingThatDoesNotBindMayMove) {
  const TimedCall call{20, {100, 1}, {10, 1e6}, {10, 1e9}};
  EXPECT_EQ(summarize({call}).num_dropped, 0);
}

TEST(Statistics, WithoutASteadyCallThereAreTimesButNoShare) {
  const CallStatistics result = summarize({reading(20, 10, 20), reading(30, 20, 10)});
  EXPECT_EQ(result.num_dropped, 2);
  EXPECT_FALSE(result.percent_of_limit);
  EXPECT_EQ(result.median_seconds, 25);
}

}  // namespace
}  // namespace cadre::cli

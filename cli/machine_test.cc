#include "machine.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <regex>
#include <string>
#include <vector>

#include "cadre/thread_pool.h"
#include "dense/dense_ops.h"

namespace cadre::cli {
namespace {

TEST(Machine, TheCommitIsOneOrUnknown) {
  EXPECT_TRUE(std::regex_match(build_commit(), std::regex("[0-9a-f]{12,40}(-dirty)?|unknown")))
      << build_commit();
}

TEST(Machine, RowsSayWhatTheyWereMeasuredOn) {
  const Machine machine = describe_machine(DeviceType::kCpu, 3);
  Json row = Json::object();
  add_machine(row, machine);
  EXPECT_EQ(row["commit"], build_commit());
  EXPECT_EQ(row["threads"], 3);
  EXPECT_EQ(row["isa"], dense_ops(DeviceType::kCpu).instruction_set());
  EXPECT_EQ(row["cpu"], ceilings_of(DeviceType::kCpu).processor());
  const std::string line = to_string(machine);
  for (const std::string& part :
       {machine.commit, machine.processor, machine.instruction_set, std::string("3 threads")}) {
    EXPECT_NE(line.find(part), std::string::npos) << part;
  }
  EXPECT_TRUE(to_string(Machine{"c", "p", "i", 1}).ends_with(", 1 thread"));
}

TEST(Machine, TheMeterSamplesAgainAndAgain) {
  ThreadPool pool(2);
  // Less and more than it reads in one go; not a multiple of that.
  for (const size_t mib : {size_t{1}, size_t{300}}) {
    CeilingMeter meter(DType::kF32, mib << 20, small_page_bytes(), Stream::cpu(pool));
    EXPECT_EQ(meter.page_bytes(), small_page_bytes());
    for (int i = 0; i < 4; ++i) {
      const CeilingSample sample = meter.sample();
      EXPECT_GT(sample.bytes_per_second, 0);
      EXPECT_GT(sample.flops, 0);
    }
  }
}

TEST(Machine, TheMeterNamesTheWayInWhichItReads) {
  ThreadPool pool(1);
  const CeilingMeter meter(DType::kF32, 1 << 20, small_page_bytes(), Stream::cpu(pool));
  const std::vector<std::string> ways = ceilings_of(DeviceType::kCpu).ways_of_reading();
  EXPECT_NE(std::find(ways.begin(), ways.end(), meter.way_of_reading()), ways.end())
      << meter.way_of_reading();
}

}  // namespace
}  // namespace cadre::cli

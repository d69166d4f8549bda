#include "models/host_memory.h"

#include <gtest/gtest.h>
#include <sys/sysinfo.h>

namespace cadre {
namespace {

TEST(HostMemory, IsPositiveAndAtMostTheMachines) {
  struct sysinfo info {};
  ASSERT_EQ(sysinfo(&info), 0);
  const auto available = available_host_memory();
  ASSERT_TRUE(available.has_value());
  EXPECT_GT(*available, 0u);
  EXPECT_LE(*available, static_cast<size_t>(info.totalram) * info.mem_unit);
}

}  // namespace
}  // namespace cadre

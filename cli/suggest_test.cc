#include "suggest.h"

#include <gtest/gtest.h>

#include <vector>

namespace cadre::cli {
namespace {

const std::vector<std::string> kNames = {"eager", "batched_mm", "grouped_mm"};

TEST(Suggest, FindsTheNearestNameForATypo) {
  EXPECT_EQ(nearest_name("groupedmm", kNames), "grouped_mm");
  EXPECT_EQ(nearest_name("batchde_mm", kNames), "batched_mm");
  EXPECT_EQ(nearest_name("eagre", kNames), "eager");
  EXPECT_EQ(did_you_mean("eagre", kNames), "; did you mean eager?");
}

TEST(Suggest, SaysNothingWhenNoneIsNear) {
  EXPECT_EQ(nearest_name("flashinfer", kNames), "");
  EXPECT_EQ(nearest_name("", kNames), "");
  EXPECT_EQ(nearest_name(std::string(100000, 'e'), kNames), "");
  EXPECT_EQ(did_you_mean("flashinfer", kNames), "");
}

}  // namespace
}  // namespace cadre::cli

#include "exit_codes.h"

#include <gtest/gtest.h>

namespace cadre::cli {
namespace {

TEST(ExitCodes, EveryFamilyOfErrorsHasItsOwn) {
  EXPECT_EQ(exit_code_of(Error("")), 1);
  EXPECT_EQ(exit_code_of(std::logic_error("")), 1);
  EXPECT_EQ(exit_code_of(InvalidArgument("")), 2);
  EXPECT_EQ(exit_code_of(CheckpointError("")), 3);
  EXPECT_EQ(exit_code_of(Unsupported("")), 4);
  EXPECT_EQ(exit_code_of(DeviceError("")), 5);
  EXPECT_EQ(exit_code_of(CommunicationError("")), 5);
  EXPECT_EQ(exit_code_of(std::bad_alloc()), 5);
}

}  // namespace
}  // namespace cadre::cli

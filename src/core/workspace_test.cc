#include "cadre/workspace.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <stdexcept>
#include <string>

#include "cadre/error.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

TEST(Workspace, BlocksAreAlignedAndApart) {
  Workspace workspace({}, 1024);
  char* a = workspace.allocate<char>(1);
  char* b = workspace.allocate<char>(257);
  char* c = workspace.allocate<char>(256);
  for (const char* block : {a, b, c})
    EXPECT_EQ(reinterpret_cast<uintptr_t>(block) % Workspace::kAlignment, 0u);
  EXPECT_EQ(b - a, 256);
  EXPECT_EQ(c - b, 512);
  EXPECT_EQ(workspace.used(), 1024u);
  std::memset(a, 1, 1024);  // all of it is ours
}

TEST(Workspace, PaddedRoundsUpToTheAlignment) {
  EXPECT_EQ(Workspace::padded(0), 0u);
  EXPECT_EQ(Workspace::padded(1), 256u);
  EXPECT_EQ(Workspace::padded(256), 256u);
  EXPECT_EQ(Workspace::padded(257), 512u);
}

TEST(Workspace, WhatWasReservedCanBeTaken) {
  Workspace workspace;
  for (const size_t bytes : {size_t{1}, size_t{100}, size_t{256}, size_t{1000}}) {
    workspace.reserve(bytes);
    EXPECT_GE(workspace.capacity(), bytes);
    const Workspace::Scope scope(workspace);
    EXPECT_NO_THROW(workspace.allocate(bytes));
  }
}

TEST(Workspace, ReserveNeverShrinks) {
  Workspace workspace({}, 4096);
  workspace.reserve(16);
  EXPECT_EQ(workspace.capacity(), 4096u);
}

TEST(Workspace, AScopeGivesBackWhatWasTakenInside) {
  Workspace workspace({}, 1024);
  workspace.allocate(256);
  void* inner = nullptr;
  {
    const Workspace::Scope scope(workspace);
    inner = workspace.allocate(512);
    EXPECT_EQ(workspace.used(), 768u);
  }
  EXPECT_EQ(workspace.used(), 256u);
  EXPECT_EQ(workspace.allocate(512), inner);
}

TEST(Workspace, AskingForTooMuchNamesTheThreeNumbers) {
  Workspace workspace({}, 1024);
  workspace.allocate(256);
  try {
    workspace.allocate(1000);
    FAIL();
  } catch (const std::logic_error& error) {
    const std::string message = error.what();
    EXPECT_NE(message.find("1000 bytes"), message.npos) << message;
    EXPECT_NE(message.find("768 of 1024 left"), message.npos) << message;
  }
  EXPECT_EQ(workspace.used(), 256u);
}

TEST(Workspace, CountsThatOverflowAreRefused) {
  Workspace workspace({}, 1024);
  EXPECT_THROW(workspace.allocate(SIZE_MAX), std::logic_error);
  EXPECT_THROW(workspace.allocate<float>(-1), std::logic_error);
  EXPECT_THROW(workspace.allocate<double>((int64_t{1} << 61) + 1), std::logic_error);
}

TEST(Workspace, AReserveThatFailsLeavesAnEmptyWorkspace) {
  Workspace workspace({}, 1024);
  for (const size_t bytes : {SIZE_MAX, SIZE_MAX - 200, size_t{1} << 60}) {
    test::expect_error<DeviceError>([&] { workspace.reserve(bytes); },
                                    {"workspace", "cpu memory", " bytes"});
    EXPECT_EQ(workspace.capacity(), 0u);
  }
  EXPECT_THROW(workspace.allocate(1), std::logic_error);
  workspace.reserve(512);
  EXPECT_NE(workspace.allocate(512), nullptr);
}

TEST(Workspace, ReserveWhileInUseIsAnInternalError) {
  Workspace workspace({}, 256);
  workspace.allocate(1);
  EXPECT_THROW(workspace.reserve(4096), std::logic_error);
}

TEST(Workspace, KnowsItsDevice) {
  EXPECT_EQ(Workspace().device(), Device());
  constexpr Device kNotThere = {DeviceType::kCuda, 1000};
  EXPECT_EQ(Workspace(kNotThere).device(), kNotThere);  // memory is taken when it is asked for
  EXPECT_THROW(Workspace(kNotThere, 64), Error);
}

}  // namespace
}  // namespace cadre

#include "progress.h"

#include <gtest/gtest.h>

namespace cadre::cli {
namespace {

// A terminal that keeps what is written, and a clock that the test turns.
struct FakeTerminal {
  std::string written;
  double now = 100;

  ProgressTerminal terminal(bool enabled = true, bool colour = false, int columns = 80) {
    ProgressTerminal terminal;
    terminal.enabled = enabled;
    terminal.colour = colour;
    terminal.columns = columns;
    terminal.write = [this](std::string_view text) { written += text; };
    terminal.seconds = [this] { return now; };
    return terminal;
  }
};

TEST(Progress, StepsUnderASecondShowNothing) {
  FakeTerminal fake;
  Progress progress(fake.terminal());
  for (int i = 1; i <= 9; ++i) {
    fake.now += 0.1;
    progress.update("reading", i, 9);
  }
  progress.clear();
  EXPECT_EQ(fake.written, "");
}

TEST(Progress, ALongStepShowsBarPercentRateAndTimeToGo) {
  FakeTerminal fake;
  Progress progress(fake.terminal(), "tokens");
  fake.now += 2;
  progress.update("evaluating", 500, 2000);
  EXPECT_EQ(fake.written,
            "\r\x1b[Kevaluating [######------------------]  25%  250 tokens/s  ETA 0:06");
  fake.written.clear();
  fake.now += 1;
  progress.update("evaluating", 2000, 2000);
  EXPECT_EQ(fake.written, "\r\x1b[K");
}

TEST(Progress, RedrawsAtMostTenTimesASecond) {
  FakeTerminal fake;
  Progress progress(fake.terminal());
  fake.now += 2;
  progress.update("x", 1, 100);
  fake.written.clear();
  fake.now += 0.05;
  progress.update("x", 2, 100);
  EXPECT_EQ(fake.written, "");
  fake.now += 0.06;
  progress.update("x", 3, 100);
  EXPECT_NE(fake.written, "");
}

TEST(Progress, AnotherStepStartsItsOwnClock) {
  FakeTerminal fake;
  Progress progress(fake.terminal());
  fake.now += 2;
  progress.update("first", 1, 2);
  fake.written.clear();
  progress.update("second", 1, 2);
  EXPECT_EQ(fake.written, "\r\x1b[K");  // the first one's bar goes, the second is new
  fake.now += 1;
  progress.update("second", 1, 2);
  EXPECT_NE(fake.written.find("second"), std::string::npos);
}

TEST(Progress, BytesAreForPeopleAndHoursHaveTheirField) {
  FakeTerminal fake;
  Progress progress(fake.terminal(), "bytes");
  fake.now += 2;
  progress.update("reading", int64_t{2} << 20, int64_t{20} << 30);
  EXPECT_NE(fake.written.find("1.00 MiB/s"), std::string::npos) << fake.written;
  EXPECT_NE(fake.written.find("ETA 5:41:18"), std::string::npos) << fake.written;
}

TEST(Progress, NoProgressYetHasNoTimeToGo) {
  FakeTerminal fake;
  Progress progress(fake.terminal());
  fake.now += 2;
  progress.update("reading", 0, 10);
  EXPECT_NE(fake.written.find("ETA -"), std::string::npos) << fake.written;
}

TEST(Progress, ColourOnlyWhenAskedFor) {
  FakeTerminal fake;
  {
    Progress progress(fake.terminal(true, true));
    fake.now += 2;
    progress.update("x", 1, 2);
  }
  EXPECT_NE(fake.written.find("\x1b[36m"), std::string::npos);
  EXPECT_TRUE(fake.written.ends_with("\r\x1b[K"));  // wiped at the end
}

TEST(Progress, NeverWiderThanTheTerminal) {
  FakeTerminal fake;
  Progress progress(fake.terminal(true, false, 30));
  fake.now += 2;
  progress.update("reading the weights of a model", 1, 2);
  EXPECT_EQ(fake.written.size(), std::string("\r\x1b[K").size() + 29);
}

TEST(Progress, NothingWhenNotOnATerminal) {
  FakeTerminal fake;
  Progress progress(fake.terminal(false));
  fake.now += 5;
  progress.callback()("x", 1, 2);
  EXPECT_EQ(fake.written, "");
}

}  // namespace
}  // namespace cadre::cli

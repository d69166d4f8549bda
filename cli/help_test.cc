#include "help.h"

#include <gtest/gtest.h>

namespace cadre::cli {
namespace {

TEST(Help, WrapBreaksAtSpacesAndKeepsLongWordsWhole) {
  EXPECT_EQ(wrap("", 10), "");
  EXPECT_EQ(wrap("one two three", 7), "one two\nthree");
  EXPECT_EQ(wrap("a incomprehensibilities b", 6), "a\nincomprehensibilities\nb");
  EXPECT_EQ(wrap("exactly ten", 11), "exactly ten");
}

TEST(Help, ShowsTypeAndDefaultButNoExclusions) {
  CLI::App app;
  HelpFormatter formatter;
  std::string a;
  std::string b;
  CLI::Option* first = app.add_option("--first", a, "words")->type_name("N")->default_str("3");
  CLI::Option* second = app.add_option("--second", b, "words")->type_name("FILE")->required();
  first->excludes(second);
  EXPECT_EQ(formatter.make_option_opts(first), " N (3)");
  EXPECT_EQ(formatter.make_option_opts(second), " FILE (required)");
  EXPECT_EQ(formatter.make_option_opts(app.add_flag("--flag")), "");
}

}  // namespace
}  // namespace cadre::cli

#include "help.h"

#include <gtest/gtest.h>

#include <sstream>

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
  std::string c;
  EXPECT_EQ(formatter.make_option_opts(app.add_option("WORD", c)->type_name("TEXT")), "");
}

TEST(Help, FitsEightyColumnsWithoutDoubleEmptyLinesAndKeepsExamplesWhole) {
  CLI::App app("What it does", "it");
  app.formatter(std::make_shared<HelpFormatter>());
  const std::string example = "Example: it " + std::string(90, 'x') + " and more";
  app.footer(
      "words words words words words words words words words words words words words words "
      "words\n" +
      example);
  std::string value;
  app.add_option("--first", value, "long description long description long description long");
  app.add_option("--second", value)->group("Other");
  const std::string help = app.help();
  EXPECT_EQ(help.find("\n\n\n"), help.npos) << help;
  EXPECT_NE(help.find(example), help.npos) << help;
  std::istringstream lines(help);
  for (std::string line; std::getline(lines, line);) {
    if (line != example) {
      EXPECT_LE(line.size(), 80u) << line;
    }
  }
}

}  // namespace
}  // namespace cadre::cli

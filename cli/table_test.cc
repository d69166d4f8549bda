#include "table.h"

#include <gtest/gtest.h>

namespace cadre::cli {
namespace {

TEST(Table, AlignsColumnsAndLeavesNoSpacesAtLineEnds) {
  Table table({"name", "bytes", "why"});
  table.right_align(1);
  table.add_row({"a", "12", ""});
  table.add_row({"longer", "1,234", "so"});
  EXPECT_EQ(table.to_string(),
            "name    bytes  why\n"
            "a          12\n"
            "longer  1,234  so\n");
}

TEST(Table, WithoutAHeaderStartsWithTheFirstRow) {
  Table table({});
  table.add_row({"k", "v"});
  EXPECT_EQ(table.to_string(), "k  v\n");
}

TEST(Table, WithThousandsGroupsDigits) {
  EXPECT_EQ(with_thousands(0), "0");
  EXPECT_EQ(with_thousands(999), "999");
  EXPECT_EQ(with_thousands(1000), "1,000");
  EXPECT_EQ(with_thousands(1234567), "1,234,567");
}

TEST(Table, FormatNumberMarksWhatIsEmpty) {
  EXPECT_EQ(format_number("%.1f ms", 2.25), "2.2 ms");
  EXPECT_EQ(format_number("%.1f", std::nullopt), "-");
}

}  // namespace
}  // namespace cadre::cli

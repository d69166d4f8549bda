#include "support/temp_dir.h"

#include <gtest/gtest.h>

namespace cadre::test {
namespace {

TEST(TempDir, IsThereAndGoesAwayWithItsContent) {
  std::filesystem::path path;
  {
    const TempDir dir;
    path = dir.path();
    EXPECT_TRUE(std::filesystem::is_directory(path));
    const auto file = dir.write("a/b.txt", "hello");
    EXPECT_EQ(file, dir / "a/b.txt");
    EXPECT_EQ(std::filesystem::file_size(file), 5u);
  }
  EXPECT_FALSE(std::filesystem::exists(path));
}

TEST(TempDir, TwoDiffer) {
  const TempDir a;
  const TempDir b;
  EXPECT_NE(a.path(), b.path());
}

}  // namespace
}  // namespace cadre::test

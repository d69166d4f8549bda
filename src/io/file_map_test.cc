#include "io/file_map.h"

#include <gtest/gtest.h>

#include <cerrno>
#include <string>

#include "cadre/error.h"
#include "io/file_writer.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using test::expect_error;
using test::TempDir;

TEST(FileMap, HoldsTheWholeFileAlsoWhenItIsDeleted) {
  const TempDir dir;
  const auto path = dir.write("f", "hello");
  const auto map = FileMap::open(path);
  std::filesystem::remove(path);
  const auto bytes = map->bytes();
  EXPECT_EQ(std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()), "hello");
  EXPECT_EQ(map->path(), path);
}

TEST(FileMap, RefusesWhatIsNoFileWithContent) {
  const TempDir dir;
  expect_error<CheckpointError>([&] { FileMap::open(dir / "none"); }, {"none", "No such file"});
  expect_error<CheckpointError>([&] { FileMap::open(dir.path()); }, {"a folder"});
  expect_error<CheckpointError>([&] { FileMap::open(dir.write("e", "")); }, {"empty"});
}

TEST(FileWriter, WithoutCommitNothingHappened) {
  const TempDir dir;
  {
    FileWriter writer(dir / "f", 3);
    writer.write(std::as_bytes(std::span("abc", 3)));
    EXPECT_FALSE(std::filesystem::exists(dir / "f"));
  }
  EXPECT_TRUE(std::filesystem::is_empty(dir.path()));
}

TEST(FileWriter, CommitMakesTheFileAppearWhole) {
  const TempDir dir;
  FileWriter writer(dir / "f", 6);
  writer.write(std::as_bytes(std::span("abc", 3)));
  writer.write(std::as_bytes(std::span("def", 3)));
  writer.commit();
  EXPECT_EQ(std::filesystem::file_size(dir / "f"), 6u);
}

TEST(FileHandle, ErrnoTextIsTheSystems) {
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device");
}

}  // namespace
}  // namespace cadre

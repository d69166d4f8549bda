#include "io/file_map.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <fstream>
#include <iterator>
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

// Bytes of the mapping that begins at `data` which lie in this process's memory.
size_t resident_bytes(const void* data) {
  std::ifstream maps("/proc/self/smaps");
  bool found = false;
  for (std::string line; std::getline(maps, line);) {
    unsigned long long begin = 0, end = 0, kib = 0;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      found = begin == reinterpret_cast<uintptr_t>(data);
    } else if (found && std::sscanf(line.c_str(), "Rss: %llu kB", &kib) == 1) {
      return static_cast<size_t>(kib) << 10;
    }
  }
  return 0;
}

TEST(FileMap, ReleasesThePagesAroundAPartAndKeepsTheBytes) {
  constexpr size_t kGroup = size_t{64} << 10;
  const TempDir dir;
  std::string content(10 * kGroup + 5000, 'x');
  content.back() = 'y';
  const auto map = FileMap::open(dir.write("f", content));
  const auto bytes = map->bytes();
  const auto touch_all = [&] {
    return std::string(reinterpret_cast<const char*>(bytes.data()), bytes.size()) == content;
  };
  ASSERT_TRUE(touch_all());
  ASSERT_GE(resident_bytes(bytes.data()), bytes.size());
  map->release(bytes.subspan(kGroup - 1, kGroup + 2));  // the first three groups
  EXPECT_LE(resident_bytes(bytes.data()), bytes.size() + 4096 - 3 * kGroup);
  EXPECT_GE(resident_bytes(bytes.data()), bytes.size() - 3 * kGroup);
  map->release(bytes);
  EXPECT_EQ(resident_bytes(bytes.data()), 0u);
  EXPECT_TRUE(touch_all());
  map->release(bytes.last(1));
  EXPECT_TRUE(touch_all());
}

TEST(FileMap, RefusesWhatIsNoFileWithContent) {
  const TempDir dir;
  expect_error<CheckpointError>([&] { FileMap::open(dir / "none"); }, {"none", "No such file"});
  expect_error<CheckpointError>([&] { FileMap::open(dir.path()); }, {"a folder"});
  expect_error<CheckpointError>([&] { FileMap::open(dir.write("e", "")); }, {"empty"});
}

// Bytes of address space in use.
rlim_t address_space() {
  std::ifstream in("/proc/self/statm");
  rlim_t pages = 0;
  in >> pages;
  return pages * static_cast<rlim_t>(sysconf(_SC_PAGESIZE));
}

TEST(FileMap, TooLittleAddressSpaceIsAFailureOfTheDevice) {
  const TempDir dir;
  const auto path = dir.write("f", "x");
  std::filesystem::resize_file(path, uintmax_t{1} << 32);  // sparse
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  const rlimit small{address_space() + (rlim_t{256} << 20), before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &small), 0);
  expect_error<DeviceError>([&] { FileMap::open(path); },
                            {path.string(), "4.00 GiB", "Cannot allocate memory", "ulimit -v"});
  setrlimit(RLIMIT_AS, &before);
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

// What the writer says; root may write everywhere, so some are asked as nobody, in a child process.
class FileWriterPlaces : public testing::Test {
 protected:
  static std::string write_error(const std::filesystem::path& path) {
    try {
      FileWriter writer(path, 3);
      writer.write(std::as_bytes(std::span("abc", 3)));
      writer.commit();
    } catch (const Error& error) {
      return error.what();
    }
    return "written";
  }
  static std::string write_as_nobody(const std::filesystem::path& path) {
    int ends[2];
    if (pipe(ends) != 0) return "no pipe";
    const pid_t child = fork();
    if (child == 0) {
      const bool is_plain = geteuid() != 0 || (setgid(65534) == 0 && setuid(65534) == 0);
      const std::string text = is_plain ? write_error(path) : "no other user";
      _exit(::write(ends[1], text.data(), text.size()) < 0 ? 1 : 0);
    }
    ::close(ends[1]);
    std::string text(4096, '\0');
    const ssize_t count = ::read(ends[0], text.data(), text.size());
    text.resize(count < 0 ? 0 : static_cast<size_t>(count));
    ::close(ends[0]);
    waitpid(child, nullptr, 0);
    return text;
  }
  static std::string content(const std::filesystem::path& path) {
    std::ifstream in(path);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  TempDir dir_;
};

TEST_F(FileWriterPlaces, AWriteProtectedFileIsNotReplaced) {
  const auto file = dir_.write("f", "keep");
  ASSERT_EQ(chmod(dir_.path().c_str(), 0777), 0);
  ASSERT_EQ(chmod(file.c_str(), 0444), 0);
  const std::string message = write_as_nobody(file);
  for (const char* part : {"cannot write", "Permission denied", "where you may write"})
    EXPECT_NE(message.find(part), message.npos) << message;
  EXPECT_EQ(content(file), "keep");
}

TEST_F(FileWriterPlaces, AWritableFileInAProtectedFolderNamesTheFolderAsTheReason) {
  const auto file = dir_.write("folder/f", "keep");
  ASSERT_EQ(chmod(dir_.path().c_str(), 0777), 0);
  ASSERT_EQ(chmod(file.c_str(), 0666), 0);
  ASSERT_EQ(chmod((dir_ / "folder").c_str(), 0555), 0);
  const std::string message = write_as_nobody(file);
  for (const char* part : {"Permission denied", "its folder must be writable"})
    EXPECT_NE(message.find(part), message.npos) << message;
  EXPECT_EQ(content(file), "keep");
  ASSERT_EQ(chmod((dir_ / "folder").c_str(), 0755), 0);
}

TEST_F(FileWriterPlaces, ALinkToNothingIsWrittenThrough) {
  std::filesystem::create_directory(dir_ / "to");
  std::filesystem::create_symlink("second", dir_ / "first");
  std::filesystem::create_symlink("to/file", dir_ / "second");
  EXPECT_EQ(write_error(dir_ / "first"), "written");
  EXPECT_EQ(content(dir_ / "to/file"), "abc");
  EXPECT_TRUE(std::filesystem::is_symlink(dir_ / "first"));
  EXPECT_TRUE(std::filesystem::is_symlink(dir_ / "second"));
}

TEST_F(FileWriterPlaces, ALinkIntoNoFolderNamesItsTarget) {
  std::filesystem::create_symlink("/nonexistent/dir/f", dir_ / "link");
  const std::string message = write_error(dir_ / "link");
  for (const char* part : {"a link to /nonexistent/dir/f", "No such file", "make the folder"})
    EXPECT_NE(message.find(part), message.npos) << message;
  EXPECT_TRUE(std::filesystem::is_symlink(dir_ / "link"));
}

TEST_F(FileWriterPlaces, ALinkToItselfIsRefused) {
  std::filesystem::create_symlink("link", dir_ / "link");
  EXPECT_NE(write_error(dir_ / "link").find("symbolic links"), std::string::npos);
  EXPECT_TRUE(std::filesystem::is_symlink(dir_ / "link"));
}

TEST(FileHandle, ErrnoTextIsTheSystems) {
  EXPECT_EQ(errno_text(ENOSPC), "No space left on device");
}

}  // namespace
}  // namespace cadre

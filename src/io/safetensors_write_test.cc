#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <map>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "cadre/error.h"
#include "io/safetensors.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using test::expect_error;
using test::TempDir;

std::string read_file(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

size_t files_in(const std::filesystem::path& folder) {
  return static_cast<size_t>(std::distance(std::filesystem::directory_iterator(folder), {}));
}

struct Sample {
  std::vector<std::vector<std::byte>> data;
  std::vector<NamedTensor> tensors;

  void add(const std::string& name, DType dtype, const Dims& shape, std::mt19937& random) {
    auto& bytes = data.emplace_back(static_cast<size_t>(num_elements(shape)) * size_of(dtype));
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    tensors.push_back({name, TensorView(bytes.data(), dtype, shape)});
  }
};

void expect_same(const SafetensorsFile& file, const Sample& sample) {
  ASSERT_EQ(file.header().entries.size(), sample.tensors.size());
  for (size_t i = 0; i < sample.tensors.size(); ++i) {
    const TensorView view = file.tensor(sample.tensors[i].name);
    EXPECT_EQ(view.dtype(), sample.tensors[i].tensor.dtype());
    EXPECT_EQ(view.shape(), sample.tensors[i].tensor.shape());
    ASSERT_EQ(view.nbytes(), sample.data[i].size());
    EXPECT_TRUE(std::equal(sample.data[i].begin(), sample.data[i].end(),
                           static_cast<const std::byte*>(view.data())));
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data()) % size_of(view.dtype()), 0u);
  }
}

TEST(WriteSafetensors, WhatIsWrittenIsReadBack) {
  const TempDir dir;
  std::mt19937 random(11);
  for (int round = 0; round < 200; ++round) {
    Sample sample;
    const auto count = random() % 6;
    for (size_t i = 0; i < count; ++i) {
      std::vector<int64_t> dims(random() % (kMaxRank + 1));
      for (int64_t& dim : dims) dim = random() % 4;
      sample.add("layer \"" + std::to_string(i) + "\"\n\xc3\xa4",
                 static_cast<DType>(random() % kNumDTypes), Dims(std::span<const int64_t>(dims)),
                 random);
    }
    const std::map<std::string, std::string> metadata = {{"format", "pt"}, {"\"odd\"", "\n"}};
    const auto path = dir / "round.safetensors";
    write_safetensors(path, sample.tensors, round % 2 == 0 ? metadata : decltype(metadata)());
    const SafetensorsFile file = SafetensorsFile::open(path);
    expect_same(file, sample);
    EXPECT_EQ(file.header().metadata.size(), round % 2 == 0 ? 2u : 0u);
  }
  EXPECT_EQ(files_in(dir.path()), 1u);
}

TEST(WriteSafetensors, TheBytesAreThoseOfTheFormat) {
  const TempDir dir;
  const uint16_t value = 0x0201;
  const NamedTensor named = {"t", TensorView(&value, DType::kU16, {1})};
  write_safetensors(dir / "a", std::span(&named, 1));
  const std::string header = "{\"t\":{\"dtype\":\"U16\",\"shape\":[1],\"data_offsets\":[0,2]}}";
  EXPECT_EQ(read_file(dir / "a"), std::string("\x38\0\0\0\0\0\0\0", 8) +
                                      (header + std::string(56 - header.size(), ' ') + "\x01\x02"));
}

TEST(WriteSafetensors, ReplacesAFileAndKeepsItsPermissionsAndLinks) {
  const TempDir dir;
  const auto path = dir.write("real", "old");
  ASSERT_EQ(chmod(path.c_str(), 0640), 0);
  std::filesystem::create_symlink("real", dir / "link");
  write_safetensors(dir / "link", {});
  EXPECT_TRUE(std::filesystem::is_symlink(dir / "link"));
  EXPECT_TRUE(SafetensorsFile::open(path).header().entries.empty());
  EXPECT_EQ(std::filesystem::status(path).permissions(), std::filesystem::perms(0640));
}

TEST(SafetensorsWriter, WritesTensorByTensorWhatWriteSafetensorsDoes) {
  const TempDir dir;
  const float wide[6] = {1, 2, 3, 4, 5, 6};
  const uint8_t narrow[3] = {7, 8, 9};
  const NamedTensor tensors[] = {{"wide", {wide, DType::kF32, {2, 3}}},
                                 {"narrow", {narrow, DType::kU8, {3}}}};
  write_safetensors(dir / "whole", tensors, {{"format", "pt"}});
  SafetensorsWriter writer(dir / "parts",
                           {{"wide", DType::kF32, {2, 3}}, {"narrow", DType::kU8, {3}}},
                           {{"format", "pt"}});
  for (const NamedTensor& named : tensors) writer.write(named.name, named.tensor);
  EXPECT_FALSE(std::filesystem::exists(dir / "parts"));
  writer.commit();
  EXPECT_EQ(read_file(dir / "parts"), read_file(dir / "whole"));
}

TEST(SafetensorsWriter, RefusesAnotherTensorThanAnnounced) {
  const TempDir dir;
  const float data[6] = {};
  SafetensorsWriter writer(dir / "a", {{"t", DType::kF32, {2, 3}}});
  const TensorView view(data, DType::kF32, {2, 3});
  expect_error<InvalidArgument>([&] { writer.write("u", view); }, {"expected t", "got u"});
  expect_error<InvalidArgument>(
      [&] {
        writer.write("t", {data, DType::kF32, {3, 2}});
      },
      {"[2, 3]", "[3, 2]"});
  expect_error<InvalidArgument>([&] { writer.commit(); }, {"expected 1 tensors", "got 0"});
  writer.write("t", view);
  expect_error<InvalidArgument>([&] { writer.write("t", view); }, {"no more tensors"});
}

TEST(WriteSafetensors, TensorsThatCannotBeStored) {
  const TempDir dir;
  const float data[6] = {};
  const auto write = [&](std::vector<NamedTensor> tensors) {
    write_safetensors(dir / "a", tensors);
  };
  const TensorView view(data, DType::kF32, {2, 3});
  expect_error<InvalidArgument>([&] { write({{"t", view}, {"t", view}}); }, {"\"t\"", "got two"});
  expect_error<InvalidArgument>([&] { write({{"__metadata__", view}}); }, {"reserved"});
  expect_error<InvalidArgument>([&] { write({{"\xff", view}}); }, {"UTF-8"});
  expect_error<InvalidArgument>([&] { write({{"t", TensorView()}}); }, {"\"t\"", "got none"});
  expect_error<InvalidArgument>(
      [&] {
        write({{"t", TensorView(data, DType::kF32, {3, 2}, Dims{1, 3})}});
      },
      {"contiguous", "t: float32 [3, 2]", "[1, 3]"});
  expect_error<InvalidArgument>(
      [&] {
        write({{"t", TensorView(data, DType::kF32, {6}, {DeviceType::kCuda, 0})}});
      },
      {"cuda:0"});
  EXPECT_EQ(files_in(dir.path()), 0u);
}

TEST(WriteSafetensors, PlacesThatDoNotExistOrAreFolders) {
  const TempDir dir;
  expect_error<Error>([&] { write_safetensors(dir / "no" / "a", {}); },
                      {"no/a", "No such file", "make the folder"});
  expect_error<Error>([&] { write_safetensors(dir.path(), {}); },
                      {"Is a directory", "name of a file"});
  const auto file = dir.write("file", "x");
  expect_error<Error>([&] { write_safetensors(file / "a", {}); }, {"Not a directory"});
}

TEST(WriteSafetensors, AFullDiskNamesPathBytesReasonAndWhatToDo) {
  const std::vector<std::byte> data(1000);
  const NamedTensor named = {"t", TensorView(data.data(), DType::kU8, {1000})};
  expect_error<Error>([&] { write_safetensors("/dev/full", std::span(&named, 1)); },
                      {"/dev/full", "No space left", " bytes", "free space"});
}

TEST(WriteSafetensors, AFailureOnTheWayLeavesTheOldFileAndNoTemporary) {
  const TempDir dir;
  const auto path = dir.write("a", "old");
  const std::vector<std::byte> data(100'000);
  const NamedTensor named = {"t", TensorView(data.data(), DType::kU8, {100'000})};
  rlimit before{};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const auto handler = std::signal(SIGXFSZ, SIG_IGN);
  const rlimit small{50'000, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  expect_error<Error>([&] { write_safetensors(path, std::span(&named, 1)); },
                      {"File too large", "50000 of 1000", "ulimit -f"});
  setrlimit(RLIMIT_FSIZE, &before);
  std::signal(SIGXFSZ, handler);
  EXPECT_EQ(read_file(path), "old");
  EXPECT_EQ(files_in(dir.path()), 1u);
}

TEST(WriteSafetensors, APipeIsWrittenToDirectly) {
  const TempDir dir;
  ASSERT_EQ(mkfifo((dir / "pipe").c_str(), 0600), 0);
  std::string received;
  std::thread reader([&] { received = read_file(dir / "pipe"); });
  write_safetensors(dir / "pipe", {}, {{"k", "v"}});
  reader.join();
  EXPECT_EQ(parse_safetensors(std::as_bytes(std::span(received)), "pipe").metadata.at("k"), "v");
  EXPECT_EQ(files_in(dir.path()), 1u);
}

TEST(WriteSafetensors, AnOpenFileIsWrittenToThroughItsDescriptorName) {
  const TempDir dir;
  const auto path = dir.write("out", "");
  const int fd = ::open(path.c_str(), O_RDWR);
  write_safetensors("/dev/fd/" + std::to_string(fd), {});
  struct stat by_path {};
  struct stat by_fd {};
  EXPECT_EQ(stat(path.c_str(), &by_path), 0);
  EXPECT_EQ(fstat(fd, &by_fd), 0);
  EXPECT_EQ(by_path.st_ino, by_fd.st_ino);  // not replaced under the holder
  EXPECT_GT(by_fd.st_size, 8);
  ::close(fd);
}

}  // namespace
}  // namespace cadre

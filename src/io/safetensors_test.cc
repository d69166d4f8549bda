// Each fault that a header can have is made by hand here, one at a time.
#include "io/safetensors.h"

#include <gtest/gtest.h>

#include <filesystem>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "cadre/error.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using test::expect_error;
using test::TempDir;

std::string with_length(uint64_t length, const std::string& rest) {
  std::string file;
  for (int i = 0; i < 8; ++i) file += static_cast<char>(length >> (8 * i) & 0xff);
  return file + rest;
}

std::string make_file(const std::string& header, size_t data_bytes) {
  return with_length(header.size(), header + std::string(data_bytes, '\x01'));
}

SafetensorsHeader parse(const std::string& file) {
  return parse_safetensors(std::as_bytes(std::span(file)), "some.safetensors");
}

void expect_refused(const std::string& file, std::initializer_list<std::string> parts) {
  expect_error<CheckpointError>([&] { parse(file); }, parts);
}

std::string tensor(const std::string& name, const std::string& dtype, const std::string& shape,
                   const std::string& offsets) {
  return "\"" + name + "\":{\"dtype\":\"" + dtype + "\",\"shape\":" + shape +
         ",\"data_offsets\":" + offsets + "}";
}

TEST(ParseSafetensors, ReadsTensorsInFileOrderAndMetadata) {
  const std::string header = "{\"__metadata__\":{\"format\":\"pt\"}," +
                             tensor("a", "F32", "[2,3]", "[8,32]") + "," +
                             tensor("z", "I64", "[]", "[0,8]") + "}  ";
  const SafetensorsHeader parsed = parse(make_file(header, 32));
  ASSERT_EQ(parsed.entries.size(), 2u);
  EXPECT_EQ(parsed.entries[0].name, "z");
  EXPECT_EQ(parsed.entries[0].dtype, DType::kI64);
  EXPECT_EQ(parsed.entries[0].shape, Dims());
  EXPECT_EQ(parsed.entries[0].offset, 8 + header.size());
  EXPECT_EQ(parsed.entries[0].bytes, 8u);
  EXPECT_EQ(parsed.entries[1].name, "a");
  EXPECT_EQ(parsed.entries[1].shape, (Dims{2, 3}));
  EXPECT_EQ(parsed.entries[1].offset, 8 + header.size() + 8);
  EXPECT_EQ(parsed.metadata.at("format"), "pt");
}

TEST(ParseSafetensors, AFileWithoutTensorsIsFine) {
  EXPECT_TRUE(parse(make_file("{}", 0)).entries.empty());
}

TEST(ParseSafetensors, EveryDtypeIsRead) {
  for (int i = 0; i < kNumDTypes; ++i) {
    const auto dtype = static_cast<DType>(i);
    const size_t bytes = 3 * size_of(dtype);
    const std::string file = make_file("{" +
                                           tensor("t", std::string(safetensors_name(dtype)), "[3]",
                                                  "[0," + std::to_string(bytes) + "]") +
                                           "}",
                                       bytes);
    EXPECT_EQ(parse(file).entries.at(0).dtype, dtype);
  }
}

TEST(ParseSafetensors, EmptyTensorsMayLieAnywhereBetweenOthers) {
  const SafetensorsHeader parsed = parse(make_file(
      "{" + tensor("b", "F32", "[1]", "[0,4]") + "," + tensor("empty", "F32", "[0,5]", "[0,0]") +
          "," + tensor("a", "F32", "[3,0]", "[4,4]") + "," + tensor("c", "U8", "[1]", "[4,5]") +
          "}",
      5));
  EXPECT_EQ(parsed.entries.size(), 4u);
}

TEST(ParseSafetensors, UnknownKeysOfATensorAreIgnoredAsTheReferenceDoes) {
  EXPECT_NO_THROW(parse(
      make_file("{\"t\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1],\"extra\":1}}", 1)));
}

TEST(ParseSafetensors, ShorterThanTheLengthField) {
  expect_refused("", {"some.safetensors", "8 bytes", "got 0 bytes"});
  expect_refused("1234567", {"8 bytes", "got 7 bytes"});
}

TEST(ParseSafetensors, HeaderLongerThanTheFile) {
  expect_refused(with_length(3, "{}"), {"header length of at most 2", "got 3"});
  expect_refused(with_length(UINT64_MAX, "{}"), {"at most 2", "got 18446744073709551615"});
}

TEST(ParseSafetensors, HeaderAboveTheFormatsLimit) {
  const std::string file = with_length(100'000'001, "{}" + std::string(100'000'000, ' '));
  expect_refused(file, {"at most 100000000", "got 100000001"});
}

TEST(ParseSafetensors, HeaderThatIsNoJsonObject) {
  expect_refused(with_length(0, ""), {"does not start with '{'"});
  expect_refused(make_file(" {}", 0), {"does not start with '{'"});
  expect_refused(make_file("[]", 0), {"does not start with '{'"});
  expect_refused(make_file("{\"a\":", 0), {"malformed JSON"});
  expect_refused(make_file(std::string("{}\0\0", 4), 0), {"NUL"});
}

TEST(ParseSafetensors, TheSameNameTwice) {
  expect_refused(make_file("{" + tensor("t", "U8", "[1]", "[0,1]") + "," +
                               tensor("t", "U8", "[1]", "[1,2]") + "}",
                           2),
                 {"\"t\" occurs twice"});
}

TEST(ParseSafetensors, DtypesThatAreNotKnownAreNamed) {
  for (const char* dtype : {"F4", "F6_E2M3", "float32", "C64", ""}) {
    expect_refused(make_file("{" + tensor("t", dtype, "[2]", "[0,1]") + "}", 1),
                   {"tensor \"t\"", "dtype \"" + std::string(dtype) + "\"", "F32, F16, BF16"});
  }
}

TEST(ParseSafetensors, KeysThatAreMissingOrOfTheWrongType) {
  expect_refused(make_file("{\"t\":3}", 0), {"tensor \"t\"", "expected an object", "number"});
  expect_refused(make_file("{\"t\":{\"shape\":[],\"data_offsets\":[0,1]}}", 1), {"\"dtype\""});
  expect_refused(make_file("{\"t\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1), {"\"shape\""});
  expect_refused(make_file("{\"t\":{\"dtype\":\"U8\",\"shape\":[]}}", 1), {"\"data_offsets\""});
  expect_refused(make_file("{\"t\":{\"dtype\":1,\"shape\":[],\"data_offsets\":[0,1]}}", 1),
                 {"dtype", "number"});
  expect_refused(make_file("{" + tensor("t", "U8", "{}", "[0,1]") + "}", 1), {"shape", "object"});
  for (const char* offsets : {"[]", "[0]", "[0,1,1]", "1", "{}"})
    expect_refused(make_file("{" + tensor("t", "U8", "[1]", offsets) + "}", 1), {"data_offsets"});
}

TEST(ParseSafetensors, NumbersThatAreNegativeFractionalOrTooLarge) {
  for (const char* bad : {"-1", "1.0", "9223372036854775808", "1e3", "true", "\"1\""}) {
    const std::string number = bad;
    expect_refused(make_file("{" + tensor("t", "U8", "[" + number + "]", "[0,1]") + "}", 1),
                   {"tensor \"t\"", "shape", "integers from 0"});
    expect_refused(make_file("{" + tensor("t", "U8", "[1]", "[" + number + ",1]") + "}", 1),
                   {"data_offsets", "integers from 0"});
    expect_refused(make_file("{" + tensor("t", "U8", "[1]", "[0," + number + "]") + "}", 1),
                   {"data_offsets", "integers from 0"});
  }
}

TEST(ParseSafetensors, ShapesThatOverflow) {
  for (const char* shape : {"[4294967296,4294967296]", "[9223372036854775807,2]",
                            "[4294967296,4294967296,0]", "[0,4294967296,4294967296]"}) {
    expect_refused(make_file("{" + tensor("t", "U8", shape, "[0,0]") + "}", 0),
                   {"tensor \"t\"", "overflows"});
  }
  expect_refused(make_file("{" + tensor("t", "F64", "[2305843009213693952]", "[0,0]") + "}", 0),
                 {"overflows"});
}

TEST(ParseSafetensors, TooManyDimensions) {
  expect_refused(make_file("{" + tensor("t", "U8", "[1,1,1,1,1,1,1]", "[0,1]") + "}", 1),
                 {"at most 6 dimensions", "got 7"});
}

TEST(ParseSafetensors, ShapeAndBytesDisagree) {
  expect_refused(make_file("{" + tensor("t", "F32", "[2,3]", "[0,23]") + "}", 23),
                 {"tensor \"t\"", "F32 [2, 3] needs 24 bytes", "give 23"});
  expect_refused(make_file("{" + tensor("t", "F32", "[0]", "[0,4]") + "}", 4), {"needs 0 bytes"});
}

TEST(ParseSafetensors, OffsetsBackwardsOrOutsideTheFile) {
  expect_refused(make_file("{" + tensor("t", "U8", "[1]", "[1,0]") + "}", 1),
                 {"begin <= end <= 1", "got [1, 0]"});
  expect_refused(make_file("{" + tensor("t", "U8", "[2]", "[0,2]") + "}", 1),
                 {"begin <= end <= 1", "got [0, 2]"});
}

TEST(ParseSafetensors, ATruncatedFileIsRefusedAtEveryLength) {
  const std::string whole = make_file("{" + tensor("t", "F32", "[2]", "[0,8]") + "}", 8);
  EXPECT_NO_THROW(parse(whole));
  for (size_t length = 0; length < whole.size(); ++length)
    expect_refused(whole.substr(0, length), {"some.safetensors"});
}

TEST(ParseSafetensors, Overlaps) {
  expect_refused(make_file("{" + tensor("a", "U8", "[4]", "[0,4]") + "," +
                               tensor("b", "U8", "[4]", "[2,6]") + "}",
                           6),
                 {"tensor \"b\"", "overlaps tensor \"a\""});
  expect_refused(make_file("{" + tensor("a", "U8", "[4]", "[0,4]") + "," +
                               tensor("b", "U8", "[4]", "[0,4]") + "}",
                           4),
                 {"overlaps"});
  expect_refused(make_file("{" + tensor("a", "U8", "[4]", "[0,4]") + "," +
                               tensor("b", "U8", "[0]", "[2,2]") + "}",
                           4),
                 {"tensor \"b\"", "overlaps"});
}

TEST(ParseSafetensors, Holes) {
  expect_refused(make_file("{" + tensor("a", "U8", "[1]", "[0,1]") + "," +
                               tensor("b", "U8", "[1]", "[2,3]") + "}",
                           3),
                 {"tensor \"b\"", "start at data byte 1", "got 2"});
  expect_refused(make_file("{" + tensor("a", "U8", "[1]", "[1,2]") + "}", 2),
                 {"tensor \"a\"", "start at data byte 0"});
}

TEST(ParseSafetensors, BytesAfterTheLastTensor) {
  expect_refused(make_file("{" + tensor("a", "U8", "[1]", "[0,1]") + "}", 3),
                 {"expected 1 bytes of data", "got 3"});
  expect_refused(make_file("{}", 1), {"expected 0 bytes of data", "got 1"});
}

TEST(ParseSafetensors, MetadataMustMapTextsToTexts) {
  expect_refused(make_file("{\"__metadata__\":[]}", 0), {"__metadata__", "array"});
  expect_refused(make_file("{\"__metadata__\":{\"k\":1}}", 0), {"__metadata__", "\"k\"", "number"});
}

TEST(ParseSafetensors, NamesInMessagesCannotControlTheTerminal) {
  expect_refused(make_file("{" + tensor("a\\u001b[2J", "F4", "[1]", "[0,1]") + "}", 1),
                 {"\\x1b[2J"});
}

TEST(ParseSafetensors, RandomDamageNeverPassesUnnoticedAsAnythingButAnError) {
  const std::string whole = make_file(
      "{" + tensor("a", "F32", "[2]", "[0,8]") + "," + tensor("b", "BF16", "[1,2]", "[8,12]") + "}",
      12);
  std::mt19937 random(7);
  for (int i = 0; i < 20'000; ++i) {
    std::string damaged = whole;
    for (auto n = 1 + random() % 3; n > 0; --n)
      damaged[random() % damaged.size()] = static_cast<char>(random());
    try {
      for (const SafetensorsEntry& entry : parse(damaged).entries) {
        ASSERT_LE(entry.offset + entry.bytes, damaged.size());
        ASSERT_EQ(static_cast<size_t>(num_elements(entry.shape)) * size_of(entry.dtype),
                  entry.bytes);
      }
    } catch (const CheckpointError&) {
    }
  }
}

TEST(SafetensorsFile, OpensAFixtureAndFindsItsTensors) {
  const auto path = std::filesystem::path(CADRE_TEST_DATA) / "experts" / "plain.safetensors";
  const SafetensorsFile file = SafetensorsFile::open(path);
  EXPECT_EQ(file.path(), path);
  EXPECT_EQ(file.file_bytes(), std::filesystem::file_size(path));
  ASSERT_NE(file.find("hidden_states"), nullptr);
  EXPECT_EQ(file.find("nothing"), nullptr);
  const TensorView view = file.tensor("hidden_states");
  EXPECT_EQ(view.rank(), 2);
  EXPECT_EQ(view.data(), file.view(*file.find("hidden_states")).data());
}

TEST(SafetensorsFile, TheOwnerKeepsTheViewsAlive) {
  const TempDir dir;
  const auto path =
      dir.write("a.safetensors", make_file("{" + tensor("t", "U8", "[4]", "[0,4]") + "}", 4));
  TensorView view;
  std::shared_ptr<const void> owner;
  {
    const SafetensorsFile file = SafetensorsFile::open(path);
    view = file.tensor("t");
    owner = file.owner();
  }
  EXPECT_EQ(view.as<uint8_t>()[3], 1);
}

TEST(SafetensorsFile, AMissingTensorListsThoseThereAre) {
  const TempDir dir;
  const auto path =
      dir.write("a.safetensors", make_file("{" + tensor("one", "U8", "[1]", "[0,1]") + "}", 1));
  const SafetensorsFile file = SafetensorsFile::open(path);
  expect_error<CheckpointError>([&] { file.tensor("two"); },
                                {"a.safetensors", "\"two\"", "\"one\""});
}

TEST(SafetensorsFile, FilesThatCannotBeMapped) {
  const TempDir dir;
  expect_error<CheckpointError>([&] { SafetensorsFile::open(dir / "none"); },
                                {"none", "No such file"});
  expect_error<CheckpointError>([&] { SafetensorsFile::open(dir.path()); }, {"a folder"});
  expect_error<CheckpointError>([&] { SafetensorsFile::open(dir.write("empty", "")); },
                                {"empty", "the file is empty"});
  expect_error<CheckpointError>([&] { SafetensorsFile::open("/dev/null"); }, {"a device or pipe"});
}

}  // namespace
}  // namespace cadre

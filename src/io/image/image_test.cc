#include "cadre/image.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>

#include "cadre/error.h"
#include "io/image/decoders.h"
#include "io/safetensors.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

using test::expect_error;

const std::filesystem::path kFolder = std::filesystem::path(CADRE_TEST_DATA) / "images";

std::string read_file(const std::string& name) {
  std::ifstream file(kFolder / name, std::ios::binary);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

Image decode(const std::string& content) {
  return decode_image(std::as_bytes(std::span(content)), "test");
}

bool can_read(std::string_view format) {
  for (const ImageDecoder& decoder : compiled_image_decoders()) {
    if (decoder.format == format) return decoder.decode != nullptr;
  }
  return false;
}

std::string_view format_of(const std::string& name) {
  if (name.ends_with(".jpg")) return "JPEG";
  return name.ends_with(".png") ? "PNG" : "WebP";
}

// Every file of the folder: what Transformers' load_image makes of it.
TEST(Image, FilesOfAllKindsBecomeWhatLoadImageGives) {
  const auto expected = SafetensorsFile::open(kFolder / "decoded.safetensors");
  ASSERT_GE(expected.header().entries.size(), 35u);
  for (const SafetensorsEntry& entry : expected.header().entries) {
    SCOPED_TRACE(entry.name);
    if (!can_read(format_of(entry.name))) continue;
    const Image image = load_image(kFolder / entry.name);
    ASSERT_EQ((Dims{image.height, image.width, 3}), entry.shape);
    const TensorView pixels = expected.view(entry);
    int largest = 0;
    for (size_t i = 0; i < image.rgb.size(); ++i) {
      largest = std::max(largest, std::abs(image.rgb[i] - pixels.as<uint8_t>()[i]));
    }
    EXPECT_EQ(largest, 0);
  }
}

// Cut anywhere, a file is an error or, where only trailing metadata is lost, still an image.
TEST(Image, FilesCutShortAreErrors) {
  for (const char* name : {"420.jpg", "progressive.jpg", "cmyk.jpg", "rgb.png", "palette.png",
                           "gray_16.png", "lossy.webp", "lossless.webp", "animated.webp"}) {
    SCOPED_TRACE(name);
    if (!can_read(format_of(name))) continue;
    const std::string whole = read_file(name);
    for (size_t size = 12; size < whole.size() * 9 / 10; size += 7) {
      EXPECT_THROW(decode(whole.substr(0, size)), CheckpointError) << size << " bytes";
    }
  }
}

TEST(Image, DamageNeverDoesMoreThanThrow) {
  for (const char* name : {"420.jpg", "palette.png", "alpha.webp", "orientation_6.jpg"}) {
    if (!can_read(format_of(name))) continue;
    const std::string whole = read_file(name);
    for (size_t i = 0; i < whole.size(); ++i) {
      std::string damaged = whole;
      damaged[i] = static_cast<char>(damaged[i] ^ 0x5a);
      try {
        const Image image = decode_image(std::as_bytes(std::span(damaged)), name, 1 << 16);
        EXPECT_EQ(image.rgb.size(), static_cast<size_t>(3 * image.height * image.width));
      } catch (const CheckpointError&) {
      }
    }
  }
}

uint32_t crc32(std::string_view bytes) {
  uint32_t crc = 0xffffffff;
  for (const char byte : bytes) {
    crc ^= static_cast<uint8_t>(byte);
    for (int i = 0; i < 8; ++i) crc = crc >> 1 ^ ((crc & 1) != 0 ? 0xedb88320 : 0);
  }
  return ~crc;
}

void put_big_endian(std::string& bytes, size_t at, uint32_t value) {
  for (size_t i = 0; i < 4; ++i) bytes[at + i] = static_cast<char>(value >> (24 - 8 * i));
}

TEST(Image, TooManyPixelsAreRefusedBeforeMemoryIsTaken) {
  if (!can_read("PNG")) GTEST_SKIP() << "this build reads no PNG";
  std::string png = read_file("rgb.png");
  expect_error<CheckpointError>(
      [&] { decode_image(std::as_bytes(std::span(png)), "big.png", 17 * 11 - 1); },
      {"big.png", "186 pixels", "17 x 11"});
  put_big_endian(png, 16, 60000);
  put_big_endian(png, 20, 60000);
  put_big_endian(png, 29, crc32(std::string_view(png).substr(12, 17)));
  expect_error<CheckpointError>([&] { decode(png); }, {"178956970 pixels", "60000 x 60000"});
}

TEST(Image, OtherFilesAreNamed) {
  expect_error<CheckpointError>([] { decode("GIF89a and so on"); },
                                {"image test", "JPEG, PNG or WebP", "convert it"});
  expect_error<CheckpointError>([] { decode(""); }, {"JPEG, PNG or WebP"});
  expect_error<CheckpointError>([] { load_image("/nowhere/picture.png"); },
                                {"/nowhere/picture.png"});
}

// A block of EXIF with one entry, little-endian.
std::string exif(uint8_t tag_low, uint8_t type, uint8_t value, uint8_t directory = 8,
                 uint8_t entries = 1) {
  std::string block = "Exif";
  for (const int byte : {0,
                         0,
                         int{'I'},
                         int{'I'},
                         42,
                         0,
                         int{directory},
                         0,
                         0,
                         0,
                         int{entries},
                         0,
                         int{tag_low},
                         1,
                         int{type},
                         0,
                         1,
                         0,
                         0,
                         0,
                         int{value},
                         0,
                         0,
                         0}) {
    block.push_back(static_cast<char>(byte));
  }
  return block;
}

TEST(Image, OrientationIsReadFromSoundBlocksOnly) {
  const auto read = [](const std::string& block, std::string_view xmp = "") {
    return read_orientation(std::as_bytes(std::span(block)), xmp);
  };
  EXPECT_EQ(read(exif(0x12, 3, 6)), 6);
  EXPECT_EQ(read(exif(0x12, 3, 6).substr(6)), 6);  // without "Exif\0\0"
  EXPECT_EQ(read(exif(0x12, 3, 9)), 1);
  EXPECT_EQ(read(exif(0x13, 3, 6)), 1);          // another tag
  EXPECT_EQ(read(exif(0x12, 3, 6, 250)), 1);     // a directory outside
  EXPECT_EQ(read(exif(0x13, 3, 6, 8, 255)), 1);  // entries outside
  for (size_t size = 0; size < exif(0x12, 3, 6).size() - 3; ++size) {
    EXPECT_EQ(read(exif(0x12, 3, 6).substr(0, size)), 1) << size;
  }
  EXPECT_EQ(read("", "<x tiff:Orientation=\"8\"/>"), 8);
  EXPECT_EQ(read("", "<tiff:Orientation>3</tiff:Orientation>"), 3);
  EXPECT_EQ(read("", "tiff:Orientation"), 1);
  EXPECT_EQ(read(exif(0x12, 3, 6), "tiff:Orientation=\"8\""), 6);
}

}  // namespace
}  // namespace cadre

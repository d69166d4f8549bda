#include "cadre/image_processor.h"

#include <gtest/gtest.h>

#include <cmath>
#include <filesystem>
#include <nlohmann/json.hpp>

#include "cadre/error.h"
#include "io/json.h"
#include "io/safetensors.h"
#include "support/expect_error.h"
#include "support/temp_dir.h"

namespace cadre {
namespace {

using test::expect_error;

// The picture of tests/data/make/make_images.py.
Image formula(int64_t height, int64_t width) {
  Image image{height, width, {}};
  for (int64_t y = 0; y < height; ++y) {
    for (int64_t x = 0; x < width; ++x) {
      for (int64_t c = 0; c < 3; ++c) {
        const int64_t value =
            (x * x + 3 * y * y + 5 * x * y) / 16 + 40 * c + 7 * ((31 * x + 17 * y) % 11);
        image.rgb.push_back(static_cast<uint8_t>(value));
      }
    }
  }
  return image;
}

ImageProcessor from_keys(const Json& keys) {
  const test::TempDir folder;
  folder.write("preprocessor_config.json", keys.dump());
  return ImageProcessor::from_pretrained(folder.path());
}

// The stored samples (8 bits, one step in time) against ours.
void expect_samples(const PixelValues& pixels, const TensorView& samples, int64_t times) {
  const int64_t area = samples.dim(2);
  ASSERT_EQ(pixels.patch_width, 3 * times * area);
  for (size_t i = 0; i < pixels.values.size(); ++i) {
    const int64_t in_patch = static_cast<int64_t>(i) % pixels.patch_width;
    const int64_t patch = static_cast<int64_t>(i) / pixels.patch_width;
    const int64_t channel = in_patch / (times * area);
    const uint8_t sample = samples.as<uint8_t>()[(patch * 3 + channel) * area + in_patch % area];
    ASSERT_NEAR(pixels.values[i], (sample / 255.0 - 0.5) / 0.5, 1e-6) << "at " << i;
  }
}

TEST(ImageProcessor, GivesWhatTransformersGives) {
  const auto file = SafetensorsFile::open(std::filesystem::path(CADRE_TEST_DATA) / "images" /
                                          "processor.safetensors");
  ASSERT_EQ(file.header().metadata.size(), 7u);
  for (const auto& [name, text] : file.header().metadata) {
    SCOPED_TRACE(name);
    Json keys = Json::parse(text);
    const Image image = formula(keys["height"], keys["width"]);
    const ImageProcessor processor = from_keys(keys);
    const PixelValues pixels = processor.process({&image, 1});
    const TensorView grid = file.tensor(name + ".grid");
    ASSERT_EQ(pixels.grids.size(), 1u);
    const int64_t* expected = grid.as<int64_t>();
    EXPECT_EQ(pixels.grids[0], (ImageGrid{expected[0], expected[1], expected[2]}));
    const TensorView values = file.tensor(name + ".values");
    ASSERT_EQ(static_cast<int64_t>(pixels.values.size()), values.dim(0) * pixels.patch_width);
    if (values.dtype() == DType::kU8) {
      expect_samples(pixels, values, processor.config().temporal_patch_size);
      continue;
    }
    for (size_t i = 0; i < pixels.values.size(); ++i) {
      ASSERT_NEAR(pixels.values[i], values.as<float>()[i], 1e-6) << "at " << i;
    }
  }
}

TEST(ImageProcessor, ImagesFollowEachOther) {
  const ImageProcessor processor{ImageProcessorConfig{}};
  const Image images[] = {formula(40, 50), formula(70, 30)};
  const PixelValues first = processor.process({images, 1});
  const PixelValues second = processor.process({images + 1, 1});
  const PixelValues both = processor.process(images);
  std::vector<float> joined = first.values;
  joined.insert(joined.end(), second.values.begin(), second.values.end());
  EXPECT_EQ(both.values, joined);
  EXPECT_EQ(both.grids, (std::vector{first.grids[0], second.grids[0]}));
  EXPECT_EQ(processor.num_tokens({1, 4, 6}), 6);
  EXPECT_TRUE(processor.process({}).values.empty());
}

TEST(ImageProcessor, ExpandsThePlacesOfImages) {
  const ImageProcessor processor{ImageProcessorConfig{}};
  const std::vector<TokenId> ids = {9, 5, 9, 1};
  const std::vector<ImageGrid> grids = {{1, 4, 2}, {1, 2, 6}};
  EXPECT_EQ(processor.expand(ids, grids, 9), (std::vector<TokenId>{9, 9, 5, 9, 9, 9, 1}));
  EXPECT_EQ(processor.expand(ids, {}, 7), ids);
  expect_error<InvalidArgument>([&] { static_cast<void>(processor.expand(ids, grids, 5)); },
                                {"2 images", "1 places", "token 5"});
}

TEST(ImageProcessor, SizesOfExtremeImages) {
  const ImageProcessor processor{ImageProcessorConfig{}};
  EXPECT_EQ(processor.resized(1, 200), (std::pair<int64_t, int64_t>{32, 480}));
  EXPECT_EQ(processor.resized(1, 1), (std::pair<int64_t, int64_t>{32, 32}));
  EXPECT_EQ(processor.resized(10000, 10000), (std::pair<int64_t, int64_t>{128, 128}));
  expect_error<InvalidArgument>([&] { static_cast<void>(processor.resized(1, 201)); },
                                {"201 x 1", "200", "crop it"});
  EXPECT_THROW(static_cast<void>(processor.resized(0, 10)), InvalidArgument);
}

TEST(ImageProcessor, FilesAreReadInTransformersOrder) {
  const test::TempDir folder;
  const auto load = [&] { return ImageProcessor::from_pretrained(folder.path()).config(); };
  folder.write("config.json", R"({"vision_config": {"patch_size": 8, "num_position_embeddings": 25,
                                  "spatial_merge_size": 2, "temporal_patch_size": 1}})");
  EXPECT_EQ(load().patch_size, 8);
  EXPECT_EQ(load().temporal_patch_size, 1);
  EXPECT_EQ(load().min_pixels, 16 * 16);
  EXPECT_EQ(load().max_pixels, 25 * 64);
  EXPECT_EQ(load().mean[2], 0.5f);
  folder.write("preprocessor_config.json", R"({"size": {"shortest_edge": 100, "longest_edge": 5000},
                                               "max_pixels": 4000, "image_mean": 0.25})");
  EXPECT_EQ(load().patch_size, 14);
  EXPECT_EQ(load().min_pixels, 100);
  EXPECT_EQ(load().max_pixels, 4000);
  EXPECT_EQ(load().mean[0], 0.25f);
  EXPECT_NEAR(load().std[1], 0.26130258, 1e-7);
  folder.write("processor_config.json", R"({"image_processor": {"patch_size": 10}})");
  EXPECT_EQ(load().patch_size, 10);
  EXPECT_EQ(load().max_pixels, 28 * 28 * 1280);
}

TEST(ImageProcessor, WrongFilesAreNamed) {
  expect_error<Unsupported>(
      [] {
        from_keys({{"resample", 2}});
      },
      {"preprocessor_config.json", "resample is 2", "bicubic"});
  expect_error<Unsupported>([] { from_keys({{"do_resize", false}}); }, {"do_resize is false"});
  expect_error<CheckpointError>(
      [] {
        from_keys({{"image_mean", {0.5, 0.5}}});
      },
      {"image_mean", "three numbers", "[0.5,0.5]"});
  expect_error<CheckpointError>([] { from_keys({{"patch_size", 0}}); }, {"patch_size"});
  expect_error<InvalidArgument>(
      [] {
        from_keys({{"min_pixels", 9}, {"max_pixels", 8}});
      },
      {"min_pixels <= max_pixels", "9 and 8"});
  const test::TempDir text_model;
  text_model.write("config.json", "{}");
  expect_error<CheckpointError>([&] { ImageProcessor::from_pretrained(text_model.path()); },
                                {"config.json", "takes no images"});
}

}  // namespace
}  // namespace cadre

// Models with images: pixel values of the fixture's picture, the same bits however images come, and
// the layouts and keys that the fixtures' own values do not show.
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <vector>

#include "cadre/error.h"
#include "cadre/generation.h"
#include "cadre/image_processor.h"
#include "cadre/model.h"
#include "golden/model_runs.h"
#include "io/safetensors.h"
#include "models/damaged_checkpoint.h"
#include "support/compare.h"
#include "support/expect_error.h"

namespace cadre::test {
namespace {

constexpr char kOne[] = "qwen3_vl_moe";         // one image in one sequence
constexpr char kTwo[] = "qwen3_vl_moe_images";  // two images in each of two sequences

std::unique_ptr<Model> load(const std::string& folder, DType dtype = DType::kF32) {
  return AutoModelForImageTextToText::from_pretrained(folder, {.dtype = dtype});
}

Expected expected_of(const char* name) {
  return read_expected(fixture(name) / "expected.safetensors");
}

Images images_of(const Expected& expected, size_t first, size_t count) {
  Images result;
  const size_t width = expected.images.pixel_values.size() / [&] {
    size_t patches = 0;
    for (const ImageGrid& grid : expected.images.grids) {
      patches += static_cast<size_t>(grid.t * grid.h * grid.w);
    }
    return patches;
  }();
  auto from = expected.images.pixel_values.begin();
  for (size_t i = 0; i < first + count; ++i) {
    const ImageGrid& grid = expected.images.grids[i];
    const auto to =
        from + static_cast<std::ptrdiff_t>(static_cast<size_t>(grid.t * grid.h * grid.w) * width);
    if (i >= first) {
      result.grids.push_back(grid);
      result.pixel_values.insert(result.pixel_values.end(), from, to);
    }
    from = to;
  }
  return result;
}

TEST(Vision, PixelValuesOfTheFixturesPicture) {
  const auto file = SafetensorsFile::open(fixture(kOne) / "expected.safetensors");
  const TensorView pixels = file.tensor("image_u8");
  Image image{pixels.dim(0), pixels.dim(1), {}};
  image.rgb.assign(pixels.as<uint8_t>(), pixels.as<uint8_t>() + pixels.numel());
  const PixelValues values = ImageProcessor::from_pretrained(fixture(kOne)).process({&image, 1});
  const Expected expected = expected_of(kOne);
  EXPECT_EQ(values.grids, expected.images.grids);
  ASSERT_EQ(values.values.size(), expected.images.pixel_values.size());
  for (size_t i = 0; i < values.values.size(); ++i) {
    ASSERT_NEAR(values.values[i], expected.images.pixel_values[i], 1e-3) << i;
  }
}

TEST(Vision, SequencesOfABatchEqualEachAlone) {
  const Expected expected = expected_of(kTwo);
  for (const DType dtype : {DType::kF32, DType::kBF16}) {
    const auto model = load(fixture(kTwo), dtype);
    const auto both =
        all_logits(*model, expected.input_ids, expected.batch, nullptr, expected.images);
    std::vector<float> each;
    for (int64_t b = 0; b < expected.batch; ++b) {
      const Images own = images_of(expected, static_cast<size_t>(2 * b), 2);
      const auto one = all_logits(*model, expected.row(b), 1, nullptr, own);
      each.insert(each.end(), one.begin(), one.end());
    }
    EXPECT_EQ(both, each);
  }
}

TEST(Vision, PiecesEqualAtOnce) {
  const Expected expected = expected_of(kTwo);
  const auto whole = all_logits(*load(fixture(kTwo)), expected.input_ids, expected.batch, nullptr,
                                expected.images);
  for (const int64_t piece : {1, 5, 19}) {  // cut images in two
    const auto model = load(fixture(kTwo));
    model->reserve(piece);
    EXPECT_EQ(all_logits(*model, expected.input_ids, expected.batch, nullptr, expected.images),
              whole)
        << piece;
  }
}

// Feeds `row` in the parts that end at `ends`, each with its images; returns all logits.
std::vector<float> in_parts(Model& model, const Expected& expected, int64_t row,
                            const std::vector<std::pair<int64_t, size_t>>& ends_and_images,
                            KvCache& cache) {
  std::vector<float> result;
  int64_t begin = 0;
  auto image = static_cast<size_t>(2 * row);
  for (const auto& [end, count] : ends_and_images) {
    const Images images = images_of(expected, image, count);
    image += count;
    const std::vector<int64_t> counts = {end - begin};
    std::vector<float> logits(static_cast<size_t>((end - begin) * model.info().vocab_size));
    const auto ids =
        expected.row(row).subspan(static_cast<size_t>(begin), static_cast<size_t>(end - begin));
    model.forward({ids, counts, LogitsRows::kAll, images.pixel_values, images.grids}, cache,
                  {logits.data(), DType::kF32, {end - begin, model.info().vocab_size}});
    result.insert(result.end(), logits.begin(), logits.end());
    begin = end;
  }
  return result;
}

// Text after images goes on where the cache says, image by image and token by token.
TEST(Vision, WithACacheEqualsAtOnce) {
  const Expected expected = expected_of(kTwo);
  const auto model = load(fixture(kTwo));
  const auto whole = all_logits(*model, expected.row(0), 1, nullptr, images_of(expected, 0, 2));
  const auto cache = model->new_cache(1, expected.length);
  std::vector<std::pair<int64_t, size_t>> parts = {{8, 1}, {9, 0}, {13, 1}};
  for (int64_t end = 14; end <= expected.length; ++end) parts.emplace_back(end, 0);
  EXPECT_EQ(in_parts(*model, expected, 0, parts, *cache), whole);

  // Cut behind the first image and continued: the second image's shift is forgotten.
  cache->truncate(0, 9);
  std::vector<float> rest(whole.begin() + 9 * model->info().vocab_size, whole.end());
  const Images second = images_of(expected, 1, 1);
  const std::vector<int64_t> counts = {expected.length - 9};
  std::vector<float> again(rest.size());
  model->forward(
      {expected.row(0).subspan(9), counts, LogitsRows::kAll, second.pixel_values, second.grids},
      *cache, {again.data(), DType::kF32, {counts[0], model->info().vocab_size}});
  EXPECT_EQ(again, rest);
}

TEST(Vision, GenerateGivesTheGreedyTokens) {
  for (const char* name : {kOne, kTwo}) {
    const Expected expected = expected_of(name);
    const auto model = load(fixture(name));
    std::vector<std::vector<TokenId>> prompts;
    for (int64_t b = 0; b < expected.batch; ++b) {
      prompts.emplace_back(expected.row(b).begin(), expected.row(b).end());
    }
    GenerationOptions options{.max_new_tokens = expected.num_greedy, .ignore_eos = true};
    options.pixel_values = expected.images.pixel_values;
    options.image_grids = expected.images.grids;
    const GenerationResult result = generate(*model, prompts, options);
    std::vector<TokenId> ids;
    for (const auto& row : result.token_ids) ids.insert(ids.end(), row.begin(), row.end());
    EXPECT_EQ(ids, expected.greedy_ids) << name;
  }
}

// [E, N, K] -> [E, K, N] of bfloat16.
TensorView transposed(const TensorView& tensor, std::vector<std::vector<uint16_t>>& owner) {
  const int64_t n = tensor.dim(1);
  const int64_t k = tensor.dim(2);
  auto& out = owner.emplace_back(static_cast<size_t>(tensor.numel()));
  std::vector<uint16_t> in(out.size());
  std::memcpy(in.data(), tensor.data(), tensor.nbytes());
  for (int64_t i = 0; i < tensor.numel(); ++i) {
    const int64_t e = i / (n * k);
    out[static_cast<size_t>(e * n * k + i % k * n + i / k % n)] = in[static_cast<size_t>(i)];
  }
  return {out.data(), tensor.dtype(), {tensor.dim(0), k, n}};
}

TEST(Vision, BothLayoutsOfExpertsGiveTheSameBits) {
  for (const char* name : {kOne, kTwo}) {
    const Expected expected = expected_of(name);
    const auto logits = [&](const std::string& folder) {
      return all_logits(*load(folder), expected.input_ids, expected.batch, nullptr,
                        expected.images);
    };
    DamagedCheckpoint other(name);
    std::vector<std::vector<uint16_t>> owner;
    for (auto& [tensor_name, tensor] : other.tensors) {
      if (tensor_name.find(".experts.") != tensor_name.npos) tensor = transposed(tensor, owner);
    }
    const std::vector<float> got = logits(other.write());
    EXPECT_LE(relative_error(got, logits(fixture(name))), 1e-6) << name;
  }
}

TEST(Vision, OneLayerInAnotherLayoutIsAFault) {
  DamagedCheckpoint mixed(kOne);
  std::vector<std::vector<uint16_t>> owner;
  for (const char* projection : {"gate_up_proj", "down_proj"}) {
    TensorView& tensor =
        mixed.tensors.at(std::string("model.language_model.layers.1.mlp.experts.") + projection);
    tensor = transposed(tensor, owner);
  }
  expect_error<CheckpointError>([&] { load(mixed.write()); }, {"layers.1.mlp", "same layout"});
}

TEST(Vision, KeysThatMatterChangeTheLogits) {
  const Expected expected = expected_of(kTwo);
  const auto logits = [&](const DamagedCheckpoint& checkpoint) {
    return all_logits(*load(checkpoint.write()), expected.input_ids, expected.batch, nullptr,
                      expected.images);
  };
  const std::vector<float> before = logits(DamagedCheckpoint(kTwo));
  const auto effect = [&](const char* part, const char* key, const Json& value) {
    DamagedCheckpoint checkpoint(kTwo);
    checkpoint.config[part][key] = value;
    return relative_error(logits(checkpoint), before);
  };
  EXPECT_GT(effect("vision_config", "hidden_act", "relu"), 1e-3);
  EXPECT_GT(effect("vision_config", "rope_parameters", {{"rope_theta", 10.0}}), 1e-3);
  EXPECT_GT(effect("vision_config", "deepstack_visual_indexes", {1, 2}), 1e-3);
  EXPECT_GT(effect("text_config", "rope_scaling", {{"mrope_section", {8, 0, 0}}}), 1e-3);
  EXPECT_GT(effect("text_config", "rope_theta", 10.0), 1e-3);
  EXPECT_EQ(effect("text_config", "norm_topk_prob", false), 0);
  EXPECT_EQ(effect("vision_config", "rope_parameters", {{"rope_theta", 10000.0}}), 0);
}

TEST(Vision, WithoutImagesPlaceholdersAreTokens) {
  const Expected expected = expected_of(kOne);
  const auto model = load(fixture(kOne));
  const auto at_once = all_logits(*model, expected.input_ids, 1);
  const auto cache = model->new_cache(1, expected.length);
  std::vector<float> stepwise;
  for (int64_t t = 0; t < expected.length; ++t) {
    std::vector<float> row(static_cast<size_t>(model->info().vocab_size));
    const std::vector<int64_t> one = {1};
    model->forward({expected.row(0).subspan(static_cast<size_t>(t), 1), one}, *cache,
                   {row.data(), DType::kF32, {1, model->info().vocab_size}});
    stepwise.insert(stepwise.end(), row.begin(), row.end());
  }
  EXPECT_EQ(stepwise, at_once);
}

TEST(Vision, ImagesThatDoNotFitTheTextAreNamed) {
  const Expected expected = expected_of(kTwo);
  const auto model = load(fixture(kTwo));
  const auto run = [&](const Images& images) {
    all_logits(*model, expected.input_ids, expected.batch, nullptr, images);
  };
  expect_error<InvalidArgument>([&] { run(images_of(expected, 0, 3)); },
                                {"sequence 1", "token 90", "the 3 given"});
  Images more = expected.images;
  const Images last = images_of(expected, 3, 1);
  more.grids.push_back(last.grids[0]);
  more.pixel_values.insert(more.pixel_values.end(), last.pixel_values.begin(),
                           last.pixel_values.end());
  expect_error<InvalidArgument>([&] { run(more); }, {"5 images", "of 4"});
  Images swapped = expected.images;
  std::swap(swapped.grids[0], swapped.grids[1]);
  expect_error<InvalidArgument>([&] { run(swapped); },
                                {"image 1", "1 x 4 x 4", "takes 4", "sequence 0 has 1"});
  Images odd = expected.images;
  odd.grids[1] = {1, 3, 4};
  expect_error<InvalidArgument>([&] { run(odd); }, {"image 1", "1 x 3 x 4", "multiples of 2"});
  for (const ImageGrid& grid : {ImageGrid{1, 0, 4}, ImageGrid{-1, 4, 4},
                                ImageGrid{int64_t{1} << 40, int64_t{1} << 40, 2}}) {
    odd.grids[1] = grid;
    EXPECT_THROW(run(odd), InvalidArgument);
  }
  Images cut = expected.images;
  cut.pixel_values.pop_back();
  expect_error<InvalidArgument>([&] { run(cut); }, {"pixel values", "patches of 48"});
}

TEST(Vision, TextModelsTakeNoImages) {
  const Expected expected = expected_of("qwen3_moe");
  const auto model = Model::from_pretrained(fixture("qwen3_moe"));
  EXPECT_FALSE(model->info().vision.has_value());
  expect_error<Unsupported>(
      [&] {
        all_logits(*model, expected.input_ids, expected.batch, nullptr, expected_of(kOne).images);
      },
      {"qwen3_moe", "take no images"});
  expect_error<Unsupported>(
      [] { AutoModelForImageTextToText::from_pretrained(fixture("qwen3_moe")); },
      {"qwen3_moe", "AutoModelForCausalLM"});
}

TEST(Vision, InfoNamesTokensAndSubConfigs) {
  const auto model = load(fixture(kOne));
  ASSERT_TRUE(model->info().vision.has_value());
  EXPECT_EQ(model->info().vision->image, 251);
  EXPECT_EQ(model->info().vision->start, 253);
  EXPECT_EQ(model->info().vision->end, 254);
  EXPECT_EQ(model->info().sub_configs, (std::vector<std::string>{"text_config", "vision_config"}));
}

TEST(Vision, ExpertsAreChosenPerSubConfig) {
  using Map = ExpertsImplementation;
  const ExpertsImplementation both{{"text_config", "batched_mm"}, {"vision_config", "eager"}};
  const auto model = Model::from_pretrained(fixture(kOne), {.experts_implementation = both});
  const auto implementation = [&] { return model->get_experts_implementation(); };
  EXPECT_EQ(implementation(),
            (Map{{"", "grouped_mm"}, {"text_config", "batched_mm"}, {"vision_config", "eager"}}));
  model->set_experts_implementation(Map{{"vision_config", "grouped_mm"}});
  EXPECT_EQ(implementation().at("vision_config"), "grouped_mm");
  EXPECT_EQ(implementation().at("text_config"), "batched_mm");
  model->set_experts_implementation("eager");
  EXPECT_EQ(implementation(),
            (Map{{"", "eager"}, {"text_config", "eager"}, {"vision_config", "eager"}}));
  EXPECT_THROW(model->set_experts_implementation(Map{{"vision_config", "bogus"}}), InvalidArgument);
  expect_error<InvalidArgument>(
      [&] {
        model->set_experts_implementation(Map{{"audio_config", "eager"}});
      },
      {"audio_config", "\"text_config\"", "\"vision_config\""});
  EXPECT_EQ(implementation().at("vision_config"), "eager");
}

TEST(Vision, FaultsOfTheConfigAreNamed) {
  const auto message = [](const char* part, const char* key, const Json& value) {
    DamagedCheckpoint checkpoint(kOne);
    checkpoint.config[part][key] = value;
    return message_of<CheckpointError>([&] { load(checkpoint.write()); });
  };
  const auto expect_part = [](const std::string& text, const char* part) {
    EXPECT_NE(text.find(part), text.npos) << text;
  };
  expect_part(message("vision_config", "num_position_embeddings", 63), "square");
  expect_part(message("vision_config", "num_heads", 5), "num_heads");
  expect_part(message("vision_config", "out_hidden_size", 32), "hidden_size (64)");
  expect_part(message("vision_config", "deepstack_visual_indexes", {1, 0}), "ascending");
  expect_part(message("vision_config", "deepstack_visual_indexes", {3}), "[0, 3)");
  expect_part(message("text_config", "rope_parameters",
                      {{"rope_type", "default"}, {"mrope_section", {1, 2}}}),
              "three sizes");
  expect_part(message("vision_config", "depth", 4), "model.visual.blocks.3.norm1.weight");
}

TEST(Vision, ARenamedTensorFailsByName) {
  DamagedCheckpoint checkpoint(kOne);
  const auto node = checkpoint.tensors.extract("model.visual.blocks.1.attn.qkv.weight");
  checkpoint.tensors["model.visual.blocks.1.attn.renamed"] = node.mapped();
  const std::string message = message_of<CheckpointError>([&] { load(checkpoint.write()); });
  EXPECT_NE(message.find("blocks.1.attn.qkv.weight"), message.npos);
  EXPECT_NE(message.find("blocks.1.attn.renamed"), message.npos);
}

}  // namespace
}  // namespace cadre::test

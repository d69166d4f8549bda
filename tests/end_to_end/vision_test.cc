// The command and images: tensors beside input_ids, files behind --image.
#include <algorithm>

#include "cadre/image_processor.h"
#include "end_to_end/fixtures.h"
#include "io/safetensors.h"
#include "support/compare.h"

namespace cadre::test {
namespace {

constexpr char kModel[] = "qwen3_vl_moe";
const std::string kPictures = std::string(CADRE_TEST_DATA) + "/images/";

std::vector<std::string> on_model(const std::string& command, std::vector<std::string> more) {
  std::vector<std::string> call = {command, "--model", model_folder(kModel), "--dtype", "float32"};
  call.insert(call.end(), more.begin(), more.end());
  return call;
}

// expected.safetensors without the named tensors, or with others in their places.
std::filesystem::path edited(const TempDir& folder, const std::vector<NamedTensor>& put,
                             const std::vector<std::string>& drop = {}) {
  const SafetensorsFile expected = SafetensorsFile::open(expected_file(kModel));
  std::vector<NamedTensor> tensors = put;
  for (const SafetensorsEntry& entry : expected.header().entries) {
    const auto replaced = std::any_of(put.begin(), put.end(), [&](const NamedTensor& tensor) {
      return tensor.name == entry.name;
    });
    if (replaced || std::find(drop.begin(), drop.end(), entry.name) != drop.end()) continue;
    tensors.push_back({entry.name, expected.view(entry)});
  }
  const auto path = folder / "edited.safetensors";
  write_safetensors(path, tensors);
  return path;
}

TEST(VisionCommand, ForwardTakesPixelValuesOrThePicture) {
  for (const std::string& backend : kCpuBackends) {
    for (const bool from_image : {false, true}) {
      const TempDir folder;
      const auto out = folder / "out.safetensors";
      std::vector<std::string> call = on_model(
          "forward", {"--inputs", expected_file(kModel), "--out", out, "--experts", backend});
      if (from_image) call.emplace_back("--from-image");
      expect_success(run_cadre(call));
      EXPECT_LE(relative_error(SafetensorsFile::open(out).tensor("logits"),
                               SafetensorsFile::open(expected_file(kModel)).tensor("logits")),
                1e-4);
    }
  }
}

TEST(VisionCommand, GenerateTakesThemToo) {
  for (const bool from_image : {false, true}) {
    const TempDir folder;
    const auto out = folder / "out.safetensors";
    std::vector<std::string> call =
        on_model("generate", {"--input-ids", expected_file(kModel), "--out", out,
                              "--max-new-tokens", "12", "--ignore-eos"});
    if (from_image) call.emplace_back("--from-image");
    expect_success(run_cadre(call));
    EXPECT_EQ(read_tensor(out, "output_ids"), read_tensor(expected_file(kModel), "greedy_ids"));
  }
}

TEST(VisionCommand, TensorsThatDoNotFitAreNamed) {
  const TempDir folder;
  const auto forward = [&](const std::filesystem::path& inputs,
                           const std::vector<std::string>& more = {}) {
    std::vector<std::string> call = {"--inputs", inputs, "--out", folder / "out.safetensors"};
    call.insert(call.end(), more.begin(), more.end());
    return run_cadre(on_model("forward", call));
  };
  const std::vector<std::string> both = {"pixel_values", "image_grid_thw"};
  expect_failure(forward(edited(folder, {}, both)), 2, {"6 image tokens", "pixel_values"});
  expect_failure(forward(edited(folder, {}, {"image_grid_thw"})), 3, {"image_grid_thw"});
  expect_failure(forward(edited(folder, {}, {"image_u8"}), {"--from-image"}), 3, {"image_u8"});
  const int64_t grid[3] = {1, 4, 4};
  const TensorView smaller(grid, DType::kI64, {1, 3});
  expect_failure(forward(edited(folder, {{"image_grid_thw", smaller}})), 2,
                 {"24576 pixel values", "got 36864"});
  const TensorView flat(grid, DType::kI64, {3});
  expect_failure(forward(edited(folder, {{"image_grid_thw", flat}})), 3,
                 {"image_grid_thw", "[images, 3]"});
  expect_failure(forward(edited(folder, {{"image_u8", flat}}), {"--from-image"}), 3,
                 {"image_u8", "uint8 [height, width, 3]"});
  expect_failure(
      run_cadre({"forward", "--model", model_folder("olmoe"), "--inputs", expected_file("olmoe"),
                 "--out", folder / "out.safetensors", "--from-image"}),
      4, {"--from-image", "olmoe", "text alone"});
}

// The fixture with a tokenizer of single letters and its image tokens.
std::filesystem::path with_tokenizer(const TempDir& folder) {
  const auto model = copy_model(kModel, folder);
  nlohmann::json vocabulary = nlohmann::json::object();
  for (int i = 0; i < 26; ++i) vocabulary[std::string(1, static_cast<char>('a' + i))] = 10 + i;
  nlohmann::json added = nlohmann::json::array();
  for (const auto& [id, text] :
       {std::pair{251, "<|image_pad|>"}, {253, "<|vision_start|>"}, {254, "<|vision_end|>"}}) {
    added.push_back({{"id", id},
                     {"content", text},
                     {"special", true},
                     {"single_word", false},
                     {"lstrip", false},
                     {"rstrip", false},
                     {"normalized", false}});
  }
  const nlohmann::json tokenizer = {
      {"version", "1.0"},
      {"added_tokens", added},
      {"normalizer", nullptr},
      {"pre_tokenizer", {{"type", "ByteLevel"}, {"add_prefix_space", false}, {"use_regex", false}}},
      {"post_processor", nullptr},
      {"decoder", {{"type", "ByteLevel"}}},
      {"model", {{"type", "BPE"}, {"vocab", vocabulary}, {"merges", nlohmann::json::array()}}}};
  write_file(model / "tokenizer.json", tokenizer.dump());
  return model;
}

// What --input-ids gives for these ids and pictures.
std::vector<double> by_tensors(const std::filesystem::path& model, const TempDir& folder,
                               const std::vector<int64_t>& ids,
                               const std::vector<std::string>& files) {
  std::vector<Image> images;
  for (const std::string& file : files) images.push_back(load_image(file));
  const PixelValues pixels = ImageProcessor::from_pretrained(model).process(images);
  std::vector<int64_t> grids;
  for (const ImageGrid& grid : pixels.grids) grids.insert(grids.end(), {grid.t, grid.h, grid.w});
  const auto rows = static_cast<int64_t>(pixels.values.size()) / pixels.patch_width;
  const NamedTensor tensors[] = {
      {"input_ids", {ids.data(), DType::kI64, {1, static_cast<int64_t>(ids.size())}}},
      {"pixel_values", {pixels.values.data(), DType::kF32, {rows, pixels.patch_width}}},
      {"image_grid_thw", {grids.data(), DType::kI64, {static_cast<int64_t>(files.size()), 3}}}};
  write_safetensors(folder / "inputs.safetensors", tensors);
  const auto out = folder / "by_tensors.safetensors";
  expect_success(
      run_cadre({"generate", "--model", model, "--input-ids", folder / "inputs.safetensors",
                 "--out", out, "--max-new-tokens", "4", "--ignore-eos"}));
  return read_tensor(out, "output_ids");
}

TEST(VisionCommand, ImagesStandBeforeThePromptOrWhereItSays) {
  const TempDir folder;
  const auto model = with_tokenizer(folder);
  // 17 x 11 and 11 x 17 pixels grow to 64 x 32 and 32 x 64: two tokens each.
  const std::string wide = kPictures + "rgb.png";
  const std::string tall = kPictures + "rotated.png";
  const auto generate = [&](const std::string& prompt, const std::vector<std::string>& files) {
    std::vector<std::string> call = {"generate", "--model",      model,   "--max-new-tokens",
                                     "4",        "--ignore-eos", "--json"};
    for (const std::string& file : files) call.insert(call.end(), {"--image", file});
    call.push_back(prompt);
    const auto ids = json_of(run_cadre(call)).at("output_ids").at(0);
    return ids.get<std::vector<double>>();
  };
  EXPECT_EQ(generate("abc", {wide}),
            by_tensors(model, folder, {253, 251, 251, 254, 10, 11, 12}, {wide}));
  EXPECT_EQ(
      generate("ab", {wide, tall}),
      by_tensors(model, folder, {253, 251, 251, 254, 253, 251, 251, 254, 10, 11}, {wide, tall}));
  EXPECT_EQ(generate("a<|image_pad|>bc<|vision_start|><|image_pad|>d", {tall, wide}),
            by_tensors(model, folder, {10, 251, 251, 11, 12, 253, 251, 251, 13}, {tall, wide}));
}

TEST(VisionCommand, AChatTemplatePlacesTheImages) {
  const TempDir folder;
  const auto model = with_tokenizer(folder);
  write_file(model / "chat_template.jinja",
             "x{% for part in messages[-1].content %}{{ part.text if part.type == 'text' else "
             "'<|vision_start|><|image_pad|><|vision_end|>' }}{% endfor %}y");
  const std::string wide = kPictures + "rgb.png";
  const Result result = run_cadre({"generate", "ab", "--chat", "--image", wide, "--model", model,
                                   "--max-new-tokens", "4", "--ignore-eos", "--json"});
  expect_success(result);
  EXPECT_EQ(json_of(result).at("output_ids").at(0).get<std::vector<double>>(),
            by_tensors(model, folder, {33, 253, 251, 251, 254, 10, 11, 34}, {wide}));
}

TEST(VisionCommand, FaultsOfImagesAreNamed) {
  const TempDir folder;
  const auto model = with_tokenizer(folder);
  const auto generate = [&](const std::string& prompt, const std::string& file) {
    std::vector<std::string> call = {"generate", "--model", model, "--max-new-tokens", "2"};
    if (!file.empty()) call.insert(call.end(), {"--image", file});
    call.push_back(prompt);
    return run_cadre(call);
  };
  const std::string picture = kPictures + "rgb.png";
  expect_failure(generate("a<|image_pad|>b<|image_pad|>", picture), 2, {"1 images", "2 places"});
  expect_failure(generate("a<|image_pad|>", ""), 2, {"0 images", "1 places"});
  expect_failure(generate("a", "nowhere.png"), 3, {"nowhere.png"});
  expect_failure(generate("a", model / "config.json"), 3, {"JPEG, PNG or WebP"});
  const std::string whole = read_file(picture);
  write_file(folder / "cut.png", whole.substr(0, whole.size() / 2));
  expect_failure(generate("a", folder / "cut.png"), 3, {"cut.png", "PNG"});
}

TEST(VisionCommand, ExpertsAreChosenPerSubConfig) {
  const TempDir folder;
  const auto forward = [&](const std::string& experts) {
    return run_cadre(
        on_model("forward", {"--inputs", expected_file(kModel), "--out", folder / "out.safetensors",
                             "--json", "--experts", experts}));
  };
  const auto json =
      json_of(forward(R"({"text_config": "batched_mm", "vision_config": "eager"})")).at("experts");
  EXPECT_EQ(json.at("text_config"), "batched_mm");
  EXPECT_EQ(json.at("vision_config"), "eager");
  expect_failure(forward(R"({"audio_config": "eager"})"), 2,
                 {"audio_config", "text_config", "vision_config"});
  EXPECT_EQ(
      run_cadre({"backends", model_folder(kModel), "--experts", R"({"vision_config": "eager"})"})
          .exit_code,
      0);
}

}  // namespace
}  // namespace cadre::test

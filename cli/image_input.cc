#include "image_input.h"

#include <algorithm>
#include <cstring>

#include "convert.h"
#include "io/safetensors.h"

namespace cadre::cli {

namespace {

bool is_integer(const TensorView& tensor) {
  return tensor.dtype() == DType::kI64 || tensor.dtype() == DType::kI32;
}

[[noreturn]] void fail(const std::filesystem::path& file, std::string_view expected,
                       const std::string& found) {
  throw CheckpointError(str_cat(file.string(), ": expected ", expected, ", got ", found));
}

PixelValues processed(const SafetensorsFile& file, const ModelInfo& info) {
  const TensorView pixels = file.tensor("image_u8");
  if (pixels.dtype() != DType::kU8 || pixels.rank() != 3 || pixels.dim(2) != 3 ||
      pixels.numel() == 0 || pixels.dim(0) > kMaxImagePixels / pixels.dim(1)) {
    fail(file.path(),
         str_cat("image_u8: uint8 [height, width, 3] of at most ", kMaxImagePixels, " pixels"),
         describe("image_u8", pixels));
  }
  Image image{pixels.dim(0), pixels.dim(1), std::vector<uint8_t>(pixels.nbytes())};
  std::memcpy(image.rgb.data(), pixels.data(), image.rgb.size());
  return ImageProcessor::from_pretrained(info.path).process({&image, 1});
}

PixelValues stored(const SafetensorsFile& file) {
  const TensorView values = file.tensor("pixel_values");
  const TensorView grids = file.tensor("image_grid_thw");
  if (!is_compute_dtype(values.dtype()) || values.rank() != 2) {
    fail(file.path(), "pixel_values: float32, bfloat16 or float16 [patches, width]",
         describe("pixel_values", values));
  }
  if (!is_integer(grids) || grids.rank() != 2 || grids.dim(1) != 3) {
    fail(file.path(), "image_grid_thw: int64 or int32 [images, 3]",
         describe("image_grid_thw", grids));
  }
  PixelValues result;
  result.patch_width = values.dim(1);
  append_floats(values, result.values);
  std::vector<int64_t> sizes;
  append_integers(grids, sizes);
  for (size_t i = 0; i < sizes.size(); i += 3) {
    result.grids.push_back({sizes[i], sizes[i + 1], sizes[i + 2]});
  }
  return result;
}

}  // namespace

void require_vision(const std::string& what, const ModelInfo& info) {
  if (info.vision) return;
  throw Unsupported(str_cat(what, ": ", info.path, " is a ", info.model_type,
                            " model and reads text alone; name a vision model with --model"));
}

PixelValues read_images(const std::vector<std::string>& files, const ModelInfo& info) {
  std::vector<Image> images;
  for (const std::string& file : files) images.push_back(load_image(file));
  return ImageProcessor::from_pretrained(info.path).process(images);
}

std::string with_image_places(const std::string& prompt, size_t num_images,
                              const Tokenizer& tokenizer, const ModelInfo& info) {
  if (num_images == 0) return prompt;
  const auto token = [&](TokenId id) {
    const std::optional<std::string> text = tokenizer.id_to_token(id);
    if (text) return *text;
    throw CheckpointError(str_cat(info.path, ": config.json names token ", id,
                                  " for images, tokenizer.json has none of this id; the tokenizer "
                                  "does not belong to the model, fetch it again"));
  };
  const std::string image = token(info.vision->image);
  if (prompt.find(image) != prompt.npos) return prompt;
  std::string places;
  for (size_t i = 0; i < num_images; ++i) {
    places += token(info.vision->start) + image + token(info.vision->end);
  }
  return places + prompt;
}

PixelValues read_image_tensors(const std::filesystem::path& file, bool from_image,
                               const TokenBatch& batch, const ModelInfo& info) {
  if (from_image) require_vision("--from-image", info);
  if (!info.vision) return {};
  const SafetensorsFile input = SafetensorsFile::open(file);
  if (from_image) return processed(input, info);
  if (input.find("pixel_values") != nullptr || input.find("image_grid_thw") != nullptr) {
    return stored(input);
  }
  const auto places =
      std::count(batch.token_ids.begin(), batch.token_ids.end(), info.vision->image);
  if (places == 0) return {};
  throw InvalidArgument(
      str_cat(file.string(), ": input_ids hold ", places, " image tokens (id ", info.vision->image,
              "), but there are no pixel_values with image_grid_thw; add them, or "
              "image_u8 with --from-image"));
}

}  // namespace cadre::cli

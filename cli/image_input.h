// Images of a command: files behind --image, or tensors beside input_ids.
#pragma once

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/image_processor.h"
#include "cadre/model.h"
#include "cadre/tokenizer.h"
#include "session.h"

namespace cadre::cli {

/// Throws Unsupported when the model takes no images; `what` names the option.
void require_vision(const std::string& what, const ModelInfo& info);

/// The files' pictures, processed as the model wants them.
PixelValues read_images(const std::vector<std::string>& files, const ModelInfo& info);

/// `prompt` with a place for each image: where it names the model's image token, as it is, else all
/// images before it.
std::string with_image_places(const std::string& prompt, size_t num_images,
                              const Tokenizer& tokenizer, const ModelInfo& info);

/// `pixel_values` [patches, width] with `image_grid_thw` [images, 3] of a safetensors file; with
/// `from_image`, image_u8 [height, width, 3] in their place, which is processed here. For text
/// models nothing, and Unsupported with `from_image`. Throws CheckpointError naming file and tensor
/// for one that is absent or unfit; InvalidArgument when `batch` has placeholders and there are no
/// images.
PixelValues read_image_tensors(const std::filesystem::path& file, bool from_image,
                               const TokenBatch& batch, const ModelInfo& info);

}  // namespace cadre::cli

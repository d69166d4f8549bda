#include "io/checkpoint.h"

#include <algorithm>
#include <functional>
#include <nlohmann/json.hpp>
#include <set>
#include <system_error>
#include <utility>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/file_handle.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

constexpr const char* kSingleFile = "model.safetensors";
constexpr const char* kIndexFile = "model.safetensors.index.json";

// A shard must lie in the folder itself: an index from elsewhere may not make us open other files,
// nor write control characters to a terminal.
bool is_plain_file_name(std::string_view name) {
  const auto is_refused = [](char c) {
    return c == '/' || c == '\\' || (c >= 0 && c < ' ') || c == '\x7f';
  };
  return !name.empty() && name != "." && name != ".." &&
         std::none_of(name.begin(), name.end(), is_refused);
}

using WeightMap = std::map<std::string, std::string>;

WeightMap read_index(const fs::path& path) {
  const ConfigReader index(read_json_file(path), path.string());
  const ConfigReader map_reader = index.object("weight_map");
  WeightMap map;
  for (const auto& [name, file] : map_reader.json().get_ref<const Json::object_t&>()) {
    if (!file.is_string() || !is_plain_file_name(file.get_ref<const std::string&>())) {
      throw CheckpointError(
          str_cat(path.string(), ": tensor ", quote(name),
                  ": expected the name of a file in the same folder, got ",
                  file.is_string() ? quote(file.get_ref<const std::string&>()) : file.type_name(),
                  "; correct the index or fetch it again"));
    }
    map.emplace(name, file.get<std::string>());
  }
  if (map.empty()) {
    throw CheckpointError(str_cat(path.string(), ": expected tensors in weight_map, got none; ",
                                  "fetch the index again"));
  }
  return map;
}

[[noreturn]] void fail_without_weights(const fs::path& folder) {
  std::error_code ignored;
  const bool has_pickle = fs::exists(folder / "pytorch_model.bin", ignored) ||
                          fs::exists(folder / "pytorch_model.bin.index.json", ignored);
  throw CheckpointError(str_cat("open checkpoint: ", folder.string(), ": no weights: looked for ",
                                kSingleFile, " and ", kIndexFile,
                                has_pickle
                                    ? "; pytorch_model.bin is not read: convert it to safetensors"
                                    : "; fetch the model again, weights included"));
}

SafetensorsFile open_shard(const fs::path& folder, const std::string& file, const WeightMap& map) {
  if (!is_there(folder / file)) {
    const auto holds = [&](const auto& item) { return item.second == file; };
    const auto first = std::find_if(map.begin(), map.end(), holds);
    throw CheckpointError(str_cat("open checkpoint: ", quote((folder / file).string()),
                                  " is missing; ", kIndexFile, " places ",
                                  std::count_if(map.begin(), map.end(), holds), " tensors in it (",
                                  quote(first->first), ", ...); fetch the file"));
  }
  return SafetensorsFile::open(folder / file);
}

}  // namespace

Checkpoint Checkpoint::open(const fs::path& folder) {
  std::error_code ignored;
  if (!fs::is_directory(folder, ignored)) {
    throw CheckpointError(str_cat("open checkpoint: ", folder.string(),
                                  ": expected a folder with config.json and weights, got ",
                                  fs::exists(folder, ignored) ? "a file" : "nothing there",
                                  "; check the path"));
  }
  Checkpoint checkpoint;
  checkpoint.folder_ = folder;
  const fs::path config = folder / "config.json";
  checkpoint.config_ =
      std::make_shared<const ConfigReader>(read_json_file(config), config.string());
  const fs::path generation = folder / "generation_config.json";
  if (is_there(generation))
    checkpoint.generation_config_.emplace(read_json_file(generation), generation.string());

  // Transformers looks in this order too.
  if (is_there(folder / kSingleFile)) {
    checkpoint.add_shards({kSingleFile}, {});
  } else if (is_there(folder / kIndexFile)) {
    const WeightMap map = read_index(folder / kIndexFile);
    std::set<std::string> files;
    for (const auto& item : map) files.insert(item.second);
    checkpoint.add_shards(files, map);
  } else {
    fail_without_weights(folder);
  }
  return checkpoint;
}

void Checkpoint::add_shards(const std::set<std::string>& files,
                            const std::map<std::string, std::string>& map) {
  const auto shards = std::make_shared<std::vector<SafetensorsFile>>();
  for (const std::string& file : files) {
    const SafetensorsFile& shard = shards->emplace_back(open_shard(folder_, file, map));
    for (const SafetensorsEntry& entry : shard.header().entries)
      tensors_.push_back({entry.name, file, shard.view(entry)});
    mapped_bytes_ += shard.file_bytes();
    maps_.push_back(shard.map());
  }
  owner_ = shards;
  std::stable_sort(tensors_.begin(), tensors_.end(),
                   [](const auto& a, const auto& b) { return a.name < b.name; });
  index_tensors();
  if (!map.empty()) check_places(map);
}

void Checkpoint::release(const void* data, size_t bytes) const {
  const std::span part(static_cast<const std::byte*>(data), bytes);
  for (const auto& map : maps_) {
    const std::byte* begin = map->bytes().data();
    const std::byte* end = begin + map->bytes().size();
    const std::less_equal<const std::byte*> in_order;
    if (in_order(begin, part.data()) && in_order(part.data() + part.size(), end)) {
      return map->release(part);
    }
  }
}

void Checkpoint::index_tensors() {
  for (size_t i = 0; i < tensors_.size(); ++i) {
    const CheckpointTensor& tensor = tensors_[i];
    const auto [slot, is_new] = index_.emplace(tensor.name, i);
    if (!is_new) {
      throw CheckpointError(str_cat("open checkpoint: ", folder_.string(), ": tensor ",
                                    quote(tensor.name), " is in two files, ",
                                    quote(tensors_[slot->second].file), " and ", quote(tensor.file),
                                    "; fetch the model again"));
    }
  }
}

void Checkpoint::check_places(const std::map<std::string, std::string>& map) const {
  for (const auto& [name, file] : map) {
    const CheckpointTensor* tensor = find(name);
    if (tensor == nullptr) {
      throw CheckpointError(str_cat("open checkpoint: ", quote((folder_ / file).string()),
                                    ": tensor ", quote(name), " is missing; ", kIndexFile,
                                    " places it there; fetch both files again"));
    }
    if (tensor->file != file) {
      throw CheckpointError(str_cat("open checkpoint: ", folder_.string(), ": tensor ", quote(name),
                                    " is in ", quote(tensor->file), ", but ", kIndexFile,
                                    " places it in ", quote(file), "; fetch both files again"));
    }
  }
}

const CheckpointTensor* Checkpoint::find(std::string_view name) const {
  const auto found = index_.find(name);
  return found == index_.end() ? nullptr : &tensors_[found->second];
}

}  // namespace cadre

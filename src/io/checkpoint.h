// A checkpoint folder in the hub's layout: config.json and one safetensors file or several with an
// index.
#pragma once

#include <cstddef>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/tensor.h"
#include "io/file_map.h"
#include "io/json.h"
#include "io/safetensors.h"

namespace cadre {

/// A folder as it is; else a hub id ("owner/name") looked up in the local hub cache: $HF_HUB_CACHE,
/// $HF_HOME/hub, $XDG_CACHE_HOME/huggingface/hub, ~/.cache/huggingface/hub (the first that is set),
/// at refs/main or `revision` (a branch, tag or commit).
/// Throws CheckpointError saying where was looked and how to get the model. Refuses ids and
/// revisions that would leave the cache ("..", absolute paths).
std::filesystem::path resolve_model_path(const std::string& path_or_id,
                                         const std::string& revision = "");

struct CheckpointTensor {
  std::string name;
  std::string file;  // the shard's file name
  TensorView view;
};

class Checkpoint {
 public:
  /// Maps all shards and checks them against the index: a shard that is missing, a tensor that the
  /// index places elsewhere, that is in two shards or in no shard is a CheckpointError that names
  /// it. A tensor that a shard holds and the index does not list is taken as it is. A folder
  /// without weights is one too, and says what was looked for.
  static Checkpoint open(const std::filesystem::path& folder);

  const std::filesystem::path& folder() const { return folder_; }
  const ConfigReader& config() const { return *config_; }
  /// generation_config.json; empty when there is none.
  const std::optional<ConfigReader>& generation_config() const { return generation_config_; }

  const std::vector<CheckpointTensor>& tensors() const { return tensors_; }  // sorted by name
  const CheckpointTensor* find(std::string_view name) const;                 // null when absent
  size_t mapped_bytes() const { return mapped_bytes_; }
  /// Keeps all views valid.
  std::shared_ptr<const void> owner() const { return owner_; }
  /// Gives the memory of `bytes` bytes from `data` on, inside one shard, back to the system; they
  /// stay valid and are read again when needed. Memory of no shard is left alone.
  void release(const void* data, size_t bytes) const;

 private:
  // `weight_map`: tensor name -> file, from the index; empty without one.
  void add_shards(const std::set<std::string>& files,
                  const std::map<std::string, std::string>& weight_map);
  void index_tensors();
  void check_places(const std::map<std::string, std::string>& weight_map) const;

  std::filesystem::path folder_;
  std::shared_ptr<const ConfigReader> config_;
  std::optional<ConfigReader> generation_config_;
  std::vector<CheckpointTensor> tensors_;
  std::map<std::string, size_t, std::less<>> index_;
  size_t mapped_bytes_ = 0;
  std::vector<std::shared_ptr<const FileMap>> maps_;
  std::shared_ptr<const void> owner_;
};

}  // namespace cadre

// From a checkpoint with plain weights to one with quantised weights, in the hub's layout, for
// Cadre and Transformers alike (docs/quantization.md).
#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "cadre/model.h"

namespace cadre {

/// kFp8, kFp8Ue8m0: experts and dense linears as e4m3, a float32 or a power-of-two scale per block.
/// kFp4: experts as e2m1, two values a byte, a power-of-two scale per 32 of K.
enum class CheckpointFormat : uint8_t { kFp8, kFp8Ue8m0, kFp4 };

struct QuantizeOptions {
  CheckpointFormat format = CheckpointFormat::kFp8;
  /// Modules that stay as they are, beside those that always do: a name in the checkpoint's tree, a
  /// part of it from the left ("model.layers.0") or from the right ("o_proj"), cut at dots.
  std::vector<std::string> modules_to_not_convert = {};
  size_t shard_bytes = size_t{5} << 30;  // a file holds no more, unless one tensor is larger
  int num_threads = 0;                   // 0: default_num_threads()
  std::string revision = {};             // of a hub id; empty: refs/main
  /// Told of every tensor. What it throws ends the work, and nothing stays behind.
  ProgressCallback progress = {};
};

struct QuantizeReport {
  int64_t block_size = 0;     // rows and columns under one FP8 scale; 0 with kFp4
  int64_t num_quantized = 0;  // weights
  int64_t num_kept = 0;       // tensors that were copied
  size_t bytes_before = 0;    // of all tensors
  size_t bytes_after = 0;
  std::map<std::string, size_t> bytes_per_dtype;  // afterwards
  std::vector<std::string> not_converted;         // linears that stayed, as config.json names them
  std::vector<std::string> files;                 // that were written
};

/// Quantises the experts' weights of a model (packed ones too) and, but for kFp4, the linears of
/// attention, dense and shared MLPs. Embeddings, lm_head, norms, routers, gates of shared experts
/// and vision towers stay as they are. FP8 blocks are 128 x 128, or the largest of 64, 32, 16 and 8
/// that divides the sizes of the experts; a linear whose sizes the block does not divide stays as
/// it is, because Transformers would misread its last block. Reads one tensor at a time.
///
/// `folder` must not exist; it appears when everything is written and on the disk. Throws
/// CheckpointError for a checkpoint that would not load or holds a NaN or an infinity, Unsupported
/// for one that is quantised already or that the format cannot hold, InvalidArgument for a name
/// that fits no module and for a folder that exists, Error with both numbers when the disk has not
/// enough space.
QuantizeReport quantize_checkpoint(const std::string& model, const std::filesystem::path& folder,
                                   const QuantizeOptions& options = {});

}  // namespace cadre

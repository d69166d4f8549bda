// A vision transformer as Qwen3-VL has it: patches with learned and rotary positions, blocks in
// which every patch of a picture sees every other, and mergers that make one text token of each
// square of patches. Besides the last block's, features of chosen earlier blocks come out ("deep
// stack", arXiv 2406.04334).
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "cadre/activation.h"
#include "cadre/stream.h"
#include "cadre/workspace.h"
#include "dense/dense_ops.h"

namespace cadre {

struct VisionConfig {
  int64_t patch_width = 0;  // values of a patch
  int64_t hidden_size = 0;
  int64_t num_heads = 0;
  int64_t intermediate_size = 0;
  int64_t out_hidden_size = 0;  // the text model's
  int64_t merge_size = 1;       // patches of a side that become one token
  int64_t table_side = 1;       // of the learned positions
  Activation activation = Activation::kGeluTanh;
  double rope_theta = 10000;
  float norm_eps = 1e-6f;
  DType compute_dtype = DType::kF32;

  int64_t head_dim() const { return hidden_size / num_heads; }
  int64_t patches_per_token() const { return merge_size * merge_size; }
};

struct LayerNormWeights {
  TensorView weight;
  TensorView bias;
};

struct VisionBlock {
  LayerNormWeights attention_norm;
  LinearWeights q, k, v, o;  // [hidden_size, hidden_size]
  LayerNormWeights mlp_norm;
  LinearWeights up;    // [intermediate_size, hidden_size]
  LinearWeights down;  // [hidden_size, intermediate_size]
};

/// From patches_per_token() neighbouring patches to a text token.
struct PatchMerger {
  bool norms_merged = false;  // the norm goes over all patches of a token at once
  LayerNormWeights norm;
  LinearWeights up;    // [merged, merged] with merged = patches_per_token() * hidden_size
  LinearWeights down;  // [out_hidden_size, merged]
};

struct VisionWeights {
  LinearWeights patch_embed;  // [hidden_size, patch_width]
  TensorView positions;       // [table_side^2, hidden_size]
  std::vector<VisionBlock> blocks;
  PatchMerger merger;
  std::vector<int64_t> deepstack_blocks;       // ascending
  std::vector<PatchMerger> deepstack_mergers;  // one for each of them
};

class VisionTower {
 public:
  /// `ops`: null for a tower that is looked at and not run.
  VisionTower(const VisionConfig& config, VisionWeights weights, DenseOps* ops);

  const VisionConfig& config() const { return config_; }
  /// The last block's and those of the deep stack.
  int64_t num_features() const {
    return 1 + static_cast<int64_t>(weights_.deepstack_mergers.size());
  }

  size_t workspace_bytes(int64_t num_patches, int num_threads) const;

  /// One picture of height x width patches, both multiples of merge_size. `pixels`: [height *
  /// width, patch_width] on the host, the patches of a token after each other. features:
  /// num_features() tensors [height * width / patches_per_token(), out_hidden_size] in the compute
  /// dtype; the first is what stands in the text, the (i+1)-th is added after its i-th layer.
  void forward(std::span<const float> pixels, int64_t height, int64_t width,
               std::span<const MutableTensorView> features, Workspace& workspace,
               const Stream& stream) const;

 private:
  struct Run;

  VisionConfig config_;
  VisionWeights weights_;
  DenseOps* ops_;
};

}  // namespace cadre

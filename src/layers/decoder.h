// A decoder-only transformer: embedding, layers of attention and MLP or MoE, norm, output head.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <variant>
#include <vector>

#include "layers/attention_block.h"
#include "layers/moe_block.h"
#include "layers/residual.h"
#include "layers/rope.h"
#include "layers/step_plan.h"

namespace cadre {

struct DecoderLayer {
  TensorView input_norm;
  std::unique_ptr<AttentionBlock> attention;
  TensorView post_attention_norm;
  std::variant<Mlp, MoeBlock> feed_forward;
  HyperConnection attention_connection = {};
  HyperConnection feed_forward_connection = {};
};

struct DecoderWeights {
  TensorView embedding;  // [vocab_size, hidden_size]
  std::vector<DecoderLayer> layers;
  TensorView norm;
  LinearWeights head;  // [vocab_size, hidden_size]
  HyperConnection head_connection = {};
  std::vector<Tensor> copies;  // what views above point to, where the files hold another dtype
};

struct DecoderConfig {
  int64_t vocab_size = 0;
  int64_t hidden_size = 0;
  float norm_eps = 1e-6f;
  float embedding_scale = 1;
  float logits_scale = 1;
  DType compute_dtype = DType::kF32;
  std::vector<RopeConfig> ropes = {};     // an attention names the one it takes
  std::optional<HyperConfig> hyper = {};  // plain residuals without
};

/// Tokens of a step that are parts of images.
struct StepImages {
  TensorView rows;                   // [n] i32, where they stand among the step's tokens
  std::vector<TensorView> features;  // VisionTower's: each [n, hidden_size] in the compute dtype
};

/// One step: at most reserved_tokens() new tokens.
struct DecoderStep {
  std::span<const int32_t> token_ids;
  std::span<const SequenceSpan> sequences;  // cover all tokens, in order
  std::span<const LogitsRow> wanted;        // ascending in both members
  MutableTensorView logits;                 // [rows, vocab_size] f32
  bool has_inputs = false;  // a draw left them on the device: see StepPlan::next_step()
  // With M-RoPE: [kRopeAxes, num_tokens]; empty: each token's place in its sequence on all axes.
  std::span<const int32_t> rope_positions = {};
  const StepImages* images = nullptr;
};

class Decoder {
 public:
  Decoder(const DecoderConfig& config, DecoderWeights weights, DenseOps& ops);

  const DecoderConfig& config() const { return config_; }
  int64_t num_layers() const { return static_cast<int64_t>(weights_.layers.size()); }
  const DecoderLayer& layer(int64_t i) const { return weights_.layers[static_cast<size_t>(i)]; }
  /// Of every layer.
  std::vector<CacheLayout> cache_layouts() const;

  size_t workspace_bytes(int64_t max_tokens, int num_threads) const;
  /// Memory of steps of up to max_tokens tokens, beside the workspace.
  void reserve(int64_t max_tokens, const Stream& stream);
  int64_t reserved_tokens() const { return plan_.reserved_tokens(); }

  /// Takes a step's ids, positions and slots; the step before must be done.
  void set_inputs(const DecoderStep& step, const Stream& stream);
  NextStep next_step() const { return plan_.next_step(); }
  /// Brings the inputs to the device, runs the step and stores its keys and values; lengths of the
  /// cache are the caller's. On a GPU it may be recorded, and serves later steps with the same
  /// numbers of tokens and sequences, the same `wanted`, logits and cache memory.
  void compute(const DecoderStep& step, KvStore& cache, Workspace& workspace, const Stream& stream,
               MoeObserver* observer);

 private:
  void turn(const ForwardContext& context);
  // The rows of images get their features: the first in place of the embedding, the others after
  // the layers before.
  void add_images(const StepImages& images, size_t feature, MutableTensorView residual,
                  const Stream& stream) const;
  void run_layers(const StepImages* images, Residual& residual,
                  const ForwardContext& context) const;
  void feed_forward(const DecoderLayer& layer, int64_t index, MutableTensorView x,
                    MutableTensorView routed, Residual& residual,
                    const ForwardContext& context) const;
  void write_logits(const DecoderStep& step, Residual& residual,
                    const ForwardContext& context) const;

  DecoderConfig config_;
  DecoderWeights weights_;
  DenseOps& ops_;
  struct Rope {
    RopeFrequencies frequencies;
    Tensor inverse;  // frequencies.inverse on the ops' device
    Tensor axes;     // frequencies.axes, where there are some
  };
  std::vector<Rope> ropes_;
  std::vector<RopeAngles> angles_;  // of the step under way
  StepPlan plan_;
};

}  // namespace cadre

// What a family's file is written with: from config values and tensor names to blocks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/attention.h"
#include "layers/decoder.h"
#include "layers/vision_tower.h"
#include "models/quantized_weights.h"
#include "models/text_config.h"
#include "models/weight_loader.h"

namespace cadre {

/// A family's model, ready to run.
struct BuiltModel {
  TextConfig text;
  DecoderWeights weights;
  std::vector<std::unique_ptr<ExpertsGroup>> groups;  // one per sub-config that has experts
  int64_t num_moe_layers = 0;
  std::optional<VisionTower> vision;
  VisionTokens vision_tokens;             // with `vision`
  std::vector<std::string> sub_configs;   // those without experts
  std::vector<RopeConfig> ropes = {};     // empty: text.rope
  std::optional<HyperConfig> hyper = {};  // plain residuals without
  bool needs_compressed_ops = false;      // of DenseOps
};

/// Names of a MoE layer's tensors under its prefix.
struct MoeNames {
  const char* gate = "gate_proj";  // of one expert: experts.<e>.<this>.weight
  const char* up = "up_proj";
  const char* down = "down_proj";
  const char* packed_gate_up = "experts.gate_up_proj";  // of all experts; biases: <this>_bias
  const char* packed_down = "experts.down_proj";
  const char* router = "gate";            // <this>.weight and, with a bias, <this>.bias
  const char* correction_bias = nullptr;  // [num_experts]; null: none
  const char* expert_table = nullptr;     // [vocab_size, top_k] integers: a token id's experts
};

/// Names of the tensors outside the layers.
struct TopNames {
  std::string embedding = "model.embed_tokens.weight";
  std::string norm = "model.norm.weight";
  std::string head = "lm_head.weight";
};

/// A MoE layer, shared expert aside. Of `experts` the builder fills in hidden size and activation.
struct MoeOptions {
  ExpertsConfig experts = {};
  RouterOptions router = {};
  bool router_bias = false;  // added to the logits
  MoeNames names = {};
};

class ModelBuilder {
 public:
  /// `progress` may be empty; it is told of every layer.
  ModelBuilder(const ConfigReader& config, const CheckpointQuantization& quantization,
               WeightLoader& weights, DType compute_dtype, Device device,
               const ProgressCallback& progress)
      : config_(config),
        weights_(weights),
        quantized_(weights, quantization, compute_dtype),
        compute_dtype_(compute_dtype),
        device_(device),
        progress_(progress) {}

  const ConfigReader& config() const { return config_; }
  WeightLoader& weights() { return weights_; }
  Device device() const { return device_; }

  /// Reads the common keys and tensors: model.embed_tokens, model.norm and lm_head (or, when tied,
  /// the embedding again).
  void begin(const TextConfig& text, const std::string& prefix = "model.");
  void begin(const TextConfig& text, const TopNames& names);
  const TextConfig& text() const { return model_.text; }

  TensorView norm(const std::string& name, int64_t width);
  /// A small tensor in float32, whatever the file and the compute dtype are.
  TensorView float32(const std::string& name, const Dims& shape, std::string_view part);
  /// `prefix`.weight and, with `bias`, `prefix`.bias; as stored, plain or quantised.
  LinearWeights linear(const std::string& prefix, int64_t out, int64_t in, bool bias,
                       std::string_view part);
  /// The matrix `name` of a linear layer without bias.
  LinearWeights matrix(const std::string& name, int64_t out, int64_t in, std::string_view part);
  /// A matrix that is not, or not only, used as a linear layer: dequantised where it is quantised.
  TensorView plain(const std::string& name, const Dims& shape, std::string_view part) {
    return quantized_.take_plain(name, shape, part);
  }
  /// q_proj, k_proj, v_proj, o_proj and, when the config has them, q_norm, k_norm and sinks under
  /// `prefix`.
  std::unique_ptr<AttentionBlock> attention(const std::string& prefix, AttentionConfig config,
                                            bool qkv_bias, bool o_bias);
  /// The common attention config of the family; refine before attention().
  AttentionConfig attention_config() const;
  /// gate_proj, up_proj, down_proj under `prefix`.
  Mlp mlp(const std::string& prefix, int64_t intermediate_size, std::string_view part = "mlp");
  /// Router and experts under `prefix`: one tensor per expert and projection, or packed ones where
  /// the checkpoint has them; plain or quantised.
  MoeBlock moe(const std::string& prefix, const MoeOptions& options,
               std::optional<SharedExpert> shared_expert = {}, const std::string& sub_config = "");

  DType compute_dtype() const { return compute_dtype_; }
  void add_vision(const VisionConfig& config, VisionWeights weights, const VisionTokens& tokens);
  /// Names a sub-config that has no experts.
  void add_sub_config(const std::string& name) { model_.sub_configs.push_back(name); }

  void add_layer(DecoderLayer layer);
  /// Layers that the checkpoint holds beyond the model's own, up to `count`, are not needed
  /// (multi-token prediction).
  void ignore_extra_layers(int64_t count, const std::string& prefix = "model.layers.");
  /// What families set beside the common parts: ropes, hyper-connections.
  BuiltModel& model() { return model_; }
  BuiltModel finish() { return std::move(model_); }

 private:
  // They may change what `config` says of the layout.
  struct LoadedExperts {
    std::shared_ptr<const ExpertsWeights> weights;
    ActivationScheme activations = ActivationScheme::kNone;
  };
  LoadedExperts experts(const std::string& prefix, ExpertsConfig& config, const MoeNames& names);
  LoadedExperts packed_experts(const std::string& prefix, ExpertsConfig& config,
                               const MoeNames& names);
  Router router(const std::string& prefix, const MoeOptions& options);
  TensorView expert_table(const std::string& name, const MoeOptions& options);
  void require_same_dtype(const std::string& name, const TensorView& tensor,
                          const std::string& other_name, const TensorView& other);
  void require_same_form(const std::string& name, const StoredWeight& weight,
                         const std::string& others, const StoredWeight& other);
  ExpertsGroup& group(const std::string& sub_config, const ExpertsConfig& config,
                      const LoadedExperts& experts, const std::string& where);

  const ConfigReader& config_;
  WeightLoader& weights_;
  QuantizedWeights quantized_;
  DType compute_dtype_;
  Device device_;
  const ProgressCallback& progress_;
  BuiltModel model_;
};

}  // namespace cadre

// What a family's file is written with: from config values and tensor names to blocks.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "layers/attention.h"
#include "layers/decoder.h"
#include "models/text_config.h"
#include "models/weight_loader.h"

namespace cadre {

/// A family's model, ready to run.
struct BuiltModel {
  TextConfig text;
  DecoderWeights weights;
  std::vector<std::unique_ptr<ExpertsGroup>> groups;  // one per sub-config that has experts
  int64_t num_moe_layers = 0;
};

/// The last part of the names of one expert's projections.
struct ExpertNames {
  const char* gate = "gate_proj";
  const char* up = "up_proj";
  const char* down = "down_proj";
};

/// A MoE layer, shared expert aside.
struct MoeOptions {
  int64_t num_experts = 0;
  int64_t top_k = 0;
  int64_t intermediate_size = 0;
  RouterOptions router = {};
  ExpertNames names = {};
};

class ModelBuilder {
 public:
  /// `progress` may be empty; it is told of every layer.
  ModelBuilder(const ConfigReader& config, WeightLoader& weights, DType compute_dtype,
               Device device, const ProgressCallback& progress)
      : config_(config),
        weights_(weights),
        compute_dtype_(compute_dtype),
        device_(device),
        progress_(progress) {}

  const ConfigReader& config() const { return config_; }
  WeightLoader& weights() { return weights_; }

  /// Reads the common keys and tensors: model.embed_tokens, model.norm and lm_head (or, when tied,
  /// the embedding again).
  void begin(const TextConfig& text, const std::string& prefix = "model.");
  const TextConfig& text() const { return model_.text; }

  TensorView norm(const std::string& name, int64_t width);
  /// `prefix`.weight and, with `bias`, `prefix`.bias
  LinearWeights linear(const std::string& prefix, int64_t out, int64_t in, bool bias,
                       std::string_view part);
  /// q_proj, k_proj, v_proj, o_proj and, when the config has them, q_norm and k_norm under
  /// `prefix`.
  std::unique_ptr<AttentionBlock> attention(const std::string& prefix, AttentionConfig config,
                                            bool qkv_bias, bool o_bias);
  /// The common attention config of the family; refine before attention().
  AttentionConfig attention_config() const;
  /// gate_proj, up_proj, down_proj under `prefix`.
  Mlp mlp(const std::string& prefix, int64_t intermediate_size, std::string_view part = "mlp");
  /// gate and experts under `prefix`: one tensor per expert and projection, or packed
  /// (experts.gate_up_proj, experts.down_proj).
  MoeBlock moe(const std::string& prefix, const MoeOptions& options,
               std::optional<SharedExpert> shared_expert = {}, const std::string& sub_config = "");

  void add_layer(DecoderLayer layer);
  BuiltModel finish() { return std::move(model_); }

 private:
  std::shared_ptr<const ExpertsWeights> experts(const std::string& prefix,
                                                const ExpertsConfig& config,
                                                const ExpertNames& names);
  std::shared_ptr<const ExpertsWeights> packed_experts(const std::string& prefix,
                                                       const ExpertsConfig& config);
  ExpertsGroup& group(const std::string& sub_config, const ExpertsConfig& config,
                      StorageFormat format, const std::string& where);

  const ConfigReader& config_;
  WeightLoader& weights_;
  DType compute_dtype_;
  Device device_;
  const ProgressCallback& progress_;
  BuiltModel model_;
};

}  // namespace cadre

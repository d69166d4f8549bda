// Qwen3VLMoeForConditionalGeneration (Qwen3-VL-30B-A3B): a Qwen3-MoE text model with interleaved
// M-RoPE, and a vision tower whose features take the place of image tokens and are added after the
// first text layers. On the hub its experts lie transposed; Transformers saves them as (E, N, K).
#include <algorithm>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "models/qwen_moe.h"

namespace cadre {
namespace {

constexpr char kTextConfig[] = "text_config";
constexpr char kVisionConfig[] = "vision_config";
constexpr std::string_view kPart = "vision";

std::array<int64_t, 3> read_mrope_section(const ConfigReader& config) {
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!config.has(key) || !config.object(key).has("mrope_section")) continue;
    const ConfigReader parameters = config.object(key);
    const std::vector<int64_t> values = parameters.integers("mrope_section");
    const bool fits =
        values.size() == 3 &&
        std::all_of(values.begin(), values.end(), [](int64_t v) { return v >= 0 && v <= 1 << 16; });
    if (!fits) {
      config_error(config, str_cat(parameters.path("mrope_section"),
                                   ": expected three sizes of at most 65536, got ", join(values)));
    }
    return {values[0], values[1], values[2]};
  }
  return {24, 20, 20};
}

TextConfig read_text(const ConfigReader& config) {
  const ConfigReader part = config.object(kTextConfig);
  TextConfig text = read_text_config(part, {.norm_eps = 1e-6, .rope_theta = 500000});
  text.tie_word_embeddings = config.boolean_or("tie_word_embeddings", false);
  text.rope.mrope_section = read_mrope_section(part);
  return text;
}

VisionConfig read_vision(const ConfigReader& config, const TextConfig& text, DType compute_dtype) {
  VisionConfig vision;
  const int64_t patch = config.integer_or("patch_size", 16, 1, 4096);
  vision.patch_width = config.integer_or("in_channels", 3, 1, 64) *
                       config.integer_or("temporal_patch_size", 2, 1, 64) * patch * patch;
  vision.hidden_size = read_size(config, "hidden_size");
  vision.num_heads = read_size(config, "num_heads");
  vision.intermediate_size = read_size(config, "intermediate_size");
  vision.out_hidden_size = read_size(config, "out_hidden_size");
  vision.merge_size = config.integer_or("spatial_merge_size", 2, 1, 64);
  vision.activation = parse_activation(config.text_or("hidden_act", "gelu_pytorch_tanh"));
  vision.compute_dtype = compute_dtype;
  if (config.has("rope_parameters")) {
    vision.rope_theta = config.object("rope_parameters").number_or("rope_theta", vision.rope_theta);
  }
  const int64_t table = config.integer_or("num_position_embeddings", 2304, 1, 1 << 28);
  while ((vision.table_side + 1) * (vision.table_side + 1) <= table) ++vision.table_side;
  if (vision.table_side * vision.table_side != table) {
    config_error(config, str_cat(config.path("num_position_embeddings"),
                                 ": expected the square of a number, got ", table));
  }
  if (vision.hidden_size % (4 * vision.num_heads) != 0) {
    config_error(config,
                 str_cat(config.path("hidden_size"), " (", vision.hidden_size,
                         ") must be a multiple of four times num_heads (", vision.num_heads, ")"));
  }
  if (vision.out_hidden_size != text.hidden_size) {
    config_error(config,
                 str_cat(config.path("out_hidden_size"), " (", vision.out_hidden_size,
                         ") must be the text model's hidden_size (", text.hidden_size, ")"));
  }
  if (!(vision.rope_theta >= 1e-6 && vision.rope_theta <= 1e30)) {
    config_error(config, str_cat(config.path("rope_parameters.rope_theta"),
                                 ": expected a number from 1e-6 to 1e30, got ", vision.rope_theta));
  }
  return vision;
}

// Reads the tensors of the tower, under model.visual.
class TowerReader {
 public:
  TowerReader(ModelBuilder& builder, const VisionConfig& vision)
      : builder_(builder), vision_(vision) {}

  VisionWeights read(const ConfigReader& config) {
    VisionWeights weights;
    const auto depth = config.integer("depth", 1, 100000);
    weights.patch_embed = patch_embed(config);
    weights.positions = builder_.weights().take(
        name("pos_embed.weight"), {vision_.table_side * vision_.table_side, vision_.hidden_size},
        kPart);
    for (int64_t l = 0; l < depth; ++l) weights.blocks.push_back(block(str_cat("blocks.", l, ".")));
    weights.merger = merger("merger.", false);
    if (config.has("deepstack_visual_indexes")) {
      weights.deepstack_blocks = config.integers("deepstack_visual_indexes");
    }
    int64_t before = -1;
    for (const int64_t l : weights.deepstack_blocks) {
      if (l <= before || l >= depth) {
        config_error(config, str_cat(config.path("deepstack_visual_indexes"),
                                     ": expected ascending blocks in [0, ", depth, "), got ",
                                     join(weights.deepstack_blocks)));
      }
      before = l;
      const size_t i = weights.deepstack_mergers.size();
      weights.deepstack_mergers.push_back(merger(str_cat("deepstack_merger_list.", i, "."), true));
    }
    return weights;
  }

 private:
  static std::string name(const std::string& rest) { return "model.visual." + rest; }

  LinearWeights linear(const std::string& prefix, int64_t out, int64_t in) {
    WeightLoader& weights = builder_.weights();
    return {builder_.plain(name(prefix + ".weight"), {out, in}, kPart),
            weights.take(name(prefix + ".bias"), {out}, kPart)};
  }

  // A convolution whose stride is its size: one product for each patch.
  LinearWeights patch_embed(const ConfigReader& config) {
    const int64_t patch = config.integer_or("patch_size", 16);
    const Dims shape{vision_.hidden_size, config.integer_or("in_channels", 3),
                     config.integer_or("temporal_patch_size", 2), patch, patch};
    WeightLoader& weights = builder_.weights();
    const TensorView kernel = weights.take(name("patch_embed.proj.weight"), shape, kPart);
    return {kernel.reshape({vision_.hidden_size, vision_.patch_width}),
            weights.take(name("patch_embed.proj.bias"), {vision_.hidden_size}, kPart)};
  }

  LayerNormWeights norm(const std::string& prefix, int64_t width) {
    WeightLoader& weights = builder_.weights();
    return {weights.take(name(prefix + "weight"), {width}, kPart),
            weights.take(name(prefix + "bias"), {width}, kPart)};
  }

  VisionBlock block(const std::string& prefix) {
    const int64_t hidden = vision_.hidden_size;
    const LinearWeights qkv = linear(prefix + "attn.qkv", 3 * hidden, hidden);
    const auto third = [&](int64_t i) {
      if (qkv.weight.data() == nullptr || qkv.bias.data() == nullptr) return qkv;  // a fault
      return LinearWeights{qkv.weight.slice(i * hidden, (i + 1) * hidden),
                           qkv.bias.slice(i * hidden, (i + 1) * hidden)};
    };
    VisionBlock block;
    block.attention_norm = norm(prefix + "norm1.", hidden);
    block.q = third(0);
    block.k = third(1);
    block.v = third(2);
    block.o = linear(prefix + "attn.proj", hidden, hidden);
    block.mlp_norm = norm(prefix + "norm2.", hidden);
    block.up = linear(prefix + "mlp.linear_fc1", vision_.intermediate_size, hidden);
    block.down = linear(prefix + "mlp.linear_fc2", hidden, vision_.intermediate_size);
    return block;
  }

  PatchMerger merger(const std::string& prefix, bool norms_merged) {
    const int64_t merged = vision_.patches_per_token() * vision_.hidden_size;
    PatchMerger merger;
    merger.norms_merged = norms_merged;
    merger.norm = norm(prefix + "norm.", norms_merged ? merged : vision_.hidden_size);
    merger.up = linear(prefix + "linear_fc1", merged, merged);
    merger.down = linear(prefix + "linear_fc2", vision_.out_hidden_size, merged);
    return merger;
  }

  ModelBuilder& builder_;
  const VisionConfig& vision_;
};

// Whether the experts under `prefix` are (E, H, 2I) and (E, I, H). The shape of gate_up_proj says
// it; where H == 2I that of down_proj does, which then is not square.
bool are_transposed(ModelBuilder& builder, const std::string& prefix, const MoeOptions& moe) {
  const int64_t hidden = builder.text().hidden_size;
  const int64_t inner = moe.experts.intermediate_size;
  const bool by_down = hidden == 2 * inner;
  const CheckpointTensor* tensor = builder.weights().checkpoint().find(
      prefix + (by_down ? "experts.down_proj" : "experts.gate_up_proj"));
  const Dims transposed = by_down ? Dims{moe.experts.num_experts, inner, hidden}
                                  : Dims{moe.experts.num_experts, hidden, 2 * inner};
  return tensor != nullptr && tensor->view.shape() == transposed;
}

VisionTokens read_tokens(const ConfigReader& config, int64_t vocab_size) {
  const auto id = [&](const char* key, int64_t fallback) {
    return static_cast<TokenId>(config.integer_or(key, fallback, 0, vocab_size - 1));
  };
  return {id("image_token_id", 151655), id("vision_start_token_id", 151652),
          id("vision_end_token_id", 151653)};
}

}  // namespace

BuiltModel build_qwen3_vl_moe(ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  const ConfigReader part = config.object(kTextConfig);
  builder.begin(read_text(config), "model.language_model.");
  const TextConfig& text = builder.text();
  MoeOptions moe = qwen_moe_options(part);
  moe.router.normalize = true;
  const bool bias = part.boolean_or("attention_bias", false);
  const std::vector<bool> has_experts = qwen_moe_layers(part, text.num_layers);
  AttentionConfig attention = builder.attention_config();
  attention.qk_norm = QkNorm::kPerHead;

  const auto feed_forward = [&](int64_t l, const std::string& mlp) -> std::variant<Mlp, MoeBlock> {
    if (!has_experts[static_cast<size_t>(l)]) {
      return builder.mlp(mlp, read_size(part, "intermediate_size"));
    }
    moe.experts.is_transposed = are_transposed(builder, mlp, moe);
    return builder.moe(mlp, moe, {}, kTextConfig);
  };
  for (int64_t l = 0; l < text.num_layers; ++l) {
    const std::string layer = str_cat("model.language_model.layers.", l, ".");
    builder.add_layer({builder.norm(layer + "input_layernorm.weight", text.hidden_size),
                       builder.attention(layer + "self_attn.", attention, bias, bias),
                       builder.norm(layer + "post_attention_layernorm.weight", text.hidden_size),
                       feed_forward(l, layer + "mlp.")});
  }
  const ConfigReader vision_part = config.object(kVisionConfig);
  const VisionConfig vision = read_vision(vision_part, text, builder.compute_dtype());
  builder.add_vision(vision, TowerReader(builder, vision).read(vision_part),
                     read_tokens(config, text.vocab_size));
  builder.add_sub_config(kVisionConfig);
  return builder.finish();
}

}  // namespace cadre

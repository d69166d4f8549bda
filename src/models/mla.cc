#include "models/mla.h"

#include <cmath>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

// YaRN's longer context makes the softmax sharper by the square of its scale.
double softmax_scale(const RopeConfig& rope, int64_t key_dim) {
  const double plain = 1.0 / std::sqrt(static_cast<double>(key_dim));
  if (rope.type != RopeType::kYarn || rope.mscale_all_dim.value_or(0) == 0) return plain;
  const double scale = yarn_mscale(rope.factor, *rope.mscale_all_dim);
  return plain * scale * scale;
}

}  // namespace

MlaOptions read_mla(const ModelBuilder& builder) {
  const ConfigReader& config = builder.config();
  const TextConfig& text = builder.text();
  if (text.num_kv_heads != text.num_heads) {
    config_error(config, str_cat("num_key_value_heads: expected num_attention_heads (",
                                 text.num_heads, "), got ", text.num_kv_heads));
  }
  MlaOptions options;
  MlaConfig& mla = options.attention;
  mla.hidden_size = text.hidden_size;
  mla.num_heads = text.num_heads;
  mla.q_rank = config.is_null("q_lora_rank") ? 0 : read_size(config, "q_lora_rank");
  mla.rank = read_size(config, "kv_lora_rank");
  mla.nope_dim = read_size(config, "qk_nope_head_dim");
  mla.rope_dim = text.head_dim;
  mla.value_dim = read_size(config, "v_head_dim");
  mla.scale = static_cast<float>(softmax_scale(text.rope, mla.nope_dim + mla.rope_dim));
  const DenseOps* ops = find_dense_ops(builder.device().type);  // null: only inspected
  if (ops != nullptr && !ops->serves(LatentShape{mla.num_heads, mla.rank, mla.rope_dim})) {
    throw Unsupported(str_cat(config.origin(), ": latent attention with kv_lora_rank ", mla.rank,
                              " and qk_rope_head_dim ", mla.rope_dim, " does not run on ",
                              builder.device(), "; use --device cpu"));
  }
  options.bias = config.boolean_or("attention_bias", false);
  return options;
}

std::unique_ptr<AttentionBlock> build_mla(ModelBuilder& builder, const std::string& prefix,
                                          const MlaOptions& options) {
  const MlaConfig& mla = options.attention;
  const auto linear = [&](const char* name, int64_t out, int64_t in, bool bias) {
    return builder.linear(prefix + name, out, in, bias, "attention");
  };
  const int64_t q_width = mla.num_heads * (mla.nope_dim + mla.rope_dim);
  const int64_t kv_width = mla.num_heads * (mla.nope_dim + mla.value_dim);
  MlaWeights weights;
  if (mla.q_rank == 0) {
    weights.q = linear("q_proj", q_width, mla.hidden_size, false);
  } else {
    weights.q_a = linear("q_a_proj", mla.q_rank, mla.hidden_size, options.bias);
    weights.q_norm = builder.norm(prefix + "q_a_layernorm.weight", mla.q_rank);
    weights.q = linear("q_b_proj", q_width, mla.q_rank, false);
  }
  weights.kv_a =
      linear("kv_a_proj_with_mqa", mla.rank + mla.rope_dim, mla.hidden_size, options.bias);
  weights.kv_norm = builder.norm(prefix + "kv_a_layernorm.weight", mla.rank);
  // Its parts meet queries and values, head by head.
  weights.kv_b = builder.plain(prefix + "kv_b_proj.weight", {kv_width, mla.rank}, "attention");
  weights.o = linear("o_proj", mla.hidden_size, mla.num_heads * mla.value_dim, options.bias);
  return std::make_unique<MlaAttention>(mla, weights);
}

}  // namespace cadre

// What DeepSeek's families say alike about their attention (multi-head latent attention).
#pragma once

#include <memory>
#include <string>

#include "layers/mla_attention.h"
#include "models/model_builder.h"

namespace cadre {

struct MlaOptions {
  MlaConfig attention;
  bool bias = false;  // of q_a_proj, kv_a_proj_with_mqa and o_proj
};

/// q_lora_rank (null: queries without compression), kv_lora_rank, qk_nope_head_dim,
/// qk_rope_head_dim, v_head_dim, attention_bias. Throws Unsupported for sizes that the device does
/// not serve.
MlaOptions read_mla(const ModelBuilder& builder);

/// q_proj, or q_a_proj, q_a_layernorm and q_b_proj; kv_a_proj_with_mqa, kv_a_layernorm, kv_b_proj
/// and o_proj under `prefix`.
std::unique_ptr<AttentionBlock> build_mla(ModelBuilder& builder, const std::string& prefix,
                                          const MlaOptions& options);

}  // namespace cadre

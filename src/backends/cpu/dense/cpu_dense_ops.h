// The CPU's dense operations. Plain loops that the compiler vectorises, cut by rows over the thread
// pool; products go through the kernels that the experts use too.
#pragma once

#include "dense/dense_ops.h"

namespace cadre::cpu {

class CpuDenseOps final : public DenseOps {
 public:
  std::string_view instruction_set() const override;
  void linear(const TensorView& x, const LinearWeights& weights, MutableTensorView out,
              Workspace& workspace, const Stream& stream) override;
  size_t linear_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                int num_threads) const override;
  void embedding(const TensorView& ids, const TensorView& table, MutableTensorView out,
                 const Stream& stream) override;
  void gather_rows(const TensorView& x, const TensorView& rows, MutableTensorView out,
                   const Stream& stream) override;
  void rms_norm(const TensorView& x, const TensorView& weight, float eps, MutableTensorView out,
                const Stream& stream) override;
  void add(MutableTensorView y, const TensorView& x, const Stream& stream) override;
  void add_sigmoid_gated(MutableTensorView y, const TensorView& x, const TensorView& gate,
                         const Stream& stream) override;
  void scale(MutableTensorView x, float factor, const Stream& stream) override;
  void clamp(MutableTensorView x, float limit, const Stream& stream) override;
  void gated_activation(const TensorView& gate, const TensorView& up, Activation activation,
                        MutableTensorView out, const Stream& stream) override;
  void rope_angles(const TensorView& positions, const TensorView& inverse_frequencies, float scale,
                   MutableTensorView cos, MutableTensorView sin, const Stream& stream) override;
  void dynamic_rope_angles(const TensorView& positions, const TensorView& inverse_frequencies,
                           const DynamicNtk& ntk, MutableTensorView cos, MutableTensorView sin,
                           const Stream& stream) override;
  void rope(MutableTensorView x, const TensorView& cos, const TensorView& sin,
            const Stream& stream) override;
  void store_kv(const TensorView& x, const StepTokens& tokens, MutableTensorView cache,
                const Stream& stream) override;
  void attention(const AttentionArgs& args, Workspace& workspace, const Stream& stream) override;
  size_t attention_workspace_bytes(const AttentionShape& shape, int64_t max_tokens,
                                   int num_threads) const override;
  void linear_heads(const TensorView& x, const TensorView& weight, MutableTensorView out,
                    Workspace& workspace, const Stream& stream) override;
  size_t linear_heads_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                      int num_threads) const override;
  void finish_latent(const LatentRowArgs& args, const Stream& stream) override;
  void latent_attention(const LatentAttentionArgs& args, Workspace& workspace,
                        const Stream& stream) override;
  size_t latent_attention_workspace_bytes(const LatentShape& shape, int64_t max_rows,
                                          int num_threads) const override;
  void route(const TensorView& logits, const TensorView& correction_bias,
             const RouterOptions& options, MutableTensorView top_k_index,
             MutableTensorView top_k_weights, Workspace& workspace, const Stream& stream) override;
  size_t route_workspace_bytes(int64_t num_experts, int num_threads) const override;
  bool has_vision_ops() const override { return true; }
  void layer_norm(const TensorView& x, const TensorView& weight, const TensorView& bias, float eps,
                  MutableTensorView out, const Stream& stream) override;
  void plain_activation(const TensorView& x, Activation activation, MutableTensorView out,
                        const Stream& stream) override;
  void rope_angles_on_axes(const AxisPositions& where, const TensorView& inverse_frequencies,
                           float scale, MutableTensorView cos, MutableTensorView sin,
                           const Stream& stream) override;
  void add_weighted_rows(const TensorView& table, const TensorView& rows, const TensorView& weights,
                         MutableTensorView y, const Stream& stream) override;
  void scatter_rows(const TensorView& x, const TensorView& rows, Accumulate accumulate,
                    MutableTensorView y, const Stream& stream) override;
  bool has_compressed_ops() const override { return true; }
  void rope_pairs(MutableTensorView x, int64_t first, const TensorView& cos, const TensorView& sin,
                  bool inverse, const Stream& stream) override;
  void route_by_table(const TensorView& logits, const TensorView& token_ids,
                      const TensorView& table, const RouterOptions& options,
                      MutableTensorView top_k_index, MutableTensorView top_k_weights,
                      Workspace& workspace, const Stream& stream) override;
  void clamp_gated(MutableTensorView gate, MutableTensorView up, float limit,
                   const Stream& stream) override;
  void store_ring(const TensorView& x, const StepTokens& tokens, MutableTensorView ring,
                  const Stream& stream) override;
  void compress(const CompressArgs& args, Workspace& workspace, const Stream& stream) override;
  size_t compress_workspace_bytes(int64_t width, int num_threads) const override;
  void pick_entries(const PickEntriesArgs& args, Workspace& workspace,
                    const Stream& stream) override;
  size_t pick_entries_workspace_bytes(int64_t num_heads, int64_t width, int64_t k,
                                      int num_threads) const override;
  void shared_kv_attention(const SharedKvAttentionArgs& args, Workspace& workspace,
                           const Stream& stream) override;
  size_t shared_kv_attention_workspace_bytes(int64_t num_heads, int64_t head_dim,
                                             int num_threads) const override;
  void hyper_collapse(const HyperCollapseArgs& args, const Stream& stream) override;
  void hyper_expand(const HyperExpandArgs& args, const Stream& stream) override;
};

DenseOps& dense_ops();

}  // namespace cadre::cpu

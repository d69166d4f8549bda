// The dense operations of NVIDIA GPUs. Every call puts its work into the stream and returns: no
// allocation, no synchronisation, nothing read from the device, so all may be recorded into a
// graph. Kernels overlap their start with the end of the one before (programmatic dependent
// launch). Weights may be read before that one has ended, so no kernel directly before a call may
// write weights; copies may.
#pragma once

#include "dense/dense_ops.h"

namespace cadre::cuda {

class CudaDenseOps final : public DenseOps {
 public:
  std::string_view instruction_set() const override;
  void linear(const TensorView& x, const LinearWeights& weights, MutableTensorView out,
              Workspace& workspace, const Stream& stream) override;
  size_t linear_workspace_bytes(int64_t num_tokens, int64_t k, DType compute_dtype,
                                int num_threads) const override;
  void linear_group(const TensorView& x, std::span<const LinearWeights* const> weights,
                    std::span<const MutableTensorView> outs, Workspace& workspace,
                    const Stream& stream) override;
  void linear_add(const TensorView& x, const LinearWeights& weights, MutableTensorView y,
                  Workspace& workspace, const Stream& stream) override;
  size_t linear_add_workspace_bytes(int64_t num_tokens, int64_t n, int64_t k, DType compute_dtype,
                                    int num_threads) const override;
  void embedding(const TensorView& ids, const TensorView& table, MutableTensorView out,
                 const Stream& stream) override;
  void gather_rows(const TensorView& x, const TensorView& rows, MutableTensorView out,
                   const Stream& stream) override;
  void rms_norm(const TensorView& x, const TensorView& weight, float eps, MutableTensorView out,
                const Stream& stream) override;
  void add_rms_norm(MutableTensorView residual, const TensorView& x, const TensorView& weight,
                    float eps, MutableTensorView out, const Stream& stream) override;
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
  void finish_qkv(const QkvArgs& args, const Stream& stream) override;
  bool serves(const AttentionShape& shape) const override;
  void attention(const AttentionArgs& args, Workspace& workspace, const Stream& stream) override;
  void finish_and_attend(const QkvArgs& qkv, const AttentionArgs& attention, Workspace& workspace,
                         const Stream& stream) override;
  size_t attention_workspace_bytes(const AttentionShape& shape, int64_t max_tokens,
                                   int num_threads) const override;
  void linear_heads(const TensorView& x, const TensorView& weight, MutableTensorView out,
                    Workspace& workspace, const Stream& stream) override;
  size_t linear_heads_workspace_bytes(int64_t /*num_tokens*/, int64_t /*k*/,
                                      DType /*compute_dtype*/, int /*num_threads*/) const override {
    return 0;
  }
  bool serves(const LatentShape& shape) const override;
  void finish_latent(const LatentRowArgs& args, const Stream& stream) override;
  void latent_attention(const LatentAttentionArgs& args, Workspace& workspace,
                        const Stream& stream) override;
  size_t latent_attention_workspace_bytes(const LatentShape& shape, int64_t max_rows,
                                          int num_threads) const override;
  void route(const TensorView& logits, const TensorView& correction_bias,
             const RouterOptions& options, MutableTensorView top_k_index,
             MutableTensorView top_k_weights, Workspace& workspace, const Stream& stream) override;
  size_t route_workspace_bytes(int64_t num_experts, int num_threads) const override;
  void norm_and_route(const NormRouteArgs& args, Workspace& workspace,
                      const Stream& stream) override;
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
  void pick_entries(const PickEntriesArgs& args, Workspace& workspace,
                    const Stream& stream) override;
  size_t pick_entries_workspace_bytes(int64_t num_heads, int64_t width, int64_t k,
                                      int num_threads) const override;
  void shared_kv_attention(const SharedKvAttentionArgs& args, Workspace& workspace,
                           const Stream& stream) override;
  void hyper_collapse(const HyperCollapseArgs& args, const Stream& stream) override;
  void hyper_expand(const HyperExpandArgs& args, const Stream& stream) override;
  void sample(const SampleArgs& args, Workspace& workspace, const Stream& stream) override;
  size_t sample_workspace_bytes(int64_t num_rows, int64_t vocab_size) const override;
};

DenseOps& dense_ops();

}  // namespace cadre::cuda

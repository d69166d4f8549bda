// DeepSeek-V4's operations on devices that have none.
#include "dense/compressed_ops.h"

#include "core/check.h"
#include "dense/dense_ops.h"

namespace cadre {
namespace {

[[noreturn]] void no_compressed_ops() { CADRE_ASSERT(false && "ask has_compressed_ops() first"); }

}  // namespace

void DenseOps::rope_pairs(MutableTensorView /*x*/, int64_t /*first*/, const TensorView& /*cos*/,
                          const TensorView& /*sin*/, bool /*inverse*/, const Stream& /*stream*/) {
  no_compressed_ops();
}

void DenseOps::route_by_table(const TensorView& /*logits*/, const TensorView& /*token_ids*/,
                              const TensorView& /*table*/, const RouterOptions& /*options*/,
                              MutableTensorView /*top_k_index*/,
                              MutableTensorView /*top_k_weights*/, Workspace& /*workspace*/,
                              const Stream& /*stream*/) {
  no_compressed_ops();
}

void DenseOps::clamp_gated(MutableTensorView /*gate*/, MutableTensorView /*up*/, float /*limit*/,
                           const Stream& /*stream*/) {
  no_compressed_ops();
}

void DenseOps::store_ring(const TensorView& /*x*/, const StepTokens& /*tokens*/,
                          MutableTensorView /*ring*/, const Stream& /*stream*/) {
  no_compressed_ops();
}

void DenseOps::compress(const CompressArgs& /*args*/, Workspace& /*workspace*/,
                        const Stream& /*stream*/) {
  no_compressed_ops();
}

size_t DenseOps::compress_workspace_bytes(int64_t /*width*/, int /*num_threads*/) const {
  return 0;
}

void DenseOps::pick_entries(const PickEntriesArgs& /*args*/, Workspace& /*workspace*/,
                            const Stream& /*stream*/) {
  no_compressed_ops();
}

size_t DenseOps::pick_entries_workspace_bytes(int64_t /*num_heads*/, int64_t /*width*/,
                                              int64_t /*k*/, int /*num_threads*/) const {
  return 0;
}

void DenseOps::shared_kv_attention(const SharedKvAttentionArgs& /*args*/, Workspace& /*workspace*/,
                                   const Stream& /*stream*/) {
  no_compressed_ops();
}

size_t DenseOps::shared_kv_attention_workspace_bytes(int64_t /*num_heads*/, int64_t /*head_dim*/,
                                                     int /*num_threads*/) const {
  return 0;
}

void DenseOps::hyper_collapse(const HyperCollapseArgs& /*args*/, const Stream& /*stream*/) {
  no_compressed_ops();
}

void DenseOps::hyper_expand(const HyperExpandArgs& /*args*/, const Stream& /*stream*/) {
  no_compressed_ops();
}

}  // namespace cadre

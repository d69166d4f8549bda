// What devices that lack DeepSeek-V4's operations say.
#include "dense/compressed_ops.h"

#include "cadre/error.h"
#include "core/str_cat.h"
#include "dense/dense_ops.h"

namespace cadre {
namespace {

[[noreturn]] void not_on(Device device, std::string_view op) {
  throw Unsupported(str_cat(op, ": not an operation of ", device, " yet; use the CPU"));
}

}  // namespace

void DenseOps::rope_pairs(MutableTensorView x, int64_t /*first*/, const TensorView& /*cos*/,
                          const TensorView& /*sin*/, bool /*inverse*/, const Stream& /*stream*/) {
  not_on(x.device(), "rope_pairs");
}

void DenseOps::route_by_table(const TensorView& logits, const TensorView& /*token_ids*/,
                              const TensorView& /*table*/, const RouterOptions& /*options*/,
                              MutableTensorView /*top_k_index*/,
                              MutableTensorView /*top_k_weights*/, Workspace& /*workspace*/,
                              const Stream& /*stream*/) {
  not_on(logits.device(), "route_by_table");
}

void DenseOps::clamp_gated(MutableTensorView gate, MutableTensorView /*up*/, float /*limit*/,
                           const Stream& /*stream*/) {
  not_on(gate.device(), "clamp_gated");
}

void DenseOps::store_ring(const TensorView& x, const StepTokens& /*tokens*/,
                          MutableTensorView /*ring*/, const Stream& /*stream*/) {
  not_on(x.device(), "store_ring");
}

void DenseOps::compress(const CompressArgs& args, Workspace& /*workspace*/,
                        const Stream& /*stream*/) {
  not_on(args.values.device(), "compress");
}

size_t DenseOps::compress_workspace_bytes(int64_t /*width*/, int /*num_threads*/) const {
  return 0;
}

void DenseOps::pick_entries(const PickEntriesArgs& args, Workspace& /*workspace*/,
                            const Stream& /*stream*/) {
  not_on(args.queries.device(), "pick_entries");
}

size_t DenseOps::pick_entries_workspace_bytes(int64_t /*num_heads*/, int64_t /*width*/,
                                              int64_t /*k*/, int /*num_threads*/) const {
  return 0;
}

void DenseOps::shared_kv_attention(const SharedKvAttentionArgs& args, Workspace& /*workspace*/,
                                   const Stream& /*stream*/) {
  not_on(args.q.device(), "shared_kv_attention");
}

size_t DenseOps::shared_kv_attention_workspace_bytes(int64_t /*num_heads*/, int64_t /*head_dim*/,
                                                     int /*num_threads*/) const {
  return 0;
}

void DenseOps::hyper_collapse(const HyperCollapseArgs& args, const Stream& /*stream*/) {
  not_on(args.streams.device(), "hyper_collapse");
}

void DenseOps::hyper_expand(const HyperExpandArgs& args, const Stream& /*stream*/) {
  not_on(args.streams.device(), "hyper_expand");
}

}  // namespace cadre

// batched_mm on a GPU: made for decoding. Few tokens share an expert, so time is the reading of
// weights: each active expert is read once, in place, however many tokens share it.
#include <memory>

#include "backends/cuda/kernels/decode/decode.h"

namespace cadre::cuda {
namespace {

struct Prepared : CudaPrepared {
  using CudaPrepared::CudaPrepared;
  bool is_fast = false;  // the weights' layout suits the fast kernels
};

class BatchedMm final : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery& query) const override {
    Support support = supports_on_gpu(query);
    add_decode_limits(query.config, support);
    return support;
  }

  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    auto prepared = std::make_unique<Prepared>(query, std::move(weights));
    prepared->is_fast = suits_fast_decode(query, *prepared->weights);
    return prepared;
  }

  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int /*num_threads*/) const override {
    return decode_workspace_bytes(query, max_tokens);
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    const auto& prepared = static_cast<const Prepared&>(experts);
    decode(prepared, prepared.is_fast, tokens, workspace, stream);
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_batched_mm() { return std::make_unique<BatchedMm>(); }

}  // namespace cadre::cuda

// Every (token, expert) pair by itself: one task list of pairs x column panels, each reading its
// expert in place. Made for decoding, where few pairs share an expert.
#include <memory>

#include "backends/cpu/kernels/experts_call.h"
#include "cadre/experts.h"

namespace cadre::cpu {
namespace {

class BatchedMm : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery& query) const override { return supports_in_place(query); }

  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    return prepare_in_place(query, std::move(weights));
  }

  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int num_threads) const override {
    return workspace_bytes_in_place(query, max_tokens, num_threads);
  }

 protected:
  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    for_each_chunk(experts, tokens, workspace, *stream.threads, [](ExpertsCall& call) {
      const RowBlockList pairs = call.single_rows();
      call.gate_up(pairs);
      for (int64_t r = 0; r < call.num_ranges(); ++r) {
        call.down(pairs, call.range(r));
        call.combine(call.range(r));
      }
    });
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_batched_mm() { return std::make_unique<BatchedMm>(); }

}  // namespace cadre::cpu

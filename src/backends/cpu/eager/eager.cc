// The plain order: one expert after the other, each spread over the threads. Easy to follow, and a
// join of the threads per expert and projection.
#include <memory>

#include "backends/cpu/kernels/experts_call.h"
#include "cadre/experts.h"

namespace cadre::cpu {
namespace {

class Eager : public ExpertsBackend {
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
      for (int64_t i = 0; i < call.plan().num_active; ++i) call.gate_up(call.blocks_of(i));
      for (int64_t r = 0; r < call.num_ranges(); ++r) {
        for (int64_t i = 0; i < call.plan().num_active; ++i) {
          call.down(call.blocks_of(i), call.range(r));
        }
        call.combine(call.range(r));
      }
    });
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_eager() { return std::make_unique<Eager>(); }

}  // namespace cadre::cpu

// Pairs sorted by expert: one task list of (rows of an expert) x column panels for gate and up, one
// for down. An expert's weights are packed once per block of rows.
#include <memory>

#include "backends/cpu/kernels/experts_call.h"
#include "cadre/experts.h"

namespace cadre::cpu {
namespace {

class GroupedMm : public ExpertsBackend {
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
      const RowBlockList blocks = call.blocks_of_all();
      call.gate_up(blocks);
      for (int64_t r = 0; r < call.num_ranges(); ++r) {
        call.down(blocks, call.range(r));
        call.combine(call.range(r));
      }
    });
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_grouped_mm() { return std::make_unique<GroupedMm>(); }

}  // namespace cadre::cpu

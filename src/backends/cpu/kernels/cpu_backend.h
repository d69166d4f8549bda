// What the CPU backends have in common: all but the order of their work.
#pragma once

#include <memory>

#include "backends/cpu/kernels/experts_call.h"
#include "cadre/experts.h"

namespace cadre::cpu {

class CpuBackend : public ExpertsBackend {
 public:
  Support supports(const ExpertsQuery& query) const override {
    return supports_in_place(query, abilities());
  }

  std::unique_ptr<PreparedExperts> prepare(const ExpertsQuery& query,
                                           std::shared_ptr<const ExpertsWeights> weights) override {
    return prepare_in_place(query, std::move(weights), abilities());
  }

  size_t workspace_bytes(const ExpertsQuery& query, int64_t max_tokens,
                         int num_threads) const override {
    return workspace_bytes_in_place(query, max_tokens, num_threads);
  }

 protected:
  virtual Abilities abilities() const { return {}; }

  /// Hands out the work of one chunk of tokens.
  virtual void run_chunk(ExpertsCall& call) const = 0;

  void run(const PreparedExperts& experts, const RoutedTokens& tokens, Workspace& workspace,
           const Stream& stream) override {
    for_each_chunk(experts, tokens, workspace, *stream.threads,
                   [this](ExpertsCall& call) { run_chunk(call); });
  }
};

}  // namespace cadre::cpu

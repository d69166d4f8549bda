// An experts backend in a hundred lines: plain loops over tokens, slots and rows. Copy it to start
// your own.
#pragma once

#include <cadre/cadre.h>

/// Reads experts in place, in float32 or bfloat16; computes in float32 on the CPU.
class PlainLoops final : public cadre::ExpertsBackend {
 public:
  cadre::Support supports(const cadre::ExpertsQuery& query) const override;
  std::unique_ptr<cadre::PreparedExperts> prepare(
      const cadre::ExpertsQuery& query,
      std::shared_ptr<const cadre::ExpertsWeights> weights) override;
  size_t workspace_bytes(const cadre::ExpertsQuery& query, int64_t max_tokens,
                         int num_threads) const override;

 protected:
  void run(const cadre::PreparedExperts& experts, const cadre::RoutedTokens& tokens,
           cadre::Workspace& workspace, const cadre::Stream& stream) override;
};

// Every (token, expert) pair by itself: one task list of pairs x column panels, each reading its
// expert in place. Made for decoding, where few pairs share an expert.
#include <memory>

#include "backends/cpu/kernels/cpu_backend.h"

namespace cadre::cpu {
namespace {

class BatchedMm : public CpuBackend {
 protected:
  void run_chunk(ExpertsCall& call) const override {
    const RowBlockList pairs = call.single_rows();
    call.gate_up(pairs);
    for (int64_t r = 0; r < call.num_ranges(); ++r) {
      call.down(pairs, call.range(r));
      call.combine(call.range(r));
    }
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_batched_mm() { return std::make_unique<BatchedMm>(); }

}  // namespace cadre::cpu

// The plain order: one expert after the other, each spread over the threads. Easy to follow, and a
// join of the threads per expert and projection.
#include <memory>

#include "backends/cpu/kernels/cpu_backend.h"

namespace cadre::cpu {
namespace {

class Eager : public CpuBackend {
 protected:
  Abilities abilities() const override { return {.static_scales = true}; }

  void run_chunk(ExpertsCall& call) const override {
    for (int64_t i = 0; i < call.plan().num_active; ++i) call.gate_up(call.blocks_of(i));
    for (int64_t r = 0; r < call.num_ranges(); ++r) {
      for (int64_t i = 0; i < call.plan().num_active; ++i) {
        call.down(call.blocks_of(i), call.range(r));
      }
      call.combine(call.range(r));
    }
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_eager() { return std::make_unique<Eager>(); }

}  // namespace cadre::cpu

// DeepGEMM's arithmetic by name, on the CPU: grouped_mm's order of work, and fp4 weights with
// activations quantised per 32 of k as well.
#include <memory>

#include "backends/cpu/kernels/cpu_backend.h"

namespace cadre::cpu {
namespace {

class DeepGemm : public CpuBackend {
 protected:
  Abilities abilities() const override { return {.quantizes_for_fp4 = true}; }

  void run_chunk(ExpertsCall& call) const override {
    const RowBlockList blocks = call.blocks_of_all();
    call.gate_up(blocks);
    for (int64_t r = 0; r < call.num_ranges(); ++r) {
      call.down(blocks, call.range(r));
      call.combine(call.range(r));
    }
  }
};

}  // namespace

std::unique_ptr<ExpertsBackend> make_deepgemm() { return std::make_unique<DeepGemm>(); }

}  // namespace cadre::cpu

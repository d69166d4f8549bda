// Pairs sorted by expert: one task list of (rows of an expert) x column panels for gate and up, one
// for down. An expert's weights are packed once per block of rows.
#include <memory>

#include "backends/cpu/kernels/cpu_backend.h"

namespace cadre::cpu {
namespace {

class GroupedMm : public CpuBackend {
 protected:
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

std::unique_ptr<ExpertsBackend> make_grouped_mm() { return std::make_unique<GroupedMm>(); }

}  // namespace cadre::cpu

#include "backends/cuda/kernels/ceilings.h"

#include <gtest/gtest.h>

#include <string>

#include "backends/cuda/device/device_runtime.h"
#include "cadre/error.h"
#include "support/gpu.h"

namespace cadre::cuda {
namespace {

using test::Gpu;

TEST(CudaCeilings, NamesTheProcessorAndItsWays) {
  CADRE_REQUIRE_GPU();
  EXPECT_EQ(ceilings().processor(), Gpu::runtime().properties(0).name);
  EXPECT_EQ(ceilings().ways_of_reading().size(), compute_capability(0) >= 90 ? 3u : 2u);
}

// Rates are not asserted, only that they are rates of this device: a kernel that read nothing would
// be faster than any memory.
TEST(CudaCeilings, ReadsAtTheSpeedOfMemory) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  for (const int64_t bytes : {int64_t{16}, int64_t{1} << 20, (int64_t{1} << 28) + 48}) {
    const Tensor memory(DType::kU8, {bytes}, Gpu::device());
    for (size_t way = 0; way < ceilings().ways_of_reading().size(); ++way) {
      const double rate = ceilings().read_bandwidth(memory, way, gpu.stream());
      EXPECT_GT(rate, 0) << way;
      EXPECT_LT(rate, 20e12) << way;
    }
  }
}

TEST(CudaCeilings, RefusesMemoryThatIsNotItsOwn) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  const Tensor on_cpu(DType::kU8, {1024});
  EXPECT_THROW(ceilings().read_bandwidth(on_cpu, 0, gpu.stream()), InvalidArgument);
  const Tensor memory(DType::kU8, {1024}, Gpu::device());
  EXPECT_THROW(ceilings().read_bandwidth(memory->slice(1, 1000), 0, gpu.stream()), InvalidArgument);
}

TEST(CudaCeilings, MultipliesInEveryComputeDtypeAndNoOther) {
  CADRE_REQUIRE_GPU();
  const Gpu gpu;
  for (const DType dtype : {DType::kF32, DType::kF16, DType::kBF16}) {
    const double rate = ceilings().peak_flops(dtype, gpu.stream());
    EXPECT_GT(rate, 1e11) << name_of(dtype);
    EXPECT_LT(rate, 1e16) << name_of(dtype);
  }
  EXPECT_THROW(ceilings().peak_flops(DType::kI32, gpu.stream()), InvalidArgument);
}

}  // namespace
}  // namespace cadre::cuda

// The table of device runtimes and what goes through it. Holds on machines with and without GPUs
// and in builds with and without CUDA; what a GPU itself must do is tested in backends/cuda/device.
#include "core/device_runtime.h"

#include <gtest/gtest.h>

#include <cstdint>

#include "cadre/error.h"
#include "support/expect_error.h"

namespace cadre {
namespace {

TEST(DeviceRuntime, TheCpuNeedsNone) {
  EXPECT_EQ(find_device_runtime(DeviceType::kCpu), nullptr);
  EXPECT_NO_THROW(synchronize(Stream{}));
  EXPECT_NO_THROW(CurrentDevice(Device{}));
}

TEST(DeviceRuntime, ADeviceThatIsNotThereIsRefusedWithTheReason) {
  for (const int index : {-1, 1000}) {
    const Device device{DeviceType::kCuda, index};
    const auto ask = [&] { device_runtime(device); };
    DeviceRuntime* runtime = find_device_runtime(DeviceType::kCuda);
    if (runtime == nullptr) {
      test::expect_error<Unsupported>(ask, {to_string(device), "this build", "nvcc"});
    } else if (runtime->device_count() == 0) {
      EXPECT_FALSE(runtime->why_none().empty());
      test::expect_error<DeviceError>(ask, {to_string(device), runtime->why_none()});
    } else {
      test::expect_error<DeviceError>(ask, {to_string(device), "from 0 to "});
    }
    EXPECT_THROW(CurrentDevice{device}, Error);
  }
}

TEST(CopyTensor, CopiesBetweenHostTensors) {
  const Tensor from(DType::kI32, {2, 3});
  const Tensor to(DType::kI32, {2, 3});
  for (int i = 0; i < 6; ++i) from->as<int32_t>()[i] = 10 * i;
  copy_tensor(from, to, Stream{});
  for (int i = 0; i < 6; ++i) EXPECT_EQ(to->as<int32_t>()[i], 10 * i);
}

}  // namespace
}  // namespace cadre

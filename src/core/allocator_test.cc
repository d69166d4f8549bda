#include "cadre/allocator.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <cstring>
#include <string>

#include "cadre/error.h"
#include "cadre/tensor.h"
#include "core/device_runtime.h"

// Without this the sanitizers end the program where the system's malloc returns null.
// NOLINTBEGIN(bugprone-reserved-identifier,readability-identifier-naming): their names
extern "C" const char* __asan_default_options() { return "allocator_may_return_null=1"; }
extern "C" const char* __tsan_default_options() { return "allocator_may_return_null=1"; }
// NOLINTEND(bugprone-reserved-identifier,readability-identifier-naming)

namespace cadre {
namespace {

constexpr Device kCuda = {DeviceType::kCuda, 2};

class CountingAllocator final : public Allocator {
 public:
  void* allocate(Device /*device*/, size_t /*bytes*/) override {
    ++live;
    return block_;
  }
  void deallocate(Device /*device*/, void* memory) noexcept override {
    if (memory == block_) --live;
  }
  int live = 0;

 private:
  alignas(64) char block_[64] = {};
};

TEST(CpuAllocator, GivesAlignedMemoryOfEverySize) {
  Allocator& allocator = allocator_of(Device());
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{63}, size_t{64}, size_t{65}, size_t{4097}}) {
    void* memory = allocator.allocate(Device(), bytes);
    ASSERT_NE(memory, nullptr);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(memory) % 64, 0u);
    std::memset(memory, 0xff, bytes);
    allocator.deallocate(Device(), memory);
  }
}

TEST(CpuAllocator, SizesThatCannotBeHadAreDeviceErrorsNamingTheSize) {
  for (const size_t bytes : {size_t{1} << 60, SIZE_MAX, SIZE_MAX - 62}) {
    try {
      allocate_shared_memory(Device(), bytes);
      ADD_FAILURE() << bytes;
    } catch (const DeviceError& error) {
      const std::string message = error.what();
      EXPECT_NE(message.find("cpu memory"), message.npos) << message;
      EXPECT_NE(message.find(std::to_string(bytes) + " bytes"), message.npos) << message;
      EXPECT_NE(message.find("smaller"), message.npos) << message;
    }
  }
  EXPECT_THROW(Tensor(DType::kU8, {int64_t{1} << 60}), DeviceError);
}

TEST(AllocatorOf, ADeviceThatIsNotThereIsRefusedSayingWhy) {
  register_allocator(DeviceType::kCuda, nullptr);
  const bool built = find_device_runtime(DeviceType::kCuda) != nullptr;
  std::string message;
  try {
    allocate_shared_memory({DeviceType::kCuda, 1000}, 16);
  } catch (const Unsupported& error) {
    EXPECT_FALSE(built);
    message = error.what();
    EXPECT_NE(message.find("use the cpu"), message.npos) << message;
  } catch (const DeviceError& error) {  // no GPU at all, or fewer
    EXPECT_TRUE(built);
    message = error.what();
    EXPECT_TRUE(message.find("NVIDIA") != message.npos ||
                message.find("expected a number from 0") != message.npos)
        << message;
  }
  EXPECT_NE(message.find("cuda:1000"), message.npos) << message;
}

TEST(AllocatorOf, ARegisteredAllocatorServesItsDevice) {
  CountingAllocator allocator;
  register_allocator(DeviceType::kCuda, &allocator);
  {
    const Tensor tensor(DType::kF32, {4}, kCuda);
    EXPECT_EQ(allocator.live, 1);
    EXPECT_EQ(tensor->device(), kCuda);
    EXPECT_NE(&allocator_of(Device()), &allocator);
  }
  EXPECT_EQ(allocator.live, 0);
  register_allocator(DeviceType::kCuda, nullptr);
}

}  // namespace
}  // namespace cadre

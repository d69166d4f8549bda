#include "cadre/allocator.h"

#include <array>
#include <atomic>
#include <cstdlib>

#include "cadre/error.h"
#include "core/device_runtime.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

class CpuAllocator final : public Allocator {
 public:
  void* allocate(Device /*device*/, size_t bytes) override {
    constexpr size_t kAlignment = 64;
    const size_t at_least_one = bytes == 0 ? 1 : bytes;  // the pointer is never null
    const size_t rounded = (at_least_one + kAlignment - 1) / kAlignment * kAlignment;
    void* memory = rounded < bytes ? nullptr : std::aligned_alloc(kAlignment, rounded);
    if (memory == nullptr) {
      throw DeviceError(str_cat("cpu memory: could not allocate ", bytes, " bytes (",
                                format_bytes(bytes),
                                "); use a smaller model, batch or context, or free memory"));
    }
    return memory;
  }
  void deallocate(Device /*device*/, void* memory) noexcept override { std::free(memory); }
};

std::array<std::atomic<Allocator*>, 2>& table() {
  static CpuAllocator& cpu = *new CpuAllocator;  // outlives every static object that holds memory
  static std::array<std::atomic<Allocator*>, 2> allocators = {&cpu, nullptr};
  return allocators;
}

}  // namespace

Allocator& allocator_of(Device device) {
  Allocator* allocator = table()[static_cast<size_t>(device.type)];
  return allocator != nullptr ? *allocator : device_runtime(device).allocator();
}

void register_allocator(DeviceType type, Allocator* allocator) {
  table()[static_cast<size_t>(type)] = allocator;
}

std::shared_ptr<void> allocate_shared_memory(Device device, size_t bytes) {
  Allocator& allocator = allocator_of(device);
  void* memory = allocator.allocate(device, bytes);
  return {memory, [&allocator, device](void* p) { allocator.deallocate(device, p); }};
}

}  // namespace cadre

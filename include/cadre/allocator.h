// Memory of a device. The CPU's allocator is built in; a GPU's comes with its backends.
#pragma once

#include <cstddef>
#include <memory>

#include "cadre/device.h"

namespace cadre {

class Allocator {
 public:
  virtual ~Allocator() = default;
  /// At least `bytes` bytes, aligned to 64 or more; never null. Throws DeviceError when there is no
  /// memory, saying how much was asked for.
  virtual void* allocate(Device device, size_t bytes) = 0;
  virtual void deallocate(Device device, void* memory) noexcept = 0;
};

/// Throws Unsupported when no allocator serves the device type (a build without CUDA), DeviceError
/// when the device cannot be used.
Allocator& allocator_of(Device device);

/// Puts another allocator in the place of the device's own (null: back to that one); it must
/// outlive all memory taken from it.
void register_allocator(DeviceType type, Allocator* allocator);

/// Memory that frees itself.
std::shared_ptr<void> allocate_shared_memory(Device device, size_t bytes);

}  // namespace cadre

// Scratch memory of a forward: one block, reserved beforehand, handed out by moving an offset.
// Kernels take from it and never allocate; a Scope gives back what was taken inside it.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "cadre/device.h"

namespace cadre {

class Workspace {
 public:
  explicit Workspace(Device device = {}, size_t bytes = 0);
  Workspace(const Workspace&) = delete;
  Workspace& operator=(const Workspace&) = delete;

  /// Makes the capacity at least `bytes` (a multiple of kAlignment). Existing pointers become
  /// invalid: call between forwards only.
  void reserve(size_t bytes);

  /// `bytes` bytes aligned to kAlignment. Asking for more than is left is a bug of the caller's
  /// size computation and throws std::logic_error with the three numbers.
  void* allocate(size_t bytes);

  template <typename T>
  T* allocate(int64_t count) {
    const bool fits = count >= 0 && static_cast<size_t>(count) <= kMaxBytes / sizeof(T);
    return static_cast<T*>(allocate(fits ? static_cast<size_t>(count) * sizeof(T) : kMaxBytes));
  }

  size_t capacity() const { return capacity_; }
  size_t used() const { return used_; }
  Device device() const { return device_; }

  /// What `bytes` takes from a workspace, alignment included. Size computations add these up.
  static constexpr size_t padded(size_t bytes) {
    return (bytes + kAlignment - 1) / kAlignment * kAlignment;
  }
  static constexpr size_t kAlignment = 256;

  class Scope {
   public:
    explicit Scope(Workspace& workspace) : workspace_(workspace), mark_(workspace.used_) {}
    ~Scope() { workspace_.used_ = mark_; }
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    Workspace& workspace_;
    size_t mark_;
  };

 private:
  static constexpr size_t kMaxBytes = ~size_t{0};

  Device device_;
  std::shared_ptr<void> memory_;
  size_t capacity_ = 0;
  size_t used_ = 0;
};

}  // namespace cadre

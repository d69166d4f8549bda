#include "cadre/workspace.h"

#include <stdexcept>

#include "cadre/allocator.h"
#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"

namespace cadre {

Workspace::Workspace(Device device, size_t bytes) : device_(device) { reserve(bytes); }

void Workspace::reserve(size_t bytes) {
  CADRE_ASSERT(used_ == 0);
  if (bytes <= capacity_) return;
  memory_ = nullptr;  // give the old block back first: both together may not fit
  capacity_ = 0;
  // The slack aligns the first block, whatever the allocator's own alignment. A size that wraps
  // around asks for all there is, which the allocator refuses.
  const size_t with_slack = padded(bytes) + kAlignment;
  try {
    memory_ = allocate_shared_memory(device_, with_slack < bytes ? ~size_t{0} : with_slack);
  } catch (const DeviceError& error) {
    throw DeviceError(str_cat("workspace (scratch memory of a step): ", error.what()));
  }
  capacity_ = padded(bytes);
}

void* Workspace::allocate(size_t bytes) {
  const size_t needed = padded(bytes);
  if (needed < bytes || needed > capacity_ - used_) {
    throw std::logic_error(
        str_cat("workspace: ", bytes, " bytes asked for, ", capacity_ - used_, " of ", capacity_,
                " left; the size computation of this forward is wrong (please report it)"));
  }
  const auto base = reinterpret_cast<uintptr_t>(memory_.get());
  const uintptr_t aligned = (base + kAlignment - 1) / kAlignment * kAlignment;
  void* result = reinterpret_cast<void*>(aligned + used_);
  used_ += needed;
  return result;
}

}  // namespace cadre

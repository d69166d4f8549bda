#include "backends/cpu/kernels/huge_arena.h"

#include <sys/mman.h>

#include <cstdint>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cpu {

HugeArena::HugeArena(size_t bytes) : bytes_(bytes + kAlignment) {
  mapping_ = bytes_ < bytes ? MAP_FAILED
                            : ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE,
                                     MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (mapping_ == MAP_FAILED) {
    throw DeviceError(str_cat("cpu memory: could not map ", bytes, " bytes (", format_bytes(bytes),
                              ") for packed experts; use --prepack off or free memory"));
  }
  const auto begin = reinterpret_cast<uintptr_t>(mapping_);
  const uintptr_t aligned = (begin + kAlignment - 1) / kAlignment * kAlignment;
  data_ = static_cast<std::byte*>(mapping_) + (aligned - begin);
  // Only a wish: small pages do as well. What fills no huge page takes small ones.
  static_cast<void>(::madvise(data_, bytes / kAlignment * kAlignment, MADV_HUGEPAGE));
}

HugeArena::~HugeArena() { ::munmap(mapping_, bytes_); }

}  // namespace cadre::cpu

// One large piece of memory on huge pages where the system has them.
#pragma once

#include <cstddef>

namespace cadre::cpu {

/// Zeroed memory that is taken page by page when it is first written; a page more than asked for
/// may be read.
class HugeArena {
 public:
  /// Throws DeviceError when the system refuses.
  explicit HugeArena(size_t bytes);
  ~HugeArena();
  HugeArena(const HugeArena&) = delete;
  HugeArena& operator=(const HugeArena&) = delete;

  static constexpr size_t kAlignment = size_t{2} << 20;

  std::byte* data() const { return data_; }  // at a multiple of kAlignment

 private:
  size_t bytes_;  // of the mapping
  void* mapping_;
  std::byte* data_;
};

}  // namespace cadre::cpu

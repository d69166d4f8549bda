// Host memory on pages of a known size: how fast memory can be read depends on them.
#pragma once

#include <cstddef>
#include <string>

#include "cadre/tensor.h"
#include "cadre/thread_pool.h"

namespace cadre::cli {

/// The system's usual pages.
size_t small_page_bytes();
/// The pages that madvise asks for; 0 on a system without.
size_t huge_page_bytes();

/// "4 KiB", "2 MiB".
std::string name_of_pages(size_t page_bytes);

/// The size of most pages in the mapping that `data` lies in, as the system tells it
/// (/proc/self/smaps); small_page_bytes() when it does not. A page counts from its first write on.
size_t page_bytes_of(const void* data);

/// Memory that asks for pages of one size. Filled, so that its pages exist.
class PagedMemory {
 public:
  /// `page_bytes`: small_page_bytes() or huge_page_bytes(). Throws DeviceError when the system
  /// refuses the memory; pages of another size are no error, see page_bytes_of().
  PagedMemory(size_t bytes, size_t page_bytes, ThreadPool& threads);
  ~PagedMemory();
  PagedMemory(const PagedMemory&) = delete;
  PagedMemory& operator=(const PagedMemory&) = delete;

  TensorView view() const { return {data_, DType::kU8, {static_cast<int64_t>(bytes_)}}; }

 private:
  size_t bytes_;
  size_t mapped_bytes_;
  void* mapping_;
  char* data_;
};

}  // namespace cadre::cli

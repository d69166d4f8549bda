// Memory that ends where the process's memory ends: the page behind the last byte is not readable,
// as behind a mapped file. A read past the end stops the program in every build, not only under the
// address sanitizer.
#pragma once

#include <sys/mman.h>
#include <unistd.h>

#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

namespace cadre::test {

class GuardedBuffer {
 public:
  /// `gap` bytes lie between the data and the guard page: it moves the alignment of the data. All
  /// bytes start as 0xff, which is a NaN in every floating-point type.
  explicit GuardedBuffer(size_t bytes = 0, size_t gap = 0) {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t usable = (bytes + gap + page - 1) / page * page;
    mapped_ = usable + page;
    base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (base_ == MAP_FAILED) throw std::bad_alloc();
    std::memset(base_, 0xff, usable);
    mprotect(static_cast<char*>(base_) + usable, page, PROT_NONE);
    data_ = static_cast<char*>(base_) + usable - gap - bytes;
  }
  ~GuardedBuffer() {
    if (base_ != nullptr) munmap(base_, mapped_);
  }
  GuardedBuffer(GuardedBuffer&& other) noexcept { *this = std::move(other); }
  GuardedBuffer& operator=(GuardedBuffer&& other) noexcept {
    std::swap(base_, other.base_);
    std::swap(mapped_, other.mapped_);
    std::swap(data_, other.data_);
    return *this;
  }

  char* data() const { return data_; }

 private:
  void* base_ = nullptr;
  size_t mapped_ = 0;
  char* data_ = nullptr;
};

}  // namespace cadre::test

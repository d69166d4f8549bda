#include "support/allocation_counter.h"

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>

namespace {

std::atomic<int64_t> allocations{0};

void count_one() { allocations.fetch_add(1, std::memory_order_relaxed); }

}  // namespace

// The linker sends every call of malloc to __wrap_malloc, and __real_malloc to malloc.
extern "C" {
void* __real_malloc(size_t size);
void* __real_calloc(size_t count, size_t size);
void* __real_realloc(void* memory, size_t size);
void* __real_aligned_alloc(size_t alignment, size_t size);
int __real_posix_memalign(void** memory, size_t alignment, size_t size);
void* __real_memalign(size_t alignment, size_t size);
char* __real_strdup(const char* text);
void free(void* memory);

void* __wrap_malloc(size_t size) {
  count_one();
  return __real_malloc(size);
}
void* __wrap_calloc(size_t count, size_t size) {
  count_one();
  return __real_calloc(count, size);
}
void* __wrap_realloc(void* memory, size_t size) {
  count_one();
  return __real_realloc(memory, size);
}
void* __wrap_aligned_alloc(size_t alignment, size_t size) {
  count_one();
  return __real_aligned_alloc(alignment, size);
}
int __wrap_posix_memalign(void** memory, size_t alignment, size_t size) {
  count_one();
  return __real_posix_memalign(memory, alignment, size);
}
void* __wrap_memalign(size_t alignment, size_t size) {
  count_one();
  return __real_memalign(alignment, size);
}
char* __wrap_strdup(const char* text) {
  count_one();
  return __real_strdup(text);
}
}

namespace {

void* counted_new(size_t size) noexcept {
  count_one();
  return __real_malloc(std::max<size_t>(size, 1));
}
void* counted_new(size_t size, std::align_val_t alignment) noexcept {
  count_one();
  void* memory = nullptr;
  const size_t at_least_a_pointer = std::max(static_cast<size_t>(alignment), sizeof(void*));
  return __real_posix_memalign(&memory, at_least_a_pointer, std::max<size_t>(size, 1)) == 0
             ? memory
             : nullptr;
}
void* or_throw(void* memory) {
  if (memory == nullptr) throw std::bad_alloc();
  return memory;
}

}  // namespace

void* operator new(size_t size) { return or_throw(counted_new(size)); }
void* operator new[](size_t size) { return or_throw(counted_new(size)); }
void* operator new(size_t size, const std::nothrow_t&) noexcept { return counted_new(size); }
void* operator new[](size_t size, const std::nothrow_t&) noexcept { return counted_new(size); }
void* operator new(size_t size, std::align_val_t a) { return or_throw(counted_new(size, a)); }
void* operator new[](size_t size, std::align_val_t a) { return or_throw(counted_new(size, a)); }
void* operator new(size_t size, std::align_val_t a, const std::nothrow_t&) noexcept {
  return counted_new(size, a);
}
void* operator new[](size_t size, std::align_val_t a, const std::nothrow_t&) noexcept {
  return counted_new(size, a);
}
void operator delete(void* memory) noexcept { free(memory); }
void operator delete[](void* memory) noexcept { free(memory); }
void operator delete(void* memory, size_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete[](void* memory, size_t, std::align_val_t) noexcept { free(memory); }
void operator delete(void* memory, const std::nothrow_t&) noexcept { free(memory); }
void operator delete[](void* memory, const std::nothrow_t&) noexcept { free(memory); }
void operator delete(void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  free(memory);
}
void operator delete[](void* memory, std::align_val_t, const std::nothrow_t&) noexcept {
  free(memory);
}

namespace cadre::test {

AllocationCounter::AllocationCounter() : start_(allocations.load(std::memory_order_relaxed)) {}

int64_t AllocationCounter::count() const {
  return allocations.load(std::memory_order_relaxed) - start_;
}

}  // namespace cadre::test

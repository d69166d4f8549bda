// Lets a test assert that a piece of code takes no memory from the heap:
//
//   AllocationCounter counter;
//   backend.forward(...);
//   EXPECT_EQ(counter.count(), 0);
//
// Counts calls, on all threads, of every form of operator new and of malloc, calloc, realloc,
// aligned_alloc, posix_memalign, memalign and strdup from code that is linked into the program (the
// linker's --wrap; calls inside shared libraries are seen when they go through operator new).
// A test that uses it needs `DEPENDS cadre_allocation_counter` in its cadre_test(). Works under the
// sanitizers: their own allocator serves the calls.
#pragma once

#include <cstdint>

namespace cadre::test {

class AllocationCounter {
 public:
  AllocationCounter();
  /// Allocations since construction. Read it into a variable before an assertion that may allocate.
  int64_t count() const;

 private:
  int64_t start_;
};

}  // namespace cadre::test

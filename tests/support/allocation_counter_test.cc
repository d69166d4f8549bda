#include "support/allocation_counter.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "cadre/tensor.h"

namespace cadre::test {
namespace {

// Keeps the compiler from removing a pair of new and delete.
void* volatile sink;

TEST(AllocationCounter, SeesNothingWhereNothingIsAllocated) {
  int64_t sum = 0;
  AllocationCounter counter;
  for (int64_t i = 0; i < 100; ++i) sum += i;
  const int64_t count = counter.count();
  EXPECT_EQ(count, 0);
  EXPECT_EQ(sum, 4950);
}

TEST(AllocationCounter, SeesOperatorNewOfEveryKind) {
  struct alignas(64) Wide {
    char data[64];
  };
  AllocationCounter counter;
  const auto one = std::make_unique<int>(1);
  const auto aligned = std::make_unique<Wide>();
  const std::vector<int> many(10);
  const std::string longer_than_the_inline_buffer(100, 'x');
  sink = one.get();
  sink = aligned.get();
  EXPECT_GE(counter.count(), 4);
}

TEST(AllocationCounter, SeesTheCFamily) {
  AllocationCounter counter;
  void* memory = std::malloc(8);
  sink = memory;
  memory = std::realloc(memory, 16);
  sink = memory;
  std::free(memory);
  memory = std::aligned_alloc(64, 64);
  sink = memory;
  std::free(memory);
  memory = std::calloc(2, 2);
  sink = memory;
  std::free(memory);
  EXPECT_EQ(counter.count(), 4);
}

TEST(AllocationCounter, SeesAllocationsInsideTheLibrary) {
  AllocationCounter counter;
  const Tensor tensor(DType::kF32, {4});
  EXPECT_GE(counter.count(), 1);
}

TEST(AllocationCounter, SeesOtherThreads) {
  AllocationCounter counter;
  std::thread([] { sink = std::make_unique<int>(3).get(); }).join();
  EXPECT_GE(counter.count(), 2);  // the thread's state and the int
}

}  // namespace
}  // namespace cadre::test

#include "paged_memory.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <fstream>
#include <string>

#include "cadre/error.h"

namespace cadre::cli {
namespace {

/// Whether the system hands out huge pages when asked.
bool huge_pages_on_demand() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/enabled");
  std::string words;
  std::getline(file, words);
  return !words.empty() && words.find("[never]") == words.npos;
}

TEST(PagedMemory, PagesHaveNames) {
  EXPECT_EQ(name_of_pages(4096), "4 KiB");
  EXPECT_EQ(name_of_pages(64 << 10), "64 KiB");
  EXPECT_EQ(name_of_pages(2 << 20), "2 MiB");
}

TEST(PagedMemory, IsFilledFromItsFirstToItsLastByte) {
  ThreadPool pool(2);
  for (const size_t page : {small_page_bytes(), huge_page_bytes()}) {
    if (page == 0) continue;
    const size_t bytes = 3 * page + 17;
    const PagedMemory memory(bytes, page, pool);
    const TensorView view = memory.view();
    ASSERT_EQ(view.nbytes(), bytes);
    EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data()) % page, 0u);
    const auto* data = static_cast<const char*>(view.data());
    EXPECT_EQ(std::string(data, bytes), std::string(bytes, '\1'));
  }
}

TEST(PagedMemory, LiesOnThePagesAskedFor) {
  ThreadPool pool(2);
  const PagedMemory small(8 << 20, small_page_bytes(), pool);
  EXPECT_EQ(page_bytes_of(small.view().data()), small_page_bytes());
  if (!huge_pages_on_demand()) GTEST_SKIP() << "this system has no huge pages";
  const PagedMemory huge(8 << 20, huge_page_bytes(), pool);
  EXPECT_EQ(page_bytes_of(huge.view().data()), huge_page_bytes());
  EXPECT_EQ(page_bytes_of(static_cast<const char*>(huge.view().data()) + (5 << 20)),
            huge_page_bytes());
}

TEST(PagedMemory, WhereNothingIsMappedPagesAreSmall) {
  EXPECT_EQ(page_bytes_of(nullptr), small_page_bytes());
}

TEST(PagedMemory, MoreThanThereIsIsRefused) {
  ThreadPool pool(1);
  try {
    const PagedMemory memory(size_t{1} << 60, small_page_bytes(), pool);
    ADD_FAILURE();
  } catch (const DeviceError& error) {
    EXPECT_NE(std::string(error.what()).find("--memory"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace cadre::cli

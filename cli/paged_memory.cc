#include "paged_memory.h"

#include <sys/mman.h>
#include <unistd.h>

#include <cstdint>
#include <cstring>
#include <fstream>
#include <sstream>
#include <string>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cli {

namespace {

/// What /proc/self/smaps says of one mapping, in KiB.
struct MappingPages {
  uint64_t resident = 0;
  uint64_t huge = 0;      // of the resident ones, in transparent huge pages
  uint64_t own_page = 0;  // the mapping's own page size: larger on hugetlbfs
};

bool covers(const std::string& line, uintptr_t address) {
  std::istringstream words(line);
  uintptr_t begin = 0;
  uintptr_t end = 0;
  char dash = 0;
  return words >> std::hex >> begin >> dash >> end && dash == '-' && begin <= address &&
         address < end;
}

/// False for the first line of the next mapping.
bool read_field(const std::string& line, MappingPages& pages) {
  std::istringstream words(line);
  std::string name;
  uint64_t value = 0;
  words >> name >> value;
  if (name.empty() || name.back() != ':') return false;
  if (name == "Rss:") pages.resident = value;
  if (name == "KernelPageSize:") pages.own_page = value;
  for (const char* huge : {"AnonHugePages:", "ShmemPmdMapped:", "FilePmdMapped:"}) {
    if (name == huge) pages.huge += value;
  }
  return true;
}

MappingPages pages_around(const void* data) {
  std::ifstream smaps("/proc/self/smaps");
  MappingPages pages;
  std::string line;
  while (std::getline(smaps, line) && !covers(line, reinterpret_cast<uintptr_t>(data))) {
  }
  while (std::getline(smaps, line) && read_field(line, pages)) {
  }
  return pages;
}

size_t aligned(size_t value, size_t alignment) {
  return (value + alignment - 1) / alignment * alignment;
}

}  // namespace

size_t small_page_bytes() { return static_cast<size_t>(::sysconf(_SC_PAGESIZE)); }

size_t huge_page_bytes() {
  std::ifstream file("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size");
  size_t bytes = 0;
  return file >> bytes ? bytes : 0;
}

std::string name_of_pages(size_t page_bytes) {
  const bool mib = page_bytes % (1 << 20) == 0;
  return mib ? str_cat(page_bytes >> 20, " MiB") : str_cat(page_bytes >> 10, " KiB");
}

size_t page_bytes_of(const void* data) {
  const MappingPages pages = pages_around(data);
  if (pages.huge > 0 && pages.huge * 2 >= pages.resident) return huge_page_bytes();
  return pages.own_page > 0 ? pages.own_page << 10 : small_page_bytes();
}

PagedMemory::PagedMemory(size_t bytes, size_t page_bytes, ThreadPool& threads)
    : bytes_(bytes),
      mapped_bytes_(aligned(bytes, page_bytes) + page_bytes),
      mapping_(::mmap(nullptr, mapped_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                      -1, 0)) {
  if (mapping_ == MAP_FAILED) {
    throw DeviceError(str_cat("memory for the ceilings: could not map ", format_bytes(bytes),
                              "; use a smaller --memory"));
  }
  const auto begin = reinterpret_cast<uintptr_t>(mapping_);
  data_ = static_cast<char*>(mapping_) + (aligned(begin, page_bytes) - begin);
  const bool small = page_bytes == small_page_bytes();
  static_cast<void>(
      ::madvise(data_, aligned(bytes, page_bytes), small ? MADV_NOHUGEPAGE : MADV_HUGEPAGE));
  // Pages that were never written all lie on one page of zeros.
  const auto grain = static_cast<int64_t>(page_bytes);
  threads.parallel_ranges(static_cast<int64_t>(bytes), grain, [&](int64_t from, int64_t to, int) {
    std::memset(data_ + from, 1, static_cast<size_t>(to - from));
  });
}

PagedMemory::~PagedMemory() { ::munmap(mapping_, mapped_bytes_); }

}  // namespace cadre::cli

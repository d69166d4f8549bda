#include "io/file_map.h"

#include <sys/mman.h>

#include <algorithm>
#include <cerrno>

#include "cadre/error.h"
#include "core/check.h"
#include "core/str_cat.h"
#include "io/file_handle.h"

namespace cadre {

std::shared_ptr<const FileMap> FileMap::open(const std::filesystem::path& path) {
  const InputFile file = open_input_file(path);
  if (file.bytes == 0) {
    throw CheckpointError(
        str_cat("cannot map ", path.string(), ": the file is empty; fetch it again"));
  }
  const auto size = static_cast<size_t>(file.bytes);
  void* memory = ::mmap(nullptr, size, PROT_READ, MAP_PRIVATE, file.handle.get(), 0);
  if (memory == MAP_FAILED) {
    const int error = errno;
    if (error == ENOMEM) {
      throw DeviceError(str_cat("cannot map ", path.string(), " (", format_bytes(size),
                                "): ", errno_text(error),
                                "; raise the address-space limit (ulimit -v) or use a machine with "
                                "more memory"));
    }
    throw CheckpointError(str_cat("cannot map ", path.string(), " (", format_bytes(size),
                                  "): ", errno_text(error), "; put it on a local file system"));
  }
  return std::shared_ptr<const FileMap>(
      new FileMap(path, {static_cast<const std::byte*>(memory), size}));
}

void FileMap::release(std::span<const std::byte> part) const {
  // A page that is needed brings its neighbours along, an aligned group of 64 KiB; whole groups go,
  // or those at the edges would stay for ever.
  constexpr size_t kGroup = size_t{64} << 10;
  const auto first = static_cast<size_t>(part.data() - bytes_.data());
  const size_t begin = first / kGroup * kGroup;
  const size_t end = std::min(bytes_.size(), (first + part.size() + kGroup - 1) / kGroup * kGroup);
  CADRE_ASSERT(begin <= end && first + part.size() <= bytes_.size());
  static_cast<void>(
      ::madvise(const_cast<std::byte*>(bytes_.data()) + begin, end - begin, MADV_DONTNEED));
}

FileMap::~FileMap() { ::munmap(const_cast<std::byte*>(bytes_.data()), bytes_.size()); }

}  // namespace cadre

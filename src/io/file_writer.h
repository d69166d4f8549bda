// Writes a whole file or nothing: to a temporary file beside the target, renamed over it when it is
// complete and on the disk.
#pragma once

#include <cstddef>
#include <filesystem>
#include <span>
#include <string_view>

#include "io/file_handle.h"

namespace cadre {

class FileWriter {
 public:
  /// Targets that are no regular files (/dev/stdout, a pipe) are written to directly. A link is
  /// followed, so the file behind it is replaced (or made, where there is none yet) and the link
  /// stays; an existing file's permissions are kept, and one that may not be written is refused.
  /// `total_bytes` is what will be written, for messages.
  /// All members throw Error naming the path, the bytes, the system's reason and what to do.
  FileWriter(const std::filesystem::path& path, size_t total_bytes);
  /// Without commit() the target stays as it was and the temporary file goes.
  ~FileWriter();
  FileWriter(const FileWriter&) = delete;
  FileWriter& operator=(const FileWriter&) = delete;

  void write(std::span<const std::byte> bytes);
  void commit();

 private:
  void open_beside(const std::filesystem::path& target, bool exists);
  [[noreturn]] void fail(int error) const { fail(error, advice(error)); }
  [[noreturn]] void fail(int error, std::string_view what_to_do) const;
  static std::string_view advice(int error);

  std::filesystem::path path_;       // as the caller gave it
  std::filesystem::path target_;     // with links resolved
  std::filesystem::path temporary_;  // empty when the target is written to directly
  FileHandle handle_;
  size_t total_bytes_;
  size_t written_ = 0;
};

}  // namespace cadre

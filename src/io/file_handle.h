// An open file descriptor that closes itself, and the one way in which input files are opened.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <utility>

namespace cadre {

class FileHandle {
 public:
  FileHandle() = default;
  explicit FileHandle(int fd) : fd_(fd) {}
  ~FileHandle() { close(); }
  FileHandle(FileHandle&& other) noexcept : fd_(std::exchange(other.fd_, -1)) {}
  FileHandle& operator=(FileHandle&& other) noexcept {
    std::swap(fd_, other.fd_);
    return *this;
  }

  int get() const { return fd_; }
  explicit operator bool() const { return fd_ >= 0; }
  /// The errno of close(2), 0 when it went well or there was nothing to close.
  int close() noexcept;

 private:
  int fd_ = -1;
};

struct InputFile {
  FileHandle handle;
  int64_t bytes = 0;
};

/// Opens a regular file for reading. Throws CheckpointError naming the path when it is missing,
/// unreadable or no regular file. Never blocks (a FIFO is refused, not waited for).
InputFile open_input_file(const std::filesystem::path& path);

/// All of a regular file. Throws CheckpointError when it is missing, unreadable or longer than
/// `max_bytes`; `kind` is what messages call its content ("JSON").
std::string read_file(const std::filesystem::path& path, int64_t max_bytes, std::string_view kind);

/// Whether there is something at `path`. Throws CheckpointError for a link whose target is missing,
/// naming both, and for a place that may not be looked at: neither is the same as an absent file.
bool is_there(const std::filesystem::path& path);

/// The system's text for an errno.
std::string errno_text(int error);

}  // namespace cadre

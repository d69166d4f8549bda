#include "io/file_writer.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <string_view>
#include <system_error>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

// /dev/stdout and the like may lead to a regular file that somebody holds open: replacing it would
// leave them with the old one.
bool names_a_descriptor(const fs::path& path) {
  const std::string text = path.lexically_normal().string();
  return text.starts_with("/dev/") || text.starts_with("/proc/");
}

// Where the links lead when there is no file behind them yet.
fs::path behind_links(fs::path path) {
  std::error_code error;
  for (int depth = 0; depth < 40 && fs::is_symlink(fs::symlink_status(path, error)); ++depth) {
    const fs::path next = fs::read_symlink(path, error);
    if (error) break;
    path = path.parent_path() / next;  // an absolute one replaces all
  }
  return path;
}

}  // namespace

std::string_view FileWriter::advice(int error) {
  switch (error) {
    case ENOSPC:
    case EDQUOT:
      return "free space on that disk or choose another place";
    case EFBIG:
      return "raise the file size limit (ulimit -f) or choose another place";
    case ENOENT:
    case ENOTDIR:
      return "make the folder first or choose another place";
    case EISDIR:
      return "give the name of a file";
    case EACCES:
    case EPERM:
    case EROFS:
      return "choose a place where you may write";
    default:
      return "check the path and the disk";
  }
}

FileWriter::FileWriter(const fs::path& path, size_t total_bytes)
    : path_(path), total_bytes_(total_bytes) {
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (status.type() == fs::file_type::none) fail(error.value());
  if (fs::is_directory(status)) fail(EISDIR);
  const bool exists = fs::exists(status);
  if (exists && (!fs::is_regular_file(status) || names_a_descriptor(path))) {
    handle_ = FileHandle(::open(path.c_str(), O_WRONLY | O_CLOEXEC | O_NOCTTY));
    if (!handle_) fail(errno);
    return;
  }
  target_ = exists ? fs::canonical(path, error) : behind_links(path);
  if (error && exists) fail(error.value());
  // A rename would go over a write-protected file.
  if (exists && ::faccessat(AT_FDCWD, target_.c_str(), W_OK, AT_EACCESS) != 0) fail(errno);
  open_beside(target_, exists);
}

void FileWriter::open_beside(const fs::path& target, bool exists) {
  static std::atomic<unsigned> counter{0};
  fs::path temporary = target;
  temporary += str_cat(".tmp-", ::getpid(), "-", counter.fetch_add(1));
  handle_ = FileHandle(::open(temporary.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666));
  if (!handle_) {
    const int error = errno;
    const bool is_folder_at_fault = exists && (error == EACCES || error == EPERM);
    fail(error, is_folder_at_fault ? "the file may be written, but it is replaced as a whole, for "
                                     "which its folder must be writable too; choose another place"
                                   : advice(error));
  }
  temporary_ = std::move(temporary);
  struct stat status {};
  if (exists && ::stat(target.c_str(), &status) == 0) {
    // Best effort: a file that may be replaced but not chmod-ed is still replaced.
    static_cast<void>(::fchmod(handle_.get(), status.st_mode & 07777));
  }
}

FileWriter::~FileWriter() {
  handle_.close();
  if (!temporary_.empty()) ::unlink(temporary_.c_str());
}

void FileWriter::write(std::span<const std::byte> bytes) {
  constexpr size_t kMaxChunk = size_t{1} << 30;  // one write(2) takes at most 2 GiB
  while (!bytes.empty()) {
    const ssize_t count = ::write(handle_.get(), bytes.data(), std::min(bytes.size(), kMaxChunk));
    if (count < 0) {
      if (errno == EINTR) continue;
      fail(errno);
    }
    written_ += static_cast<size_t>(count);
    bytes = bytes.subspan(static_cast<size_t>(count));
  }
}

void FileWriter::commit() {
  const bool is_direct = temporary_.empty();
  // EINVAL: a pipe or device that has nothing to flush.
  if (::fsync(handle_.get()) != 0 && !(is_direct && (errno == EINVAL || errno == EROFS)))
    fail(errno);
  if (const int error = handle_.close(); error != 0) fail(error);
  if (is_direct) return;
  if (::rename(temporary_.c_str(), target_.c_str()) != 0) fail(errno);
  temporary_.clear();
  // The rename itself: some file systems cannot flush a folder, and the data is safe already.
  const fs::path folder = target_.has_parent_path() ? target_.parent_path() : fs::path(".");
  if (const FileHandle parent{::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC)}; parent)
    static_cast<void>(::fsync(parent.get()));
}

void FileWriter::fail(int error, std::string_view what_to_do) const {
  std::error_code ignored;
  const bool is_link = !target_.empty() && fs::is_symlink(fs::symlink_status(path_, ignored));
  throw Error(str_cat("cannot write ", path_.string(),
                      is_link ? str_cat(" (a link to ", target_.string(), ")") : "", ": ",
                      errno_text(error), " after ", written_, " of ", total_bytes_, " bytes (",
                      format_bytes(total_bytes_), "); ", what_to_do));
}

}  // namespace cadre

#include "io/file_handle.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre {

int FileHandle::close() noexcept {
  if (fd_ < 0) return 0;
  // Not repeated on EINTR: Linux has released the descriptor by then.
  return ::close(std::exchange(fd_, -1)) == 0 ? 0 : errno;
}

std::string errno_text(int error) { return std::generic_category().message(error); }

bool is_there(const std::filesystem::path& path) {
  namespace fs = std::filesystem;
  std::error_code error;
  const fs::file_status status = fs::status(path, error);
  if (fs::exists(status)) return true;
  std::error_code ignored;
  if (fs::is_symlink(fs::symlink_status(path, ignored))) {
    throw CheckpointError(str_cat("cannot open ", path.string(), ": it is a link to ",
                                  quote(fs::read_symlink(path, ignored).string()), ": ",
                                  errno_text(error.value()),
                                  "; fetch the target again or remove the link"));
  }
  if (status.type() == fs::file_type::not_found) return false;
  throw CheckpointError(str_cat("cannot open ", path.string(), ": ", errno_text(error.value()),
                                "; check the permissions of the folder"));
}

InputFile open_input_file(const std::filesystem::path& path) {
  InputFile file{FileHandle(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK))};
  if (!file.handle) {
    const int error = errno;
    if (error == ENOENT || error == ELOOP) is_there(path);  // says more about a link
    throw CheckpointError(str_cat("cannot open ", path.string(), ": ", errno_text(error),
                                  error == ENOENT ? "; check the path or fetch the file again"
                                                  : "; check the file's permissions"));
  }
  struct stat status {};
  if (::fstat(file.handle.get(), &status) != 0) {
    throw CheckpointError(str_cat("cannot read ", path.string(), ": ", errno_text(errno)));
  }
  if (!S_ISREG(status.st_mode)) {
    throw CheckpointError(str_cat("cannot read ", path.string(), ": expected a regular file, got ",
                                  S_ISDIR(status.st_mode) ? "a folder" : "a device or pipe",
                                  "; give the path of a file"));
  }
  file.bytes = status.st_size;
  return file;
}

std::string read_file(const std::filesystem::path& path, int64_t max_bytes, std::string_view kind) {
  const InputFile file = open_input_file(path);
  if (file.bytes > max_bytes) {
    throw CheckpointError(str_cat("cannot read ", path.string(), ": expected at most ", max_bytes,
                                  " bytes of ", kind, ", got ", file.bytes,
                                  "; is this the right file?"));
  }
  std::string text(static_cast<size_t>(file.bytes), '\0');
  size_t done = 0;
  while (done < text.size()) {
    const ssize_t count = ::read(file.handle.get(), text.data() + done, text.size() - done);
    if (count < 0 && errno == EINTR) continue;
    if (count <= 0) {
      const int error = errno;
      throw CheckpointError(str_cat("cannot read ", path.string(), ": ",
                                    count == 0 ? "it became shorter meanwhile" : errno_text(error),
                                    " after ", done, " of ", text.size(), " bytes"));
    }
    done += static_cast<size_t>(count);
  }
  return text;
}

}  // namespace cadre

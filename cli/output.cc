#include "output.h"

#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/file_handle.h"

namespace cadre::cli {

bool write_stdout(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EPIPE) {
      return false;
    } else if (errno != EINTR) {
      throw Error(str_cat("standard output: cannot write ", text.size(), " bytes: ",
                          errno_text(errno), "; free space there or send the output elsewhere"));
    }
  }
  return true;
}

bool write_json(const Json& json) {
  // Paths may hold bytes that are not UTF-8; they come out as U+FFFD.
  return write_stdout(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void show(std::string_view text) {
  // Nothing sensible is left to do when standard error cannot be written.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, text.data(), text.size());
}

void note(std::string_view text, bool quiet) {
  if (!quiet) show(str_cat(text, "\n"));
}

void require_writable(const std::filesystem::path& path, std::string_view option) {
  std::error_code ignored;
  const std::filesystem::file_status status = std::filesystem::status(path, ignored);
  if (std::filesystem::is_directory(status)) {
    throw Error(str_cat(option, " ", path.string(), ": expected the name of a file, got a folder"));
  }
  if (path.empty() || std::filesystem::exists(status)) return;  // the writer says the rest
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  if (access(folder.c_str(), W_OK | X_OK) == 0) return;
  const std::string reason = errno_text(errno);
  throw Error(str_cat(option, " ", path.string(), ": cannot write in the folder ", folder.string(),
                      ": ", reason, "; make it or name another place"));
}

void require_distinct(const std::filesystem::path& out, const std::filesystem::path& input) {
  std::error_code ignored;  // of a file that is not there
  if (!std::filesystem::equivalent(out, input, ignored)) return;
  throw InvalidArgument(str_cat("--out ", out.string(), ": expected another file than the input ",
                                input.string(), ", got the same; name another place"));
}

}  // namespace cadre::cli

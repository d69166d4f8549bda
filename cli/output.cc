#include "output.h"

#include <unistd.h>

#include <cerrno>
#include <nlohmann/json.hpp>
#include <string>
#include <system_error>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cli {

bool write_stdout(std::string_view text) {
  while (!text.empty()) {
    const ssize_t written = ::write(STDOUT_FILENO, text.data(), text.size());
    if (written >= 0) {
      text.remove_prefix(static_cast<size_t>(written));
    } else if (errno == EPIPE) {
      return false;
    } else if (errno != EINTR) {
      throw Error(str_cat("standard output: cannot write ", text.size(),
                          " bytes: ", std::generic_category().message(errno),
                          "; free space there or send the output elsewhere"));
    }
  }
  return true;
}

bool write_json(const Json& json) {
  // Paths may hold bytes that are not UTF-8; they come out as U+FFFD.
  return write_stdout(json.dump(-1, ' ', false, Json::error_handler_t::replace) + "\n");
}

void note(std::string_view text, bool quiet) {
  if (quiet) return;
  const std::string line = str_cat(text, "\n");
  // Nothing sensible is left to do when standard error cannot be written.
  [[maybe_unused]] const ssize_t written = ::write(STDERR_FILENO, line.data(), line.size());
}

void require_writable(const std::filesystem::path& path) {
  if (path.empty()) return;
  const std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  std::error_code ignored;
  const bool exists = std::filesystem::exists(path, ignored);
  if (std::filesystem::is_directory(path, ignored)) {
    throw Error(str_cat("--out ", path.string(), ": expected the path of a file, got a folder"));
  }
  if (exists && access(path.c_str(), W_OK) == 0) return;
  if (access(folder.c_str(), W_OK | X_OK) == 0 && !exists) return;
  const std::string reason = std::generic_category().message(errno);
  throw Error(str_cat("--out ", path.string(), ": cannot write there: ", reason,
                      "; make the folder ", folder.string(), " or name another place"));
}

}  // namespace cadre::cli

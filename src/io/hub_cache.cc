// resolve_model_path (checkpoint.h). Layout of the cache, as huggingface_hub makes it:
//   models--owner--name/refs/<branch or tag>   the commit, as text
//   models--owner--name/snapshots/<commit>/    the files (links into blobs/)
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <fstream>
#include <optional>
#include <string>
#include <string_view>
#include <system_error>
#include <vector>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "io/checkpoint.h"

namespace cadre {
namespace {

namespace fs = std::filesystem;

std::vector<std::string_view> split(std::string_view text, char separator) {
  std::vector<std::string_view> parts;
  for (size_t end; (end = text.find(separator)) != text.npos; text.remove_prefix(end + 1))
    parts.push_back(text.substr(0, end));
  parts.push_back(text);
  return parts;
}

// One component of a path that stays where it is put.
bool is_plain_component(std::string_view part) {
  const auto is_allowed = [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' ||
           c == '_' || c == '.' || c == '+' || c == '@';
  };
  return !part.empty() && part != "." && part != ".." &&
         std::all_of(part.begin(), part.end(), is_allowed);
}

bool is_plain_path(std::string_view path) {
  const auto parts = split(path, '/');
  return std::all_of(parts.begin(), parts.end(), is_plain_component);
}

// "owner/name", or the "name" of the oldest models.
bool is_hub_id(std::string_view text) {
  const auto parts = split(text, '/');
  return parts.size() <= 2 && is_plain_path(text) && text.front() != '.' &&
         text.find("--") == text.npos;
}

std::string environment(const char* name) {
  const char* value = std::getenv(name);
  return value == nullptr ? "" : value;
}

// As Python's expanduser: without HOME, what the user database says.
fs::path home_folder() {
  if (const std::string home = environment("HOME"); !home.empty()) return home;
  char buffer[4096];
  struct passwd entry {};
  struct passwd* found = nullptr;
  if (::getpwuid_r(::getuid(), &entry, buffer, sizeof buffer, &found) == 0 && found != nullptr) {
    return found->pw_dir;
  }
  throw CheckpointError(
      "model cache: expected a home folder, HOME is not set and the user database has none; set "
      "HF_HUB_CACHE or give the path of a folder");
}

fs::path cache_folder() {
  if (const std::string hub = environment("HF_HUB_CACHE"); !hub.empty()) return hub;
  if (const std::string home = environment("HF_HOME"); !home.empty()) return fs::path(home) / "hub";
  if (const std::string xdg = environment("XDG_CACHE_HOME"); !xdg.empty())
    return fs::path(xdg) / "huggingface" / "hub";
  return home_folder() / ".cache" / "huggingface" / "hub";
}

// The commit in refs/<revision>; empty when there is no such file.
std::optional<std::string> read_ref(const fs::path& file) {
  std::error_code ignored;
  if (!fs::is_regular_file(file, ignored)) return std::nullopt;
  std::ifstream in(file);
  std::string commit;
  in >> commit;
  if (commit.size() > 128 || !is_plain_component(commit)) {
    throw CheckpointError(str_cat("model cache: ", file.string(), ": expected a commit, got ",
                                  quote(commit), "; download the model again"));
  }
  return commit;
}

// A ref whose snapshot is gone would only lead to the next error.
bool has_snapshot(const fs::path& repository, const fs::path& ref) {
  std::error_code ignored;
  std::ifstream in(ref);
  std::string commit;
  return in >> commit && is_plain_component(commit) &&
         fs::is_directory(repository / "snapshots" / commit, ignored);
}

// What can be asked for: refs (which may lie in folders) and commits.
std::vector<std::string> revisions_in(const fs::path& repository) {
  std::vector<std::string> found;
  std::error_code error;
  const fs::path refs = repository / "refs";
  for (fs::recursive_directory_iterator it(refs, error), end; !error && it != end;
       it.increment(error)) {
    if (has_snapshot(repository, it->path()))
      found.push_back(it->path().lexically_relative(refs).string());
  }
  for (fs::directory_iterator it(repository / "snapshots", error), end; !error && it != end;
       it.increment(error)) {
    found.push_back(it->path().filename().string());
  }
  std::sort(found.begin(), found.end());
  return found;
}

fs::path find_snapshot(const std::string& id, const std::string& revision) {
  const fs::path cache = cache_folder();
  std::string folder_name = "models--" + id;
  if (const size_t slash = folder_name.find('/'); slash != folder_name.npos)
    folder_name.replace(slash, 1, "--");
  const fs::path repository = cache / folder_name;
  const std::string get_it = str_cat("; download it with: hf download ", id,
                                     revision == "main" ? "" : str_cat(" --revision ", revision),
                                     " (or give the path of a folder)");
  std::error_code ignored;
  if (!fs::is_directory(repository, ignored)) {
    throw CheckpointError(str_cat(
        "model ", quote(id), ": no such folder, and not in the hub cache: ", repository.string(),
        " does not exist", get_it));
  }
  const std::string commit = read_ref(repository / "refs" / revision).value_or(revision);
  const fs::path snapshot = repository / "snapshots" / commit;
  if (!fs::is_directory(snapshot, ignored)) {
    const auto there = revisions_in(repository);
    throw CheckpointError(str_cat("model ", quote(id), ": revision ", quote(revision),
                                  " is not in the hub cache: looked for ", snapshot.string(), "; ",
                                  "there are: ", there.empty() ? "none" : join(there), get_it));
  }
  return snapshot;
}

}  // namespace

fs::path resolve_model_path(const std::string& path_or_id, const std::string& revision) {
  std::error_code ignored;
  const fs::path path = path_or_id;
  if (fs::is_directory(path, ignored)) return path;
  if (fs::exists(path, ignored)) {
    throw CheckpointError(str_cat("model ", quote(path_or_id),
                                  ": expected a folder, got a file; give the folder it is in"));
  }
  if (!is_hub_id(path_or_id)) {
    throw CheckpointError(
        str_cat("model ", quote(path_or_id),
                ": no such folder, and it is no hub id (owner/name) to look up in "
                "the hub cache; check the path"));
  }
  const std::string wanted = revision.empty() ? "main" : revision;
  if (!is_plain_path(wanted)) {
    throw CheckpointError(str_cat("model ", quote(path_or_id),
                                  ": expected a branch, tag or commit ", "as revision, got ",
                                  quote(revision)));
  }
  return find_snapshot(path_or_id, wanted);
}

}  // namespace cadre

#include "bundled_model.h"

#include <cstdlib>
#include <filesystem>
#include <system_error>
#include <vector>

#include "cadre/error.h"
#include "core/str_cat.h"

namespace cadre::cli {

namespace fs = std::filesystem;

namespace {

constexpr const char* kName = "tiny-moe";

std::vector<fs::path> places() {
  const char* assets = std::getenv("CADRE_ASSETS");
  if (assets != nullptr && *assets != '\0') return {fs::path(assets) / kName};
  std::vector<fs::path> found;
  std::error_code error;
  const fs::path command = fs::read_symlink("/proc/self/exe", error);
  if (!error) found.push_back(command.parent_path().parent_path() / "share" / "cadre" / kName);
  found.push_back(fs::path(CADRE_SOURCE_ASSETS) / kName);
  return found;
}

}  // namespace

std::string bundled_model_path() {
  const std::vector<fs::path> candidates = places();
  std::vector<std::string> looked;
  for (const fs::path& folder : candidates) {
    std::error_code ignored;
    if (fs::exists(folder / "config.json", ignored)) return folder.string();
    looked.push_back(folder.string());
  }
  throw CheckpointError(str_cat(
      "the bundled model ", kName, " is not there; looked for config.json in ", join(looked),
      "; set CADRE_ASSETS to the folder that holds ", kName, ", or name a model with --model"));
}

}  // namespace cadre::cli

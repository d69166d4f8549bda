#include "models/registry.h"

#include <mutex>

#include "cadre/error.h"
#include "cadre/model.h"
#include "core/str_cat.h"
#include "models/compiled_models.h"

namespace cadre {
namespace {

struct Additions {
  std::mutex mutex;
  std::vector<Architecture> items;
};

Additions& additions() {
  static Additions instance;
  return instance;
}

std::vector<Architecture> all_architectures() {
  std::vector<Architecture> result;
  for (const CompiledModel& model : compiled_models()) {
    result.push_back({model.architecture, model.model_type, model.build});
  }
  const std::lock_guard lock(additions().mutex);
  result.insert(result.end(), additions().items.begin(), additions().items.end());
  return result;
}

}  // namespace

Architecture find_architecture(const ConfigReader& config) {
  std::vector<std::string> wanted;
  if (config.has("architectures")) wanted = config.texts("architectures");
  const std::string model_type = config.text_or("model_type", "");
  for (const Architecture& known : all_architectures()) {
    if (wanted.empty() ? known.model_type == model_type : known.name == wanted.front()) {
      return known;
    }
  }
  if (wanted.empty() && model_type.empty()) {
    config_error(config, "names no architecture: expected \"architectures\" or \"model_type\"");
  }
  throw Unsupported(str_cat(config.origin(), ": architecture \"",
                            wanted.empty() ? model_type : wanted.front(),
                            "\" is not supported; supported: ", join(known_architectures())));
}

void add_architecture_for_testing(const Architecture& architecture) {
  const std::lock_guard lock(additions().mutex);
  additions().items.push_back(architecture);
}

std::vector<std::string> known_architectures() {
  std::vector<std::string> names;
  for (const CompiledModel& model : compiled_models()) {
    names.push_back(str_cat(model.architecture, " (", model.model_type, ")"));
  }
  return names;
}

}  // namespace cadre

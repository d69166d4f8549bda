// The entry points of models: from_pretrained and inspect_model.
#include "cadre/model.h"

#include "cadre/error.h"

namespace cadre {

std::unique_ptr<Model> Model::from_pretrained(const std::string& path, const LoadOptions&) {
  throw Unsupported("from_pretrained: " + path + ": models are not part of this build yet");
}

ModelReport inspect_model(const std::string& path, const LoadOptions&) {
  throw Unsupported("inspect_model: " + path + ": models are not part of this build yet");
}

std::vector<std::string> known_architectures() { return {}; }

}  // namespace cadre

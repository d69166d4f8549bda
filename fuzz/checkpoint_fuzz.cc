// A checkpoint folder: the input holds config.json, the index and two shards, divided by lines that
// say "----". Every byte of every tensor of an accepted folder can be read.
#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>

#include "cadre/error.h"
#include "io/checkpoint.h"
#include "support/temp_dir.h"

namespace {

constexpr std::array<const char*, 4> kFiles = {"config.json", "model.safetensors.index.json",
                                               "a.safetensors", "b.safetensors"};
constexpr std::string_view kDivider = "\n----\n";
uint8_t volatile sink;  // keeps the reads

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  static const cadre::test::TempDir dir;
  std::string_view rest(reinterpret_cast<const char*>(data), size);
  for (const char* file : kFiles) {
    const std::string_view content = rest.substr(0, rest.find(kDivider));
    dir.write(file, content);
    rest.remove_prefix(content.size() == rest.size() ? rest.size()
                                                     : content.size() + kDivider.size());
  }
  try {
    const auto checkpoint = cadre::Checkpoint::open(dir.path());
    for (const cadre::CheckpointTensor& tensor : checkpoint.tensors()) {
      const auto* bytes = static_cast<const uint8_t*>(tensor.view.data());
      sink = std::accumulate(bytes, bytes + tensor.view.nbytes(), uint8_t{0});
    }
  } catch (const cadre::CheckpointError&) {
  }
  return 0;
}

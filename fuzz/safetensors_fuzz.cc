// The header of a safetensors file: any bytes give entries inside the file, or a CheckpointError.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <span>

#include "cadre/error.h"
#include "io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    const auto file = std::as_bytes(std::span(data, size));
    for (const cadre::SafetensorsEntry& entry :
         cadre::parse_safetensors(file, "fuzz.safetensors").entries) {
      const cadre::TensorView view(data + entry.offset, entry.dtype, entry.shape);
      if (entry.offset + entry.bytes > size || view.nbytes() != entry.bytes) std::abort();
    }
  } catch (const cadre::CheckpointError&) {
  }
  return 0;
}

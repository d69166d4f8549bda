// An image file of any format; small pictures only, so that a run stays quick.
#include <cstddef>
#include <cstdint>
#include <span>

#include "cadre/error.h"
#include "cadre/image.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  try {
    cadre::decode_image(std::as_bytes(std::span(data, size)), "image", int64_t{1} << 16);
  } catch (const cadre::Error&) {
  }
  return 0;
}

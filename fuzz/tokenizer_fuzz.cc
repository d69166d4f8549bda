// tokenizer.json, then a text for it: the input is the JSON, a line that says "----", and the text.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "cadre/error.h"
#include "cadre/tokenizer.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  constexpr std::string_view kDivider = "\n----\n";
  const std::string_view input(reinterpret_cast<const char*>(data), size);
  const size_t end = input.find(kDivider);
  const std::string_view text =
      end == input.npos ? "Hello, w\xc3\xb6rld!\n\xff" : input.substr(end + kDivider.size());
  try {
    const auto tokenizer = cadre::Tokenizer::from_json(input.substr(0, end), "tokenizer.json");
    const auto ids = tokenizer.encode(text);
    tokenizer.decode(ids);
    cadre::TextStream stream(tokenizer);
    for (const cadre::TokenId id : ids) stream.push(id);
    stream.finish();
  } catch (const cadre::Error&) {
  }
  return 0;
}

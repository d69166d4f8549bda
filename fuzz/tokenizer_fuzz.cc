// tokenizer.json, then a text for it: the input is the JSON, a line that says "----", and the text.
// What is known of words changes no ids, and a stream gives the text of the whole.
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
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
    if (tokenizer.encode(text) != ids) std::abort();
    cadre::TextStream stream(tokenizer);
    std::string streamed;
    for (const cadre::TokenId id : ids) streamed += stream.push(id);
    streamed += stream.finish();
    if (tokenizer.decode(ids) != streamed) std::abort();
  } catch (const cadre::Error&) {
  }
  return 0;
}

#include "generation/tokenizer/metaspace.h"

#include "generation/tokenizer/utf8.h"

namespace cadre::text {

Metaspace Metaspace::parse(const JsonNode& node) {
  Metaspace metaspace;
  const JsonNode replacement = node.at("replacement");
  metaspace.replacement = replacement.text();
  size_t length = 0;
  if (!metaspace.replacement.empty()) code_point_at(metaspace.replacement, 0, length);
  if (length == 0 || length != metaspace.replacement.size()) replacement.fail("one character");
  metaspace.split = node.boolean_or("split", true);

  const bool adds_space = node.boolean_or("add_prefix_space", true);
  const auto scheme = node.find("prepend_scheme");
  const std::string name = scheme ? scheme->text() : adds_space ? "always" : "never";
  if (name == "never") {
    metaspace.prepend = Prepend::kNever;
  } else if (name == "first") {
    metaspace.prepend = Prepend::kFirst;
  } else if (name != "always") {
    scheme->fail("never, first or always");
  }
  if (!adds_space && metaspace.prepend != Prepend::kNever) {
    scheme->fail("never, as add_prefix_space is false");
  }
  return metaspace;
}

}  // namespace cadre::text

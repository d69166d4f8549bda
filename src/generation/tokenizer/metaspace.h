// The settings of Metaspace, pre-tokenizer and decoder alike: spaces written as a visible character
// (SentencePiece's U+2581), and one put before text that lacks it.
#pragma once

#include <cstdint>
#include <string>

#include "generation/tokenizer/json_node.h"

namespace cadre::text {

struct Metaspace {
  enum class Prepend : uint8_t { kNever, kFirst, kAlways };  // kFirst: at the start of all text

  std::string replacement;  // one character
  Prepend prepend = Prepend::kAlways;
  bool split = true;  // each replacement starts a piece

  /// Reads both spellings: "prepend_scheme", and "add_prefix_space" of older files.
  static Metaspace parse(const JsonNode& node);
};

}  // namespace cadre::text

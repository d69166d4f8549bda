// Template text to tokens, with the white space rules of trim_blocks and lstrip_blocks.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "generation/jinja/fault.h"

namespace cadre::jinja {

enum class TokenType : uint8_t {
  kData,           // text between tags
  kVariableBegin,  // {{
  kVariableEnd,
  kBlockBegin,  // {%
  kBlockEnd,
  kName,
  kString,  // its value, escapes resolved
  kInteger,
  kFloat,
  kOperator,
  kEnd,  // once, last
};

struct Token {
  TokenType type = TokenType::kEnd;
  std::string text;  // of a number without underscores
  Position at;

  bool is_name(std::string_view name) const { return type == TokenType::kName && text == name; }
  bool is_operator(std::string_view name) const {
    return type == TokenType::kOperator && text == name;
  }
};

/// A fault of the text at a known place; see Fault.
struct SyntaxFault {
  Fault fault;
  Position at;
};

/// `source`: valid UTF-8. Throws SyntaxFault.
std::vector<Token> tokenize(std::string_view source);

}  // namespace cadre::jinja

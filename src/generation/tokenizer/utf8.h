// UTF-8 by hand: checking, lossy repair and code point access for the tokenizer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

namespace cadre::text {

enum class SequenceKind : uint8_t { kValid, kInvalid, kIncomplete };

/// What starts at one byte. kInvalid: a maximal ill-formed part that becomes one U+FFFD (Unicode
/// 3.9, as Rust and Python do). kIncomplete: the bytes end inside a character that may still become
/// valid.
struct Sequence {
  SequenceKind kind;
  size_t length;
};
Sequence sequence_at(std::string_view bytes, size_t position);

bool is_valid_utf8(std::string_view bytes);

/// Appends the characters of `bytes` that are final; returns the number of bytes used up. An
/// incomplete end stays unless `at_end`, then it becomes U+FFFD.
size_t append_lossy(std::string_view bytes, bool at_end, std::string& out);

/// The code point at `position` of valid UTF-8; `length` becomes its number of bytes.
char32_t code_point_at(std::string_view valid, size_t position, size_t& length);
/// The code point that ends right before `end` > 0.
char32_t code_point_before(std::string_view valid, size_t end, size_t& length);

void append_code_point(char32_t code_point, std::string& out);

}  // namespace cadre::text

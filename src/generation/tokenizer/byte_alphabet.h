// GPT-2's byte alphabet: each of the 256 bytes written as one printable character, so that a
// vocabulary of text can hold any bytes. Printable Latin-1 stands for itself, the rest are U+0100
// and up.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace cadre::text {

char32_t character_of_byte(uint8_t byte);

/// The byte that a character of the alphabet stands for; -1 for any other.
int byte_of_character(char32_t character);

/// The token's bytes appended to `out`; false (nothing appended) when it holds another character.
bool append_bytes_of_token(std::string_view token, std::string& out);

/// `bytes` written in the alphabet, appended to `out`.
void append_in_alphabet(std::string_view bytes, std::string& out);

}  // namespace cadre::text

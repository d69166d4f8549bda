#include "generation/tokenizer/byte_alphabet.h"

#include <array>

#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

constexpr size_t kAlphabetEnd = 0x100 + 68;  // 68 bytes have no printable character

constexpr bool is_printable(unsigned byte) {
  return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<uint16_t, 256> make_characters() {
  std::array<uint16_t, 256> characters{};
  uint16_t next = 0x100;
  for (unsigned byte = 0; byte < 256; ++byte) {
    characters[byte] = is_printable(byte) ? static_cast<uint16_t>(byte) : next++;
  }
  return characters;
}

constexpr std::array<uint16_t, 256> kCharacters = make_characters();

constexpr std::array<int16_t, kAlphabetEnd> make_bytes() {
  std::array<int16_t, kAlphabetEnd> bytes{};
  for (auto& byte : bytes) byte = -1;
  for (unsigned byte = 0; byte < 256; ++byte) bytes[kCharacters[byte]] = static_cast<int16_t>(byte);
  return bytes;
}

constexpr std::array<int16_t, kAlphabetEnd> kBytes = make_bytes();

}  // namespace

char32_t character_of_byte(uint8_t byte) { return kCharacters[byte]; }

int byte_of_character(char32_t character) {
  return character < kAlphabetEnd ? kBytes[character] : -1;
}

bool append_bytes_of_token(std::string_view token, std::string& out) {
  const size_t before = out.size();
  for (size_t i = 0, length = 0; i < token.size(); i += length) {
    const int byte = byte_of_character(code_point_at(token, i, length));
    if (byte < 0) {
      out.resize(before);
      return false;
    }
    out += static_cast<char>(byte);
  }
  return true;
}

void append_in_alphabet(std::string_view bytes, std::string& out) {
  for (const char byte : bytes) {
    append_code_point(kCharacters[static_cast<uint8_t>(byte)], out);
  }
}

}  // namespace cadre::text

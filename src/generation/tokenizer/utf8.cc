#include "generation/tokenizer/utf8.h"

#include <algorithm>
#include <cstring>

namespace cadre::text {
namespace {

constexpr std::string_view kReplacement = "\xEF\xBF\xBD";

uint8_t byte_at(std::string_view bytes, size_t i) { return static_cast<uint8_t>(bytes[i]); }

// Bytes of the character that `lead` starts; 0 when it starts none.
size_t length_of_lead(uint8_t lead) {
  if (lead < 0x80) return 1;
  if (lead < 0xC2) return 0;
  if (lead < 0xE0) return 2;
  if (lead < 0xF0) return 3;
  return lead < 0xF5 ? 4 : 0;
}

// The second byte rules out overlong forms, surrogates and what lies beyond U+10FFFF.
bool second_fits(uint8_t lead, uint8_t second) {
  const uint8_t low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  const uint8_t high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  return second >= low && second <= high;
}

size_t skip_ascii(std::string_view bytes, size_t i) {
  while (i + 8 <= bytes.size()) {
    uint64_t word;
    std::memcpy(&word, bytes.data() + i, 8);
    if ((word & 0x8080808080808080u) != 0) break;
    i += 8;
  }
  while (i < bytes.size() && byte_at(bytes, i) < 0x80) ++i;
  return i;
}

}  // namespace

Sequence sequence_at(std::string_view bytes, size_t position) {
  const uint8_t lead = byte_at(bytes, position);
  const size_t length = length_of_lead(lead);
  if (length == 0) return {SequenceKind::kInvalid, 1};
  for (size_t i = 1; i < length; ++i) {
    if (position + i == bytes.size()) return {SequenceKind::kIncomplete, i};
    const uint8_t next = byte_at(bytes, position + i);
    const bool fits = i == 1 ? second_fits(lead, next) : (next & 0xC0) == 0x80;
    if (!fits) return {SequenceKind::kInvalid, i};
  }
  return {SequenceKind::kValid, length};
}

bool is_valid_utf8(std::string_view bytes) {
  size_t i = skip_ascii(bytes, 0);
  while (i < bytes.size()) {
    const Sequence sequence = sequence_at(bytes, i);
    if (sequence.kind != SequenceKind::kValid) return false;
    i += sequence.length;
    if (i < bytes.size() && byte_at(bytes, i) < 0x80) i = skip_ascii(bytes, i);
  }
  return true;
}

size_t append_lossy(std::string_view bytes, bool at_end, std::string& out) {
  size_t i = 0;
  while (i < bytes.size()) {
    const size_t plain = skip_ascii(bytes, i);
    out.append(bytes, i, plain - i);
    i = plain;
    if (i == bytes.size()) break;
    const Sequence sequence = sequence_at(bytes, i);
    if (sequence.kind == SequenceKind::kIncomplete && !at_end) break;
    if (sequence.kind == SequenceKind::kValid) {
      out.append(bytes, i, sequence.length);
    } else {
      out += kReplacement;
    }
    i += sequence.length;
  }
  return i;
}

char32_t code_point_at(std::string_view valid, size_t position, size_t& length) {
  const uint8_t lead = byte_at(valid, position);
  length = std::max<size_t>(length_of_lead(lead), 1);
  if (length == 1) return lead;
  char32_t code_point = lead & (0x7Fu >> length);
  for (size_t i = 1; i < length; ++i) {
    code_point = (code_point << 6) | (byte_at(valid, position + i) & 0x3Fu);
  }
  return code_point;
}

char32_t code_point_before(std::string_view valid, size_t end, size_t& length) {
  size_t begin = end - 1;
  while (begin > 0 && (byte_at(valid, begin) & 0xC0) == 0x80) --begin;
  return code_point_at(valid, begin, length);
}

void append_code_point(char32_t code_point, std::string& out) {
  const auto tail = [&](int shift) {
    out += static_cast<char>(0x80 | ((code_point >> shift) & 0x3F));
  };
  if (code_point < 0x80) {
    out += static_cast<char>(code_point);
  } else if (code_point < 0x800) {
    out += static_cast<char>(0xC0 | (code_point >> 6));
    tail(0);
  } else if (code_point < 0x10000) {
    out += static_cast<char>(0xE0 | (code_point >> 12));
    tail(6);
    tail(0);
  } else {
    out += static_cast<char>(0xF0 | (code_point >> 18));
    tail(12);
    tail(6);
    tail(0);
  }
}

}  // namespace cadre::text

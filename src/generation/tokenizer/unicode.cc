#include "generation/tokenizer/unicode.h"

#include <utf8proc.h>

#include <algorithm>
#include <array>
#include <bitset>
#include <iterator>

#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

struct NewerRange {
  char32_t first, last, stand_in;
};

constexpr NewerRange kNewer[] = {
#include "generation/tokenizer/unicode_newer.inc"
};

// Symbols that are Alphabetic: circled, squared and negative letters.
constexpr std::array<std::pair<char32_t, char32_t>, 4> kAlphabeticSymbols = {
    {{0x24B6, 0x24E9}, {0x1F130, 0x1F149}, {0x1F150, 0x1F169}, {0x1F170, 0x1F189}}};

// Null when Unicode 14 knows the code point.
const NewerRange* find_newer(char32_t code_point) {
  const auto* it = std::upper_bound(std::begin(kNewer), std::end(kNewer), code_point,
                                    [](char32_t c, const NewerRange& r) { return c < r.first; });
  if (it == std::begin(kNewer) || code_point > std::prev(it)->last) return nullptr;
  return std::prev(it);
}

// Blocks of 256 code points that hold a newer one: lets ordinary text pass at one look-up.
const std::bitset<0x1100>& newer_blocks() {
  static const auto blocks = [] {
    std::bitset<0x1100> set;
    for (const NewerRange& range : kNewer) {
      for (char32_t block = range.first >> 8; block <= range.last >> 8; ++block) set.set(block);
    }
    return set;
  }();
  return blocks;
}

}  // namespace

bool is_word(char32_t code_point) {
  if (code_point == 0x200C || code_point == 0x200D) return true;
  if (const auto* newer = find_newer(code_point)) code_point = newer->stand_in;
  for (const auto& range : kAlphabeticSymbols) {
    if (code_point >= range.first && code_point <= range.second) return true;
  }
  switch (utf8proc_category(static_cast<utf8proc_int32_t>(code_point))) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
      return true;
    default:
      return false;
  }
}

bool is_space(char32_t code_point) {
  switch (code_point) {
    case 0x20:
    case 0x85:
    case 0xA0:
    case 0x1680:
    case 0x2028:
    case 0x2029:
    case 0x202F:
    case 0x205F:
    case 0x3000:
      return true;
    default:
      return (code_point >= 0x09 && code_point <= 0x0D) ||
             (code_point >= 0x2000 && code_point <= 0x200A);
  }
}

bool is_newer(char32_t code_point) {
  return newer_blocks().test(code_point >> 8) && find_newer(code_point) != nullptr;
}

bool replace_newer(std::string_view text, std::string& shadow) {
  const auto& blocks = newer_blocks();
  bool replaced = false;
  for (size_t i = 0, length = 1; i < text.size(); i += length) {
    length = 1;
    if (static_cast<uint8_t>(text[i]) < 0xE0) continue;  // no newer one is that short
    const char32_t code_point = code_point_at(text, i, length);
    if (!blocks.test(code_point >> 8)) continue;
    const auto* newer = find_newer(code_point);
    if (newer == nullptr) continue;
    if (!replaced) shadow.assign(text);
    replaced = true;
    std::string stand_in;
    append_code_point(newer->stand_in, stand_in);
    shadow.replace(i, length, stand_in);
  }
  return replaced;
}

}  // namespace cadre::text

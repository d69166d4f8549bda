// Case and classes of characters: utf8proc's tables, and ours where Python knows more.
#include <utf8proc.h>

#include <algorithm>
#include <iterator>

#include "generation/jinja/python_text.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

struct Mapping {
  char32_t from;
  const char* to;
};
struct Range {
  char32_t first, last;
};

#include "generation/jinja/case_tables.inc"

template <size_t N>
bool is_in(const Range (&ranges)[N], char32_t code_point) {
  const auto* after =
      std::upper_bound(std::begin(ranges), std::end(ranges), code_point,
                       [](char32_t c, const Range& range) { return c < range.first; });
  return after != std::begin(ranges) && code_point <= std::prev(after)->last;
}

template <size_t N>
const char* find_mapping(const Mapping (&table)[N], char32_t code_point) {
  const auto* row =
      std::lower_bound(std::begin(table), std::end(table), code_point,
                       [](const Mapping& mapping, char32_t c) { return mapping.from < c; });
  return row != std::end(table) && row->from == code_point ? row->to : nullptr;
}

utf8proc_category_t category(char32_t code_point) {
  return utf8proc_category(static_cast<utf8proc_int32_t>(code_point));
}

bool is_lower(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LL || is_in(kOtherLower, c); }
bool is_upper(char32_t c) { return category(c) == UTF8PROC_CATEGORY_LU || is_in(kOtherUpper, c); }
bool is_cased(char32_t c) {
  return is_lower(c) || is_upper(c) || category(c) == UTF8PROC_CATEGORY_LT;
}

bool is_case_ignorable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
      return true;
    default:
      return is_in(kOtherIgnorable, c);
  }
}

bool is_alpha(char32_t c) {
  const auto found = category(c);
  return found >= UTF8PROC_CATEGORY_LU && found <= UTF8PROC_CATEGORY_LO;
}

bool is_digit(char32_t c) { return category(c) == UTF8PROC_CATEGORY_ND || is_in(kOtherDigits, c); }

// str.isalnum() also counts fractions, Roman numerals and numbers of other scripts.
bool is_alnum(char32_t c) {
  return is_alpha(c) || is_digit(c) || category(c) == UTF8PROC_CATEGORY_NL ||
         category(c) == UTF8PROC_CATEGORY_NO;
}

std::u32string decode(std::string_view text) {
  std::u32string out;
  for (size_t i = 0, size = 0; i < text.size(); i += size) {
    out += text::code_point_at(text, i, size);
  }
  return out;
}

template <size_t N>
void append_mapped(const Mapping (&table)[N], char32_t c, utf8proc_int32_t simple,
                   std::string& out) {
  if (const char* full = find_mapping(table, c)) {
    out += full;
  } else {
    text::append_code_point(static_cast<char32_t>(simple), out);
  }
}

void append_upper(char32_t c, std::string& out) {
  append_mapped(kUpper, c, utf8proc_toupper(static_cast<utf8proc_int32_t>(c)), out);
}

void append_title(char32_t c, std::string& out) {
  append_mapped(kTitle, c, utf8proc_totitle(static_cast<utf8proc_int32_t>(c)), out);
}

// A capital sigma at the end of a word becomes the final one.
bool is_final_sigma(std::u32string_view text, size_t at) {
  size_t before = at;
  while (before > 0 && is_case_ignorable(text[before - 1])) --before;
  if (before == 0 || !is_cased(text[before - 1])) return false;
  size_t after = at + 1;
  while (after < text.size() && is_case_ignorable(text[after])) ++after;
  return after == text.size() || !is_cased(text[after]);
}

void append_lower(std::u32string_view text, size_t at, std::string& out) {
  constexpr char32_t kCapitalSigma = 0x3A3;
  const char32_t c = text[at];
  if (c == kCapitalSigma) {
    out += is_final_sigma(text, at) ? "\xcf\x82" : "\xcf\x83";
  } else {
    append_mapped(kLower, c, utf8proc_tolower(static_cast<utf8proc_int32_t>(c)), out);
  }
}

}  // namespace

std::string upper(std::string_view text) {
  std::string out;
  for (const char32_t c : decode(text)) append_upper(c, out);
  return out;
}

std::string lower(std::string_view text) {
  std::string out;
  const std::u32string code_points = decode(text);
  for (size_t i = 0; i < code_points.size(); ++i) append_lower(code_points, i, out);
  return out;
}

std::string title(std::string_view text) {
  std::string out;
  const std::u32string code_points = decode(text);
  bool in_word = false;
  for (size_t i = 0; i < code_points.size(); ++i) {
    in_word ? append_lower(code_points, i, out) : append_title(code_points[i], out);
    in_word = is_cased(code_points[i]);
  }
  return out;
}

std::string capitalize(std::string_view text) {
  std::string out;
  const std::u32string code_points = decode(text);
  for (size_t i = 0; i < code_points.size(); ++i) {
    i > 0 ? append_lower(code_points, i, out) : append_title(code_points[i], out);
  }
  return out;
}

bool is_space(char32_t c) {
  if (c < 0x80) return c == ' ' || (c >= '\t' && c <= '\r') || (c >= 0x1c && c <= 0x1f);
  return c == 0x85 || category(c) == UTF8PROC_CATEGORY_ZS || c == 0x2028 || c == 0x2029;
}

bool is_printable(char32_t c) {
  switch (category(c)) {
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
      return false;
    case UTF8PROC_CATEGORY_ZS:
      return c == ' ';
    default:
      return true;
  }
}

bool all_are(CharacterClass wanted, std::string_view text) {
  const std::u32string code_points = decode(text);
  const auto all = [&](bool (*is)(char32_t)) {
    return !code_points.empty() && std::all_of(code_points.begin(), code_points.end(), is);
  };
  // One cased character at least, and none of the other case.
  const auto all_cased = [&](bool (*is)(char32_t)) {
    return std::any_of(code_points.begin(), code_points.end(), is_cased) &&
           std::all_of(code_points.begin(), code_points.end(),
                       [&](char32_t c) { return !is_cased(c) || is(c); });
  };
  switch (wanted) {
    case CharacterClass::kAlpha:
      return all(is_alpha);
    case CharacterClass::kDigit:
      return all(is_digit);
    case CharacterClass::kAlnum:
      return all(is_alnum);
    case CharacterClass::kSpace:
      return all(is_space);
    case CharacterClass::kUpper:
      return all_cased(is_upper);
    case CharacterClass::kLower:
      break;
  }
  return all_cased(is_lower);
}

}  // namespace cadre::jinja

#include "generation/jinja/string_literal.h"

#include <algorithm>
#include <charconv>
#include <cstdio>

#include "generation/jinja/fault.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

// What is not ASCII becomes an escape first, also after a backslash (which it then escapes): the
// two steps of Jinja.
std::string to_ascii(std::string_view literal) {
  std::string out;
  for (size_t i = 0, size = 0; i < literal.size(); i += size) {
    const char32_t c = text::code_point_at(literal, i, size);
    if (c < 0x80) {
      out += static_cast<char>(c);
      continue;
    }
    char escape[16];
    const char* format = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
    std::snprintf(escape, sizeof escape, format, static_cast<unsigned>(c));
    out += escape;
  }
  return out;
}

class Unescaper {
 public:
  explicit Unescaper(std::string text) : text_(std::move(text)) {}

  std::string run() {
    while (at_ < text_.size()) {
      const char c = text_[at_++];
      if (c != '\\') {
        out_ += c;
      } else {
        escape(text_[at_++]);  // the lexer saw a character after every backslash
      }
    }
    return std::move(out_);
  }

 private:
  void escape(char c) {
    constexpr std::string_view kPlain = "\\'\"abfnrtv";
    constexpr std::string_view kMeaning = "\\'\"\a\b\f\n\r\t\v";
    if (const size_t at = kPlain.find(c); at != kPlain.npos) {
      out_ += kMeaning[at];
    } else if (c >= '0' && c <= '7') {
      --at_;
      code_point(3, 8, 1);
    } else if (c == 'x' || c == 'u' || c == 'U') {
      const size_t digits = c == 'x' ? 2 : c == 'u' ? 4 : 8;
      code_point(digits, 16, digits);
    } else if (c == 'N') {
      fail_unsupported("a string names a character with \\N{...}; write the character itself");
    } else if (c != '\n') {  // a line end after a backslash goes
      out_ += '\\';
      out_ += c;
    }
  }

  void code_point(size_t most, int base, size_t least) {
    unsigned value = 0;
    const char* begin = text_.data() + at_;
    const char* end = text_.data() + std::min(text_.size(), at_ + most);
    const auto result = std::from_chars(begin, end, value, base);
    const auto count = static_cast<size_t>(result.ptr - begin);
    if (count < least) fail("a string holds a damaged escape: expected ", least, " hex digits");
    if (value > 0x10ffff || (value >= 0xd800 && value < 0xe000)) {
      fail("a string holds the escape of a code point that is no character");
    }
    text::append_code_point(value, out_);
    at_ += count;
  }

  std::string text_;
  size_t at_ = 0;
  std::string out_;
};

}  // namespace

std::string unescape(std::string_view literal) { return Unescaper(to_ascii(literal)).run(); }

}  // namespace cadre::jinja

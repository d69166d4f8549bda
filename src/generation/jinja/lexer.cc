#include "generation/jinja/lexer.h"

#include <algorithm>
#include <array>
#include <cctype>
#include <optional>

#include "generation/jinja/python_text.h"
#include "generation/jinja/string_literal.h"
#include "generation/tokenizer/unicode.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

// All line ends become "\n"; one at the very end goes.
std::string normalize(std::string_view source) {
  std::string text;
  for (size_t i = 0; i < source.size(); ++i) {
    if (source[i] != '\r') {
      text += source[i];
    } else if (i + 1 == source.size() || source[i + 1] != '\n') {
      text += '\n';
    }
  }
  if (text.ends_with('\n')) text.pop_back();
  return text;
}

bool is_digit(char c) { return c >= '0' && c <= '9'; }

class Lexer {
 public:
  explicit Lexer(std::string_view source) : text_(normalize(source)) {}

  std::vector<Token> run() {
    while (at_ < text_.size()) read_data();
    add(TokenType::kEnd, "");
    return std::move(tokens_);
  }

 private:
  std::string_view rest() const { return std::string_view(text_).substr(at_); }
  bool starts(std::string_view wanted) const { return rest().starts_with(wanted); }

  template <typename... Args>
  [[noreturn]] void fail_here(const Args&... what) const {
    throw SyntaxFault{{Fault::Kind::kTemplate, str_cat(what...)}, place_};
  }

  // Moves on and keeps line, column and whether a line begins here.
  void advance(size_t count) {
    for (const char c : rest().substr(0, count)) {
      if (c == '\n') {
        ++place_.line;
        place_.column = 1;
      } else if ((c & 0xc0) != 0x80) {
        ++place_.column;
      }
    }
    at_ += count;
    line_begins_ = count > 0 ? text_[at_ - 1] == '\n' : line_begins_;
  }

  void add(TokenType type, std::string text) { tokens_.push_back({type, std::move(text), place_}); }

  size_t skip_space(size_t from) const {
    for (size_t size = 0; from < text_.size(); from += size) {
      if (!is_space(text::code_point_at(text_, from, size))) break;
    }
    return from;
  }

  // One stretch of text and the tag that ends it.
  void read_data() {
    size_t tag = at_;
    for (;; ++tag) {
      tag = text_.find('{', tag);
      if (tag == text_.npos || tag + 1 == text_.size()) {
        tag = text_.npos;
        break;
      }
      if (std::string_view("%{#").find(text_[tag + 1]) != std::string_view::npos) break;
    }
    if (tag == text_.npos) {
      add(TokenType::kData, std::string(rest()));
      return advance(rest().size());
    }
    give_data(tag);
    if (text_[at_ + 1] == '#') return read_comment();
    if (text_[at_ + 1] == '{') return read_tag(TokenType::kVariableBegin);
    if (const auto end = end_of_raw_tag("raw", at_)) return read_raw(*end);
    read_tag(TokenType::kBlockBegin);
  }

  // The sign after "{%" and the like, if there is one.
  char sign_at(size_t tag) const {
    const char c = tag + 2 < text_.size() ? text_[tag + 2] : '\0';
    return c == '-' || c == '+' ? c : '\0';
  }

  // Text up to the tag, without what the tag's sign or lstrip_blocks takes away.
  void give_data(size_t tag) {
    std::string_view data = rest().substr(0, tag - at_);
    const char sign = sign_at(tag);
    if (sign == '-') {
      data = strip(data, {}, Sides::kRight);
    } else if (sign != '+' && text_[tag + 1] != '{') {
      const size_t line = data.rfind('\n') + 1;  // 0 when it has no line end
      const std::string_view last = data.substr(line);
      if ((line > 0 || line_begins_) && strip(last, {}, Sides::kBoth).empty()) {
        data = data.substr(0, line);
      }
    }
    if (!data.empty()) add(TokenType::kData, std::string(data));
    advance(tag - at_);
  }

  void read_comment() {
    const size_t inside = at_ + (sign_at(at_) == '\0' ? 2 : 3);
    if (inside >= text_.size()) return advance(rest().size());  // Jinja lets that pass
    const size_t end = text_.find("#}", inside);
    if (end == text_.npos) fail_here("a comment is not closed: expected \"#}\"");
    const char before = end > inside ? text_[end - 1] : '\0';
    advance(end_after(end + 2, before) - at_);
  }

  // Where the text goes on after "%}" or "#}" with that sign before it: trim_blocks takes one line
  // end, "-" all white space.
  size_t end_after(size_t close, char sign) const {
    if (sign == '-') return skip_space(close);
    return sign != '+' && close < text_.size() && text_[close] == '\n' ? close + 1 : close;
  }

  // `{% raw %}` and `{% endraw %}` are known by their text alone: where such a tag ends.
  std::optional<size_t> end_of_raw_tag(std::string_view name, size_t tag) const {
    size_t at = skip_space(tag + (sign_at(tag) == '\0' ? 2 : 3));
    if (!std::string_view(text_).substr(at).starts_with(name)) return {};
    at = skip_space(at + name.size());
    const char sign = at < text_.size() ? text_[at] : '\0';
    const bool is_end = name == "endraw";
    const bool signed_end = sign == '-' || (is_end && sign == '+');
    if (signed_end) ++at;
    if (!std::string_view(text_).substr(at).starts_with("%}")) return {};
    if (is_end || sign == '-') return end_after(at + 2, signed_end ? sign : '\0');
    return at + 2;
  }

  void read_raw(size_t begin) {
    advance(begin - at_);
    for (size_t tag = at_; (tag = text_.find("{%", tag)) != text_.npos; ++tag) {
      const auto end = end_of_raw_tag("endraw", tag);
      if (!end) continue;
      give_data(tag);
      return advance(*end - at_);
    }
    fail_here("a raw block is not closed: expected {% endraw %}");
  }

  void read_tag(TokenType begin) {
    const bool is_block = begin == TokenType::kBlockBegin;
    add(begin, "");
    const Position opened = place_;
    advance(sign_at(at_) == '\0' ? 2 : 3);
    brackets_.clear();
    while (at_ < text_.size()) {
      if (brackets_.empty() && read_tag_end(is_block)) return;
      read_token();
    }
    place_ = opened;
    fail_here("a tag is not closed: expected \"", is_block ? "%}" : "}}", "\"");
  }

  bool read_tag_end(bool is_block) {
    const std::string_view close = is_block ? "%}" : "}}";
    char sign = rest().front();
    if (sign != '-' && (sign != '+' || !is_block)) sign = '\0';
    const size_t begin = at_ + (sign == '\0' ? 0 : 1);
    if (!std::string_view(text_).substr(begin).starts_with(close)) return false;
    add(is_block ? TokenType::kBlockEnd : TokenType::kVariableEnd, "");
    const char effect = is_block || sign == '-' ? sign : '+';  // {{ }} takes no line end
    advance(end_after(begin + 2, effect) - at_);
    return true;
  }

  void read_token() {
    if (const size_t end = skip_space(at_); end > at_) return advance(end - at_);
    const char c = rest().front();
    if (is_digit(c)) return read_number();
    if (c == '\'' || c == '"') return read_string(c);
    if (const size_t size = name_size(); size > 0) {
      add(TokenType::kName, std::string(rest().substr(0, size)));
      return advance(size);
    }
    read_operator();
  }

  size_t name_size() const {
    size_t end = at_;
    for (size_t size = 0; end < text_.size(); end += size) {
      const char32_t c = text::code_point_at(text_, end, size);
      const bool is_word =
          c < 0x80 ? std::isalnum(static_cast<int>(c)) != 0 || c == '_' : text::is_word(c);
      if (!is_word) break;
    }
    return end - at_;
  }

  // Digits with single underscores between them, from `from`; where they end.
  size_t digits_end(size_t from, int (*is)(int)) const {
    size_t end = from;
    while (end < text_.size()) {
      if (is(static_cast<unsigned char>(text_[end])) != 0) {
        ++end;
      } else if (end > from && text_[end] == '_' && end + 1 < text_.size() &&
                 is(static_cast<unsigned char>(text_[end + 1])) != 0) {
        end += 2;
      } else {
        break;
      }
    }
    return end;
  }

  // The end of a decimal number with a point or an exponent; 0 when there is none.
  size_t float_end() const {
    if (at_ > 0 && text_[at_ - 1] == '.') return 0;
    const size_t whole = digits_end(at_, isdigit);
    size_t end = whole;
    if (end + 1 < text_.size() && text_[end] == '.' && is_digit(text_[end + 1])) {
      end = digits_end(end + 1, isdigit);
    }
    size_t exponent = end;
    if (exponent < text_.size() && (text_[exponent] | 0x20) == 'e') {
      ++exponent;
      if (exponent < text_.size() && (text_[exponent] == '+' || text_[exponent] == '-')) ++exponent;
      if (const size_t after = digits_end(exponent, isdigit); after > exponent) return after;
    }
    return end > whole ? end : 0;
  }

  void read_number() {
    const size_t as_float = float_end();
    size_t end = as_float;
    if (as_float == 0) {
      const char kind = at_ + 1 < text_.size() ? static_cast<char>(text_[at_ + 1] | 0x20) : '\0';
      if (text_[at_] == '0' && kind == 'x') {
        end = digits_end(at_ + 2, isxdigit);
      } else {
        end = digits_end(at_, isdigit);
        if (text_[at_] == '0') {  // "01" is a zero and a one
          end = at_ + 1;
          while (end < text_.size() && text_[end] == '0') ++end;
        }
      }
    }
    std::string number(rest().substr(0, end - at_));
    number.erase(std::remove(number.begin(), number.end(), '_'), number.end());
    add(as_float != 0 ? TokenType::kFloat : TokenType::kInteger, std::move(number));
    advance(end - at_);
  }

  void read_string(char quote) {
    size_t end = at_ + 1;
    while (end < text_.size() && text_[end] != quote) end += text_[end] == '\\' ? 2 : 1;
    if (end >= text_.size()) fail_here("a string is not closed: expected ", quote);
    const std::string_view inside = rest().substr(1, end - at_ - 1);
    try {
      add(TokenType::kString, unescape(inside));
    } catch (const Fault& fault) {
      throw SyntaxFault{fault, place_};
    }
    advance(end + 1 - at_);
  }

  void read_operator() {
    constexpr std::array<std::string_view, 6> kPairs = {"//", "**", "==", "!=", ">=", "<="};
    constexpr std::string_view kSingle = "+-/*%~[](){}><=.:|,;";
    size_t size = 0;
    for (const std::string_view pair : kPairs) size = starts(pair) ? 2 : size;
    if (size == 0 && kSingle.find(rest().front()) != kSingle.npos) size = 1;
    if (size == 0) {
      size_t bytes = 0;
      text::code_point_at(text_, at_, bytes);
      fail_here("unexpected character ", quote(rest().substr(0, bytes)), " inside a tag");
    }
    const std::string_view name = rest().substr(0, size);
    balance(name.front());
    add(TokenType::kOperator, std::string(name));
    advance(size);
  }

  void balance(char c) {
    constexpr std::string_view kOpen = "([{";
    constexpr std::string_view kClose = ")]}";
    if (const size_t kind = kOpen.find(c); kind != kOpen.npos) brackets_ += kClose[kind];
    if (kClose.find(c) == kClose.npos) return;
    if (brackets_.empty()) fail_here("unexpected \"", c, "\"");
    if (brackets_.back() != c) {
      fail_here("unexpected \"", c, "\", expected \"", brackets_.back(), "\"");
    }
    brackets_.pop_back();
  }

  std::string text_;
  size_t at_ = 0;
  Position place_;
  bool line_begins_ = true;
  std::string brackets_;  // the closing ones that are awaited
  std::vector<Token> tokens_;
};

}  // namespace

std::vector<Token> tokenize(std::string_view source) { return Lexer(source).run(); }

}  // namespace cadre::jinja

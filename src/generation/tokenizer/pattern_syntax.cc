#include "generation/tokenizer/pattern_syntax.h"

#include <algorithm>

#include "core/str_cat.h"

namespace cadre::text {
namespace {

bool is_alphanumeric(char c) {
  return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
}

class Scanner {
 public:
  explicit Scanner(std::string_view pattern) : pattern_(pattern) {}

  std::optional<std::string> run() {
    while (position_ < pattern_.size() && !finding_) step();
    return finding_;
  }

 private:
  bool starts(std::string_view text) const { return pattern_.substr(position_).starts_with(text); }

  void found(std::string_view what) {
    if (!finding_) finding_ = str_cat("\"", what, "\" at offset ", position_, " of the pattern");
  }

  void step() {
    switch (pattern_[position_]) {
      case '\\':
        escape();
        break;
      case '[':
        character_class();
        break;
      case '(':
        group();
        break;
      case '{':
        braces();
        break;
      default:
        ++position_;
    }
  }

  // Letters and digits mean the same after a backslash only as listed; punctuation stands for
  // itself.
  void escape() {
    constexpr std::string_view kSame = "sSdDrntfeaAzZ";
    const char c = position_ + 1 < pattern_.size() ? pattern_[position_ + 1] : '\0';
    if (c == 'p' || c == 'P' || c == 'x') {
      braced_escape(c);
      return;
    }
    if (is_alphanumeric(c) && kSame.find(c) == std::string_view::npos) {
      found(pattern_.substr(position_, 2));
    }
    position_ += 2;
  }

  // \p{L}, \x{1F600}, \x20
  void braced_escape(char c) {
    const bool braced = position_ + 2 < pattern_.size() && pattern_[position_ + 2] == '{';
    if (!braced && c != 'x') found(pattern_.substr(position_, 3));
    position_ =
        braced ? std::min(pattern_.find('}', position_), pattern_.size()) + 1 : position_ + 2;
  }

  // Oniguruma has nested classes, && and POSIX classes of other contents.
  void character_class() {
    const size_t open = position_;
    position_ += starts("[^") ? 2 : 1;
    if (starts("]")) found("]");
    while (position_ < pattern_.size() && pattern_[position_] != ']' && !finding_) {
      if (pattern_[position_] == '\\') {
        escape();
      } else if (pattern_[position_] == '[') {
        found("[");
      } else if (starts("&&")) {
        found("&&");
      } else {
        ++position_;
      }
    }
    if (position_ >= pattern_.size()) position_ = open, found("[ without ]");
    ++position_;
  }

  void group() {
    if (starts("(*")) found("(*");
    if (!starts("(?")) {
      ++position_;
      return;
    }
    for (const std::string_view same : {"(?:", "(?=", "(?!", "(?>", "(?<=", "(?<!", "(?i:"}) {
      if (starts(same)) {
        position_ += same.size();
        return;
      }
    }
    if (position_ == 0 && starts("(?i)")) {
      position_ += 4;
      return;
    }
    found(pattern_.substr(position_, 4));
  }

  // {n}+ is possessive here and a second repeat there.
  void braces() {
    const size_t close = pattern_.find('}', position_);
    if (close == std::string_view::npos || pattern_.substr(position_, 2) == "{,") {
      found("{");
      return;
    }
    position_ = close + 1;
    if (starts("+")) found("}+");
  }

  std::string_view pattern_;
  size_t position_ = 0;
  std::optional<std::string> finding_;
};

}  // namespace

std::optional<std::string> find_foreign_syntax(std::string_view pattern) {
  return Scanner(pattern).run();
}

std::string quote_pattern(std::string_view literal) {
  std::string quoted;
  for (const char c : literal) {
    const bool is_special = static_cast<unsigned char>(c) < 0x80 && !is_alphanumeric(c);
    if (is_special) quoted += '\\';
    quoted += c;
  }
  return quoted;
}

}  // namespace cadre::text

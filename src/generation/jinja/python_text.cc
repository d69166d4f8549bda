#include "generation/jinja/python_text.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <cstdio>
#include <cstring>

#include "generation/tokenizer/utf8.h"

namespace cadre::jinja {
namespace {

bool is_line_end(char32_t c) {
  return (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 || c == 0x2028 ||
         c == 0x2029;
}

// Where a run of white space, or of anything else, ends.
size_t run_end(std::string_view text, size_t from, bool of_space) {
  for (size_t size = 0; from < text.size(); from += size) {
    if (is_space(text::code_point_at(text, from, size)) != of_space) break;
  }
  return from;
}

size_t run_begin(std::string_view text, size_t to, bool of_space) {
  for (size_t size = 0; to > 0; to -= size) {
    if (is_space(text::code_point_before(text, to, size)) != of_space) break;
  }
  return to;
}

bool reached(const std::vector<std::string_view>& parts, int64_t limit) {
  return limit >= 0 && static_cast<int64_t>(parts.size()) >= limit;
}

std::vector<std::string_view> split_at_space(std::string_view text, int64_t limit) {
  std::vector<std::string_view> parts;
  size_t begin = run_end(text, 0, true);
  while (begin < text.size()) {
    if (reached(parts, limit)) {  // the rest keeps its white space at the end
      parts.push_back(text.substr(begin));
      break;
    }
    const size_t end = run_end(text, begin, false);
    parts.push_back(text.substr(begin, end - begin));
    begin = run_end(text, end, true);
  }
  return parts;
}

std::vector<std::string_view> split_at_space_from_right(std::string_view text, int64_t limit) {
  std::vector<std::string_view> parts;
  size_t end = run_begin(text, text.size(), true);
  while (end > 0) {
    if (reached(parts, limit)) {
      parts.push_back(text.substr(0, end));
      break;
    }
    const size_t begin = run_begin(text, end, false);
    parts.push_back(text.substr(begin, end - begin));
    end = run_begin(text, begin, true);
  }
  std::reverse(parts.begin(), parts.end());
  return parts;
}

void append_escape(char32_t c, std::string& out) {
  char text[16];
  const char* format = c < 0x100 ? "\\x%02x" : c < 0x10000 ? "\\u%04x" : "\\U%08x";
  std::snprintf(text, sizeof text, format, static_cast<unsigned>(c));
  out += text;
}

}  // namespace

std::vector<std::string_view> characters(std::string_view text) {
  std::vector<std::string_view> out;
  for (size_t i = 0, size = 0; i < text.size(); i += size) {
    text::code_point_at(text, i, size);
    out.push_back(text.substr(i, size));
  }
  return out;
}

size_t count_characters(std::string_view text) {
  return static_cast<size_t>(
      std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

size_t find_text(std::string_view text, std::string_view wanted, size_t from) {
  if (from > text.size()) return std::string_view::npos;
  const void* found = memmem(text.data() + from, text.size() - from, wanted.data(), wanted.size());
  if (found == nullptr) return std::string_view::npos;
  return static_cast<size_t>(static_cast<const char*>(found) - text.data());
}

std::string_view strip(std::string_view text, std::optional<std::string_view> set, Sides sides) {
  const auto goes = [&](std::string_view character) {
    if (set) return set->find(character) != set->npos;
    size_t size = 0;
    return is_space(text::code_point_at(character, 0, size));
  };
  size_t size = 0;
  while (sides != Sides::kRight && !text.empty()) {
    text::code_point_at(text, 0, size);
    if (!goes(text.substr(0, size))) break;
    text.remove_prefix(size);
  }
  while (sides != Sides::kLeft && !text.empty()) {
    text::code_point_before(text, text.size(), size);
    if (!goes(text.substr(text.size() - size))) break;
    text.remove_suffix(size);
  }
  return text;
}

std::vector<std::string_view> split(std::string_view text,
                                    std::optional<std::string_view> separator, int64_t limit) {
  if (!separator) return split_at_space(text, limit);
  std::vector<std::string_view> parts;
  size_t begin = 0;
  while (!reached(parts, limit)) {
    const size_t end = find_text(text, *separator, begin);
    if (end == text.npos) break;
    parts.push_back(text.substr(begin, end - begin));
    begin = end + separator->size();
  }
  parts.push_back(text.substr(begin));
  return parts;
}

std::vector<std::string_view> split_from_right(std::string_view text,
                                               std::optional<std::string_view> separator,
                                               int64_t limit) {
  if (!separator) return split_at_space_from_right(text, limit);
  std::vector<std::string_view> parts;
  size_t end = text.size();
  while (!reached(parts, limit)) {
    const size_t begin = text.substr(0, end).rfind(*separator);
    if (begin == text.npos) break;
    parts.push_back(text.substr(begin + separator->size(), end - begin - separator->size()));
    end = begin;
  }
  parts.push_back(text.substr(0, end));
  std::reverse(parts.begin(), parts.end());
  return parts;
}

std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends) {
  std::vector<std::string_view> lines;
  size_t begin = 0;
  for (size_t i = 0, size = 0; i < text.size();) {
    const char32_t c = text::code_point_at(text, i, size);
    const size_t end = i;
    i += size;
    if (!is_line_end(c)) continue;
    if (c == '\r' && i < text.size() && text[i] == '\n') ++i;
    lines.push_back(text.substr(begin, (keep_ends ? i : end) - begin));
    begin = i;
  }
  if (begin < text.size()) lines.push_back(text.substr(begin));
  return lines;
}

size_t count_text(std::string_view text, std::string_view wanted) {
  if (wanted.empty()) return count_characters(text) + 1;
  size_t count = 0;
  for (size_t at = 0; (at = find_text(text, wanted, at)) != text.npos; at += wanted.size()) ++count;
  return count;
}

std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t limit) {
  std::string out;
  if (from.empty()) {  // Python puts it before every character and at the end
    for (const std::string_view character : characters(text)) {
      if (limit != 0) out += to;
      if (limit > 0) --limit;
      out += character;
    }
    return limit != 0 ? out.append(to) : out;
  }
  size_t begin = 0;
  for (; limit != 0; --limit) {
    const size_t end = find_text(text, from, begin);
    if (end == text.npos) break;
    out.append(text.substr(begin, end - begin)).append(to);
    begin = end + from.size();
  }
  return out.append(text.substr(begin));
}

std::string float_text(double value) {
  if (std::isnan(value)) return "nan";
  if (std::isinf(value)) return value < 0 ? "-inf" : "inf";
  char buffer[64];
  const auto write = [&](std::chars_format format) {
    const auto result = std::to_chars(buffer, buffer + sizeof buffer, value, format);
    return std::string(buffer, result.ptr);
  };
  // The shortest digits that read back as the same number, as repr() has; 16 digits before the
  // point at most.
  const double size = std::abs(value);
  if (size != 0 && (size < 1e-4 || size >= 1e16)) return write(std::chars_format::scientific);
  const std::string text = write(std::chars_format::fixed);
  return text.find('.') == text.npos ? text + ".0" : text;
}

std::string repr_text(std::string_view text) {
  const bool has_single = text.find('\'') != text.npos;
  const char quote = has_single && text.find('"') == text.npos ? '"' : '\'';
  std::string out(1, quote);
  for (size_t i = 0, size = 0; i < text.size(); i += size) {
    const char32_t c = text::code_point_at(text, i, size);
    if (c == static_cast<char32_t>(quote) || c == '\\') {
      out += '\\';
      out += static_cast<char>(c);
    } else if (c == '\n' || c == '\r' || c == '\t') {
      out += c == '\n' ? "\\n" : c == '\r' ? "\\r" : "\\t";
    } else if (is_printable(c)) {
      out += text.substr(i, size);
    } else {
      append_escape(c, out);
    }
  }
  return out += quote;
}

}  // namespace cadre::jinja

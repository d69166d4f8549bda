#include "generation/tokenizer/normalizer.h"

#include <utf8proc.h>

#include <algorithm>
#include <iterator>
#include <span>

#include "cadre/error.h"
#include "core/str_cat.h"
#include "generation/tokenizer/unicode.h"
#include "generation/tokenizer/utf8.h"

namespace cadre::text {
namespace {

struct Range {
  char32_t first, last;
};

// Characters that no normalization changes, moves or joins with the one before; below U+0300 there
// are no others that would not compose again.
constexpr Range kStable[] = {
    {0x391, 0x482},     // Greek and Cyrillic letters
    {0x2010, 0x20CF},   // punctuation, currencies
    {0x2500, 0x2ADB},   // boxes, symbols, arrows
    {0x3000, 0x3029},   // CJK punctuation
    {0x3030, 0x3098},   // Hiragana
    {0x309B, 0xA66E},   // Katakana to Vai: all of CJK
    {0xAC00, 0xD7A3},   // Hangul syllables
    {0xFF00, 0xFFFD},   // full and half width
    {0x1F300, 0x1FAFF}  // emoji
};

bool is_surely_nfc(std::string_view text) {
  for (size_t i = 0, length = 1; i < text.size(); i += length) {
    length = 1;
    if (static_cast<unsigned char>(text[i]) < 0xCC) continue;  // U+0300 and up start with more
    const char32_t c = code_point_at(text, i, length);
    const bool is_stable = std::any_of(std::begin(kStable), std::end(kStable),
                                       [c](const Range& r) { return c >= r.first && c <= r.last; });
    if (!is_stable) return false;
  }
  return true;
}

constexpr Range kOpaque[] = {
#include "generation/tokenizer/nfc_opaque.inc"
};

// The reference's NFC does not know this code point: it stays, and nothing passes or joins it.
bool is_opaque(utf8proc_int32_t code_point) {
  const auto c = static_cast<char32_t>(code_point);
  const auto* it = std::upper_bound(std::begin(kOpaque), std::end(kOpaque), c,
                                    [](char32_t a, const Range& r) { return a < r.first; });
  return (it != std::begin(kOpaque) && c <= std::prev(it)->last) || is_newer(c);
}

int combining_class(utf8proc_int32_t code_point) {
  const int known = utf8proc_get_property(code_point)->combining_class;
  return known == 0 || is_opaque(code_point) ? 0 : known;
}

// Canonical order by a stable sort: the library's own bubbles, which long runs of marks make slow.
void sort_marks(std::vector<utf8proc_int32_t>& code_points) {
  for (auto it = code_points.begin(); it != code_points.end();) {
    if (combining_class(*it) == 0) {
      ++it;
      continue;
    }
    const auto end = std::find_if(it, code_points.end(),
                                  [](utf8proc_int32_t c) { return combining_class(c) == 0; });
    std::stable_sort(it, end, [](utf8proc_int32_t a, utf8proc_int32_t b) {
      return combining_class(a) < combining_class(b);
    });
    it = end;
  }
}

std::vector<utf8proc_int32_t> decompose(std::string_view text) {
  std::vector<utf8proc_int32_t> out;
  out.reserve(text.size());
  for (size_t i = 0, length = 0; i < text.size(); i += length) {
    const auto code_point = static_cast<utf8proc_int32_t>(code_point_at(text, i, length));
    utf8proc_int32_t parts[8];  // canonical decompositions have at most 4
    int boundary = 0;
    const auto count = utf8proc_decompose_char(
        code_point, parts, 8, static_cast<utf8proc_option_t>(UTF8PROC_DECOMPOSE | UTF8PROC_STABLE),
        &boundary);
    if (count < 0 || count > 8 || is_opaque(code_point)) {
      out.push_back(code_point);
    } else {
      out.insert(out.end(), parts, parts + count);
    }
  }
  return out;
}

void append_composed(std::span<utf8proc_int32_t> code_points, std::string& out) {
  const auto count = utf8proc_normalize_utf32(
      code_points.data(), static_cast<utf8proc_ssize_t>(code_points.size()),
      static_cast<utf8proc_option_t>(UTF8PROC_COMPOSE | UTF8PROC_STABLE));
  if (count < 0) throw Error(str_cat("encode: NFC failed: ", utf8proc_errmsg(count)));
  for (const utf8proc_int32_t c : code_points.first(static_cast<size_t>(count))) {
    append_code_point(static_cast<char32_t>(c), out);
  }
}

}  // namespace

void replace_all(std::string& text, std::string_view pattern, std::string_view content,
                 size_t max_size) {
  size_t hit = text.find(pattern);
  if (hit == std::string::npos) return;
  std::string out;
  size_t begin = 0;
  for (; hit != std::string::npos; hit = text.find(pattern, begin)) {
    out.append(text, begin, hit - begin).append(content);
    begin = hit + pattern.size();
    if (out.size() > max_size) {
      throw Error(str_cat("tokenizer: replacing \"", pattern.substr(0, 20), "\" makes more than ",
                          max_size,
                          " bytes of one text; tokenizer.json is damaged, fetch it again"));
    }
  }
  out.append(text, begin);
  text = std::move(out);
}

std::string to_nfc(std::string_view text) {
  auto code_points = decompose(text);
  sort_marks(code_points);
  std::string out;
  out.reserve(text.size());
  for (auto begin = code_points.begin(); begin != code_points.end();) {
    const auto end = std::find_if(begin, code_points.end(), is_opaque);
    append_composed(std::span(begin, end), out);
    begin = end;
    for (; begin != code_points.end() && is_opaque(*begin); ++begin) {
      append_code_point(static_cast<char32_t>(*begin), out);
    }
  }
  return out;
}

Normalizer Normalizer::parse(const JsonNode& node) {
  Normalizer normalizer;
  normalizer.add(node);
  return normalizer;
}

void Normalizer::add(const JsonNode& node) {
  const std::string type = node.at("type").text();
  if (type == "NFC") {
    steps_.push_back({Kind::kNfc, "", ""});
  } else if (type == "Prepend") {
    steps_.push_back({Kind::kPrepend, "", node.at("prepend").text()});
  } else if (type == "Replace") {
    const JsonNode pattern = node.at("pattern");
    const auto literal = pattern.find("String");
    if (!literal) pattern.unsupported("normalizer Replace with a Regex", "a String");
    if (literal->text().empty()) literal->fail("a string that is not empty");
    steps_.push_back({Kind::kReplace, literal->text(), node.at("content").text()});
  } else if (type == "Sequence") {
    const JsonNode parts = node.at("normalizers");
    for (size_t i = 0; i < parts.array_size(); ++i) add(parts.element(i));
  } else {
    node.unsupported(str_cat("normalizer \"", type, "\""), "NFC, Prepend, Replace, Sequence");
  }
}

std::string_view Normalizer::apply(std::string_view text, std::string& buffer) const {
  const bool is_unchanged =
      text.empty() || std::all_of(steps_.begin(), steps_.end(), [&](const Step& step) {
        return step.kind == Kind::kNfc && is_surely_nfc(text);
      });
  if (is_unchanged) return text;
  buffer.assign(text);
  for (const Step& step : steps_) run(step, max_replaced_size(text.size()), buffer);
  return buffer;
}

void Normalizer::run(const Step& step, size_t max_size, std::string& text) {
  switch (step.kind) {
    case Kind::kNfc:
      if (!is_surely_nfc(text)) text = to_nfc(text);
      break;
    case Kind::kPrepend:
      text.insert(0, step.content);
      break;
    case Kind::kReplace:
      replace_all(text, step.pattern, step.content, max_size);
      break;
  }
}

}  // namespace cadre::text

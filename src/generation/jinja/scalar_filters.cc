// Filters of texts and numbers.
#include <charconv>
#include <cmath>
#include <cstdio>
#include <limits>
#include <string>

#include "generation/jinja/evaluator.h"
#include "generation/jinja/filters.h"
#include "generation/jinja/operators.h"
#include "generation/jinja/python_text.h"
#include "generation/jinja/value_text.h"

namespace cadre::jinja {
namespace {

Value absolute(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  arguments.bind("abs", {});
  if (value.is_float()) return std::abs(value.number());
  return to_integer(value, "abs") < 0 ? negative(value) : Value(value.integer());
}

template <std::string (*change)(std::string_view)>
Value changed(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("this filter", {});
  Budget& budget = evaluator.budget();
  const std::string text = to_text(value, budget);
  budget.bytes(3 * text.size());  // what a change of case makes longer at most
  return change(text);
}

// Jinja's own idea of words: what follows white space, a dash or an opening bracket.
std::string title_words(std::string_view text) {
  std::string out;
  std::string word;
  const auto flush = [&] {
    const auto all = characters(word);
    if (all.empty()) return;
    out += upper(all.front());
    out += lower(std::string_view(word).substr(all.front().size()));
    word.clear();
  };
  for (const std::string_view character : characters(text)) {
    const bool is_break = strip(character, {}, Sides::kBoth).empty() ||
                          std::string_view("-({[<").find(character) != std::string_view::npos;
    if (is_break) {
      flush();
      out += character;
    } else {
      word += character;
    }
  }
  flush();
  return out;
}

std::string escape_html(std::string_view text) {
  std::string out;
  for (const char c : text) {
    switch (c) {
      case '&':
        out += "&amp;";
        break;
      case '<':
        out += "&lt;";
        break;
      case '>':
        out += "&gt;";
        break;
      case '"':
        out += "&#34;";
        break;
      case '\'':
        out += "&#39;";
        break;
      default:
        out += c;
    }
  }
  return out;
}

Value escape(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("escape", {});
  const std::string text = to_text(value, evaluator.budget());
  evaluator.budget().bytes(5 * text.size());
  return escape_html(text);
}

Value text(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("string", {});
  return value.is_string() ? value : Value(to_text(value, evaluator.budget()));
}

Value fallback(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("default", {"default_value", "boolean"});
  const bool also_false = bound[1] && truth(*bound[1]);
  if (!value.is_undefined() && (!also_false || truth(value))) return value;
  return bound[0] ? *bound[0] : Value(std::string());
}

// The number that Python's float() reads; empty for another text.
std::optional<double> read_float(std::string_view text) {
  text = strip(text, {}, Sides::kBoth);
  if (text.starts_with('+')) text.remove_prefix(1);
  std::string digits(text);
  for (size_t i = 1; i + 1 < digits.size();) {  // single underscores between digits
    const bool between = digits[i] == '_' &&
                         std::isdigit(static_cast<unsigned char>(digits[i - 1])) != 0 &&
                         std::isdigit(static_cast<unsigned char>(digits[i + 1])) != 0;
    between ? static_cast<void>(digits.erase(i, 1)) : static_cast<void>(++i);
  }
  double value = 0;
  const char* end = digits.data() + digits.size();
  const auto result = std::from_chars(digits.data(), end, value);
  if (result.ptr != end || result.ec == std::errc::invalid_argument) return {};
  if (result.ec == std::errc::result_out_of_range) return std::strtod(digits.c_str(), nullptr);
  return value;
}

std::optional<int64_t> read_integer(std::string_view text, int base) {
  text = strip(text, {}, Sides::kBoth);
  if (text.starts_with('+')) text.remove_prefix(1);
  if (base == 16 && (text.starts_with("0x") || text.starts_with("0X"))) text.remove_prefix(2);
  int64_t value = 0;
  const char* end = text.data() + text.size();
  const auto result = std::from_chars(text.data(), end, value, base);
  if (text.empty() || result.ptr != end || result.ec != std::errc()) return {};
  return value;
}

std::optional<int64_t> truncate(double value) {
  constexpr double kLimit = 9223372036854775808.0;  // 2^63
  if (!(std::abs(value) < kLimit)) return {};
  return static_cast<int64_t>(value);
}

Value integer(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("int", {"default", "base"});
  if (value.is_undefined()) fail_undefined(value);
  const int64_t base = bound[1] ? to_integer(*bound[1], "int: base") : 10;
  if (base < 2 || base > 36) fail("int: expected a base from 2 to 36, got ", base);
  std::optional<int64_t> result;
  if (value.is_integer()) result = value.integer();
  if (value.is_float()) result = truncate(value.number());
  if (value.is_string()) {
    result = read_integer(value.string(), static_cast<int>(base));
    if (const auto number = read_float(value.string()); !result && number) {
      result = truncate(*number);
    }
  }
  if (result) return *result;
  return bound[0] ? *bound[0] : Value(int64_t{0});
}

Value decimal(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("float", {"default"});
  if (value.is_undefined()) fail_undefined(value);
  if (value.is_number()) return value.number();
  if (value.is_string()) {
    if (const auto number = read_float(value.string())) return *number;
  }
  return bound[0] ? *bound[0] : Value(0.0);
}

// Rounds the exact value of the double half to even at that decimal place, as Python does.
double round_to(double value, int precision) {
  if (!std::isfinite(value)) return value;
  char buffer[512];  // 309 digits, a point and 100 decimals at most
  std::snprintf(buffer, sizeof buffer, "%.*f", precision, value);
  return std::strtod(buffer, nullptr);
}

Value round(Evaluator& /*evaluator*/, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("round", {"precision", "method"});
  if (value.is_undefined()) fail_undefined(value);
  if (!value.is_number()) fail("round: expected a number, got a value of type ", type_name(value));
  const int64_t precision = bound[0] ? to_integer(*bound[0], "round: precision") : 0;
  if (precision < 0 || precision > 100) fail("round: expected 0 to 100 decimals, got ", precision);
  const std::string method = bound[1] ? to_string(*bound[1], "round: method") : "common";
  if (method == "common" && value.is_integer()) return value;
  if (method == "common") return round_to(value.number(), static_cast<int>(precision));
  const double scale = std::pow(10.0, static_cast<double>(precision));
  if (method == "ceil") return std::ceil(value.number() * scale) / scale;
  if (method == "floor") return std::floor(value.number() * scale) / scale;
  fail("round: expected common, ceil or floor as method, got ", quote(method));
}

Value trim(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("trim", {"chars"});
  Budget& budget = evaluator.budget();
  const std::string text = to_text(value, budget);
  std::optional<std::string_view> set;
  if (bound[0] && !bound[0]->is_none()) set = to_string(*bound[0], "trim: chars");
  if (set) budget.bytes(text.size() * std::max<size_t>(set->size(), 1));
  return strip(text, set, Sides::kBoth);
}

Value replaced(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("replace", {"old", "new", "count"}, 2);
  Budget& budget = evaluator.budget();
  const std::string text = to_text(value, budget);
  const std::string from = to_text(*bound[0], budget);
  const std::string to = to_text(*bound[1], budget);
  const int64_t limit =
      bound[2] && !bound[2]->is_none() ? to_integer(*bound[2], "replace: count") : -1;
  budget.bytes(text.size() + count_text(text, from) * to.size());
  return replace(text, from, to, limit);
}

// All lines but the first get the indentation; empty ones only with `blank`.
Value indent(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound = arguments.bind("indent", {"width", "first", "blank"});
  Budget& budget = evaluator.budget();
  std::string prefix(4, ' ');
  if (bound[0] && bound[0]->is_string()) {
    prefix = bound[0]->string();
  } else if (bound[0]) {
    const auto width = std::max<int64_t>(to_integer(*bound[0], "indent: width"), 0);
    budget.bytes(static_cast<size_t>(width));
    prefix.assign(static_cast<size_t>(width), ' ');
  }
  const bool first = bound[1] && truth(*bound[1]);
  const bool blank = bound[2] && truth(*bound[2]);
  const std::string text = to_string(value, "indent") + "\n";
  const auto lines = split_lines(text);
  budget.bytes(text.size() + lines.size() * (prefix.size() + 1));
  std::string out = first ? prefix : "";
  for (size_t i = 0; i < lines.size(); ++i) {
    if (i > 0) out += '\n';
    if (i > 0 && (blank || !lines[i].empty())) out += prefix;
    out += lines[i];
  }
  return out;
}

Value json(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  const auto bound =
      arguments.bind("tojson", {"ensure_ascii", "indent", "separators", "sort_keys"});
  JsonStyle style;
  style.ascii_only = bound[0] && truth(*bound[0]);
  style.sort_keys = bound[3] && truth(*bound[3]);
  if (bound[1] && !bound[1]->is_none()) {
    style.item_separator = ",";  // the line end follows
    if (bound[1]->is_string()) {
      style.indent = bound[1]->string();
    } else {
      const auto width = std::max<int64_t>(to_integer(*bound[1], "tojson: indent"), 0);
      evaluator.budget().bytes(static_cast<size_t>(width));
      style.indent = std::string(static_cast<size_t>(width), ' ');
    }
  }
  if (bound[2] && !bound[2]->is_none()) {
    const Values separators = iterate(*bound[2], evaluator.budget());
    if (separators.size() != 2) fail("tojson: expected two separators, got ", separators.size());
    style.item_separator = to_string(separators[0], "tojson: separators");
    style.key_separator = to_string(separators[1], "tojson: separators");
  }
  return to_json(value, style, evaluator.budget());
}

Value word_count(Evaluator& evaluator, const Value& value, const Arguments& arguments) {
  arguments.bind("wordcount", {});
  size_t count = 0;
  bool in_word = false;
  const std::string text = to_text(value, evaluator.budget());
  for (const std::string_view c : characters(text)) {
    const bool is_word = c == "_" || all_are(CharacterClass::kAlnum, c);
    if (is_word && !in_word) ++count;
    in_word = is_word;
  }
  return count;
}

}  // namespace

const std::array<FilterRow, 20> kScalarFilters = {{
    {"abs", absolute},
    {"capitalize", changed<capitalize>},
    {"d", fallback},
    {"default", fallback},
    {"e", escape},
    {"escape", escape},
    {"float", decimal},
    {"forceescape", escape},
    {"indent", indent},
    {"int", integer},
    {"lower", changed<lower>},
    {"replace", replaced},
    {"round", round},
    {"safe", text},  // without autoescape a mark that does nothing
    {"string", text},
    {"title", changed<title_words>},
    {"tojson", json},
    {"trim", trim},
    {"upper", changed<upper>},
    {"wordcount", word_count},
}};

}  // namespace cadre::jinja

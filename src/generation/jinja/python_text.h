// Strings as Python handles them: by code points, with Python's white space, case rules and
// spelling of values. All strings are valid UTF-8; nothing here bounds its cost, callers do.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace cadre::jinja {

/// The characters of `text` as views into it.
std::vector<std::string_view> characters(std::string_view text);
size_t count_characters(std::string_view text);

/// std::string_view::find in linear time, however the two look.
size_t find_text(std::string_view text, std::string_view wanted, size_t from = 0);

/// str.isspace() and str.isprintable() of one character.
bool is_space(char32_t code_point);
bool is_printable(char32_t code_point);

enum class Sides : uint8_t { kLeft = 1, kRight = 2, kBoth = 3 };
/// str.strip and its sisters; without `set`, white space goes.
std::string_view strip(std::string_view text, std::optional<std::string_view> set, Sides sides);

/// str.split(separator, limit): at white space without a separator; a limit below 0 is none.
std::vector<std::string_view> split(std::string_view text,
                                    std::optional<std::string_view> separator, int64_t limit);
/// str.rsplit
std::vector<std::string_view> split_from_right(std::string_view text,
                                               std::optional<std::string_view> separator,
                                               int64_t limit);
/// str.splitlines
std::vector<std::string_view> split_lines(std::string_view text, bool keep_ends = false);

/// str.replace; a limit below 0 is none.
std::string replace(std::string_view text, std::string_view from, std::string_view to,
                    int64_t limit);
/// The number of characters that replace() writes at most, in bytes.
size_t count_text(std::string_view text, std::string_view wanted);

std::string upper(std::string_view text);
std::string lower(std::string_view text);
std::string title(std::string_view text);
std::string capitalize(std::string_view text);

/// str.isdigit() and the like: all characters are of the class, and there is one.
enum class CharacterClass : uint8_t { kAlpha, kDigit, kAlnum, kSpace, kUpper, kLower };
bool all_are(CharacterClass wanted, std::string_view text);

/// repr() of a float and of a string.
std::string float_text(double value);
std::string repr_text(std::string_view text);

}  // namespace cadre::jinja

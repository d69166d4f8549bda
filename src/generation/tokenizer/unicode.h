// Character classes exactly as the reference tokenizers see them.
#pragma once

#include <string>
#include <string_view>

namespace cadre::text {

/// \w and \s of the rules single_word, lstrip and rstrip (Unicode's word characters and white
/// space).
bool is_word(char32_t code_point);
bool is_space(char32_t code_point);

/// Regular expressions know Unicode 14 alone. Writes `text` to `shadow` with every newer code point
/// replaced by an older one of the same category and length, so that matches in `shadow` are those
/// in `text`. False, and `shadow` untouched, when there is nothing to replace. `text` is valid.
bool replace_newer(std::string_view text, std::string& shadow);

/// Newer than Unicode 14.
bool is_newer(char32_t code_point);

}  // namespace cadre::text

// The normalizer of tokenizer.json: what happens to text before it is split.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "generation/tokenizer/json_node.h"

namespace cadre::text {

class Normalizer {
 public:
  Normalizer() = default;  // changes nothing

  /// NFC, Prepend, Replace (of a string) and Sequence; anything else is Unsupported.
  static Normalizer parse(const JsonNode& node);

  /// The normalized text: `text` itself when nothing changes, else a view of `buffer`. `text` is
  /// valid UTF-8.
  std::string_view apply(std::string_view text, std::string& buffer) const;

 private:
  enum class Kind { kNfc, kPrepend, kReplace };
  struct Step {
    Kind kind;
    std::string pattern;
    std::string content;
  };
  void add(const JsonNode& node);
  static void run(const Step& step, size_t max_size, std::string& text);

  std::vector<Step> steps_;
};

/// `text` in normalization form C as of the reference's Unicode. O(n log n) at worst, in long runs
/// of combining marks.
std::string to_nfc(std::string_view text);

/// Replaces each occurrence of `pattern`, which is not empty, from the left. Throws Error when the
/// result gets longer than `max_size`.
void replace_all(std::string& text, std::string_view pattern, std::string_view content,
                 size_t max_size);

/// What a text of this length may grow to through all Replace steps of a file, which could double
/// it with each.
constexpr size_t max_replaced_size(size_t size) { return (size_t{1} << 20) + 64 * size; }

}  // namespace cadre::text

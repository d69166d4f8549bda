// The pre-tokenizer of tokenizer.json: cuts text into pieces that the model works on one by one.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "generation/tokenizer/json_node.h"
#include "generation/tokenizer/metaspace.h"
#include "generation/tokenizer/split_pattern.h"

namespace cadre::text {

class PreTokenizer {
 public:
  PreTokenizer() = default;  // one piece

  /// Split, Digits, Metaspace, ByteLevel (which must come last) and Sequence; anything else is
  /// Unsupported.
  static PreTokenizer parse(const JsonNode& node);

  /// Buffers of one thread.
  struct Scratch {
    MatchScratch match;
    std::vector<Span> pieces;
    std::vector<Span> next_pieces;
    struct Cut {
      Span span;
      bool is_match;
    };
    std::vector<Cut> cuts;
    std::string text;    // when spaces were put in or replaced
    std::string shadow;  // see replace_newer
    std::string buffer;
    bool starts_text = false;  // the first piece is the start of all text
  };

  /// Cuts `text`. Returns the text that `scratch.pieces` refer to: `text`, or one in `scratch`.
  /// `starts_text`: nothing comes before it, no added token either.
  std::string_view split(std::string_view text, bool starts_text, Scratch& scratch) const;

  /// True: the model sees each piece in the byte alphabet.
  bool is_byte_level() const { return is_byte_level_; }

 private:
  enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };
  enum class Kind { kPattern, kPrefixSpace, kMetaspace };
  struct Stage {
    Kind kind = Kind::kPattern;
    std::vector<SplitPattern> pattern;  // one for kPattern
    Behavior behavior = Behavior::kIsolated;
    bool invert = false;
    Metaspace metaspace;
  };

  void add(const JsonNode& node);
  void add_split(const JsonNode& node);
  void add_metaspace(const JsonNode& node);
  void add_byte_level(const JsonNode& node);
  void add_pattern(const JsonNode& node, const std::string& pattern, Behavior behavior,
                   bool invert);
  static Behavior parse_behavior(const JsonNode& node);
  static void find_cuts(const Stage& stage, std::string_view piece, Scratch& scratch);
  static void merge_cuts(Behavior behavior, std::vector<Scratch::Cut>& cuts);
  static void split_pieces(const Stage& stage, std::string_view text, Scratch& scratch);
  static void put_spaces(std::string_view text, Scratch& scratch);
  static void put_metaspaces(const Metaspace& metaspace, std::string_view text, Scratch& scratch);

  std::vector<Stage> stages_;
  bool has_patterns_ = false;
  bool is_byte_level_ = false;
};

}  // namespace cadre::text

// The decoder of tokenizer.json: tokens back to text, one token at a time, so that whole texts and
// streams come from the same code.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "generation/tokenizer/json_node.h"

namespace cadre::text {

class Decoder {
 public:
  Decoder() = default;  // tokens with spaces between them

  /// ByteLevel, ByteFallback, Metaspace, Replace (of a string), Strip, Fuse and Sequence; else
  /// Unsupported.
  static Decoder parse(const JsonNode& node);

  /// Where a decoding is: what came that cannot be given out yet.
  struct State {
    struct Step {
      std::string pending;  // bytes of an unfinished character
      size_t count = 0;     // tokens or characters passed
    };
    std::vector<Step> steps;
    size_t longest_token = 0;
  };

  /// Appends the text that is final after this token.
  void push(std::string_view token, State& state, std::string& out) const;
  /// Appends the rest; the state is fresh again.
  void finish(State& state, std::string& out) const;

 private:
  enum class Kind { kJoin, kByteLevel, kByteFallback, kMetaspace, kReplace, kStrip };
  struct Step {
    Kind kind;
    std::string pattern;
    std::string content;
    size_t strip_begin = 0;
    size_t strip_end = 0;
    bool fused = false;  // sees all tokens as one
  };

  void add(const JsonNode& node);
  void add_step(const JsonNode& node, Step step);
  void run(size_t index, std::string token, State& state, std::string& out) const;
  void emit_bytes(size_t index, State& state, std::string& out) const;
  static void strip(const Step& step, State::Step& state, std::string& token);

  std::vector<Step> steps_ = {{Kind::kJoin, "", "", 0, 0, false}};
  bool is_fused_ = false;  // while parsing
};

}  // namespace cadre::text

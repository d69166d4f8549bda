// Added tokens: found in the text before anything else is split, with the rules single_word,
// lstrip, rstrip and normalized.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "generation/tokenizer/json_node.h"
#include "generation/tokenizer/normalizer.h"
#include "generation/tokenizer/split_pattern.h"
#include "generation/tokenizer/vocabulary.h"

namespace cadre::text {

struct AddedToken {
  std::string content;
  TokenId id = 0;
  bool single_word = false;
  bool lstrip = false;
  bool rstrip = false;
  bool normalized = false;
  bool special = false;
};

/// Leftmost-longest search for many strings. Time: text length times the depth of partial matches.
class StringMatcher {
 public:
  struct Hit {
    size_t begin, end;
    int32_t pattern;
  };
  void add(std::string_view pattern, int32_t number);  // not empty; the first of equal ones counts
  bool empty() const { return nodes_.size() == 1; }
  /// The first hit at or after `begin`; pattern is -1 when there is none.
  Hit find(std::string_view text, size_t begin) const;

 private:
  struct Edge {
    unsigned char byte;
    uint32_t node;
  };
  struct Node {
    std::vector<Edge> edges;
    int32_t pattern = -1;
  };
  const Edge* edge(const Node& node, unsigned char byte) const;
  std::vector<Node> nodes_ = std::vector<Node>(1);
  bool starts_[256] = {};
};

/// A stretch of text: one added token, or text to be tokenized.
struct Section {
  Span span;
  TokenId id = kNoToken;  // kNoToken: text
};

class AddedTokens {
 public:
  /// Reads "added_tokens". `model`: the model's own tokens, which may be listed again.
  static AddedTokens parse(const JsonNode& list, const Vocabulary& model,
                           const Normalizer& normalizer);

  /// Those that the model does not have.
  const Vocabulary& vocabulary() const { return vocabulary_; }

  /// Cuts text at the tokens that are looked for before normalization, or at those after it.
  void split_raw(std::string_view text, std::vector<Section>& out) const { split(text, raw_, out); }
  void split_normalized(std::string_view text, std::vector<Section>& out) const {
    split(text, normalized_, out);
  }

  bool is_special(TokenId id) const;

  /// The text that ids with the rule `normalized` decode to, where normalizing changed it (as in
  /// the reference from 0.23 on); null for all others.
  const std::string* respelled(TokenId id) const;

 private:
  void split(std::string_view text, const StringMatcher& matcher, std::vector<Section>& out) const;
  void add_to_matchers(const Normalizer& normalizer);

  void add_to_vocabulary(const JsonNode& node, const AddedToken& token, const Vocabulary& model);

  Vocabulary vocabulary_;
  std::vector<AddedToken> tokens_;
  std::vector<bool> special_;  // by id
  std::unordered_map<TokenId, std::string> respelled_;
  StringMatcher raw_;
  StringMatcher normalized_;
};

}  // namespace cadre::text

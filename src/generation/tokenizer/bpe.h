// Byte-pair encoding of one piece: symbols merged by rank until no pair is left that may merge.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "generation/tokenizer/json_node.h"
#include "generation/tokenizer/merge_table.h"
#include "generation/tokenizer/vocabulary.h"
#include "generation/tokenizer/word_cache.h"

namespace cadre::text {

class Bpe {
 public:
  /// Reads "model". `byte_level`: pieces are bytes that the vocabulary spells in the byte alphabet.
  static Bpe parse(const JsonNode& model, bool byte_level);

  const Vocabulary& vocabulary() const { return vocabulary_; }

  /// Buffers of one thread.
  struct Scratch {
    WordCache cache;
    std::string spelled;
    std::vector<TokenId> ids;
    std::vector<Merge> merges;  // [i]: of the symbol at i and the one after it
    struct Symbol {
      Merge merge;  // of it and the next one
      TokenId id;
      uint32_t previous;
      uint32_t next;
    };
    std::vector<Symbol> symbols;
    std::vector<uint64_t> heap;   // rank and position of merges that may still hold
    uint64_t num_candidates = 0;  // merges put on the heap so far: the measure of merge_long's work
  };

  /// Appends the ids of a piece that is not empty. Time O(n log n) for n characters. Throws Error
  /// when the piece has 2^32 or more of them.
  void encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& out) const;

 private:
  void read_vocabulary(const JsonNode& node);
  void read_merges(const JsonNode& node);
  void read_characters();
  void note_join(std::string_view left, std::string_view right);
  void encode_part(std::string_view part, Scratch& scratch, std::vector<TokenId>& out) const;
  void encode_uncached(std::string_view part, Scratch& scratch) const;
  void spell_characters(std::string_view part, std::vector<TokenId>& ids) const;
  TokenId id_of_character(std::string_view character) const;
  bool spell_as_bytes(std::string_view character, std::vector<TokenId>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void look_up_merge(Scratch& scratch, uint32_t position) const;
  static void push_if_lowest(Scratch& scratch, uint32_t position);
  void merge_at(Scratch& scratch, uint32_t position) const;

  Vocabulary vocabulary_;
  MergeTable merges_;
  JoinFilter joins_;  // of characters; byte level: of bytes
  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool fuse_unknown_ = false;
  bool byte_fallback_ = false;
  bool can_cut_ = false;  // joins_ tells where pieces may be cut
  bool merges_byte_tokens_ = false;
  TokenId unknown_ = kNoToken;
  std::vector<TokenId> ascii_ids_;  // [128] of characters; unused at byte level
  std::vector<TokenId> byte_ids_;   // [256] byte level: of the byte's character; else of "<0xHH>"
};

}  // namespace cadre::text

// Byte-pair encoding of one piece: symbols merged by rank until no pair is left that may merge.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "generation/tokenizer/json_node.h"
#include "generation/tokenizer/vocabulary.h"
#include "generation/tokenizer/word_cache.h"

namespace cadre::text {

/// Pair of ids -> rank and id of what it becomes.
class MergeTable {
 public:
  struct Merge {
    uint32_t rank;
    TokenId id;
  };
  void reserve(size_t num_merges);
  void set(TokenId left, TokenId right, Merge merge);  // replaces an earlier one
  const Merge* find(TokenId left, TokenId right) const;

 private:
  struct Slot {
    uint64_t key = ~uint64_t{0};
    Merge merge{};
  };
  size_t place_of(uint64_t key) const;
  std::vector<Slot> slots_;  // open addressing, power of two, at most half full
};

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
    std::vector<uint32_t> ranks;
    std::vector<int64_t> previous;
    std::vector<int64_t> next;
    struct Candidate {
      uint32_t rank;
      TokenId id;
      int64_t position;
    };
    std::vector<Candidate> heap;
  };

  /// Appends the ids of a piece that is not empty. Time O(n log n) for n characters.
  void encode(std::string_view piece, Scratch& scratch, std::vector<TokenId>& out) const;

 private:
  void read_vocabulary(const JsonNode& node);
  void read_merges(const JsonNode& node);
  void read_single_bytes();
  void encode_uncached(std::string_view piece, Scratch& scratch) const;
  void spell_characters(std::string_view piece, std::vector<TokenId>& ids) const;
  bool spell_as_bytes(std::string_view character, std::vector<TokenId>& ids) const;
  void merge_short(Scratch& scratch) const;
  void merge_long(Scratch& scratch) const;
  void push_candidate(Scratch& scratch, int64_t position) const;
  uint32_t rank_of(TokenId left, TokenId right) const;

  Vocabulary vocabulary_;
  MergeTable merges_;
  bool byte_level_ = false;
  bool ignore_merges_ = false;
  bool fuse_unknown_ = false;
  bool byte_fallback_ = false;
  TokenId unknown_ = kNoToken;
  std::vector<TokenId> byte_ids_;  // [256] byte level: of the byte's character; else of "<0xHH>"
};

}  // namespace cadre::text

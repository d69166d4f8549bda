// Tokens and their ids, both ways. Text lies in one block; ids may have gaps.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "cadre/tokenizer.h"

namespace cadre::text {

/// Ids beyond this are taken for damage: the table is as long as the highest id.
inline constexpr TokenId kMaxTokenId = (1 << 22) - 1;
inline constexpr TokenId kNoToken = -1;

class Vocabulary {
 public:
  void reserve(size_t num_tokens);

  /// Adds a token; the caller has checked that neither text nor id (0 to kMaxTokenId) is taken.
  void add(std::string_view token, TokenId id);

  TokenId find(std::string_view token) const;  // kNoToken when unknown
  bool has(TokenId id) const;
  std::string_view token(TokenId id) const;  // of an id that exists; empty otherwise
  int64_t size() const { return size_; }
  TokenId max_id() const { return static_cast<TokenId>(entries_.size()) - 1; }

 private:
  struct Entry {
    size_t offset = 0;
    int64_t length = -1;  // -1: a gap
  };
  void index(TokenId id, std::string_view token);

  std::string block_;
  std::vector<Entry> entries_;  // by id
  std::vector<TokenId> slots_;  // open addressing, power of two
  int64_t size_ = 0;
};

}  // namespace cadre::text

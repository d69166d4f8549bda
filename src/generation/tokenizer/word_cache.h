// Remembers the ids of pieces seen before. Bounded and lossy: a full neighbourhood is overwritten.
#pragma once

#include <cstdint>
#include <span>
#include <string_view>
#include <vector>

#include "cadre/tokenizer.h"

namespace cadre::text {

class WordCache {
 public:
  /// Pieces longer than this, or with more ids, are not kept.
  static constexpr size_t kMaxBytes = 32;
  static constexpr size_t kMaxIds = 6;

  /// True when known: its ids are appended to `out`.
  bool find(std::string_view piece, std::vector<TokenId>& out) const;
  void insert(std::string_view piece, std::span<const TokenId> ids);

 private:
  struct Slot {
    uint8_t num_bytes = 0;  // 0: free
    uint8_t num_ids = 0;
    char bytes[kMaxBytes + 6];
    TokenId ids[kMaxIds];
  };
  static_assert(sizeof(Slot) == 64);
  static constexpr size_t kSlots = size_t{1} << 15;  // 2 MiB
  static constexpr size_t kProbes = 4;
  static uint64_t hash(std::string_view piece);

  std::vector<Slot> slots_;
};

}  // namespace cadre::text

// The merges of byte-pair encoding: which pairs become what and when, and where none can happen.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "cadre/token_id.h"

namespace cadre::text {

/// Rank and what the pair becomes in one number, so that the smaller merge comes first.
using Merge = uint64_t;
inline constexpr Merge kNoMerge = std::numeric_limits<Merge>::max();
constexpr Merge make_merge(uint32_t rank, TokenId id) {
  return static_cast<Merge>(rank) << 32 | static_cast<uint32_t>(id);
}
constexpr uint32_t rank_of(Merge merge) { return static_cast<uint32_t>(merge >> 32); }
constexpr TokenId id_of(Merge merge) { return static_cast<TokenId>(merge & 0xFFFFFFFFu); }

/// Pair of ids -> merge. Most pairs that are asked for have none: a filter that fits the cache
/// tells so before the table, which does not.
class MergeTable {
 public:
  void reserve(size_t num_merges);
  void set(TokenId left, TokenId right, Merge merge);  // replaces an earlier one
  /// kNoMerge when there is none.
  Merge find(TokenId left, TokenId right) const {
    const uint64_t key = key_of(left, right);
    const uint64_t hash = hash_of(key);
    if ((filter_[filter_word(hash)] & filter_bit(hash)) == 0) return kNoMerge;
    const Slot& slot = slots_[place_of(key, hash)];
    return slot.key == key ? slot.merge : kNoMerge;
  }

 private:
  static constexpr uint64_t kFree = ~uint64_t{0};
  struct Slot {
    uint64_t key = kFree;
    Merge merge = kNoMerge;
  };
  static uint64_t key_of(TokenId left, TokenId right) {
    return static_cast<uint64_t>(static_cast<uint32_t>(left)) << 32 | static_cast<uint32_t>(right);
  }
  static uint64_t hash_of(uint64_t key) {
    const uint64_t mixed = key * 0x9E3779B97F4A7C15u;
    return mixed ^ mixed >> 32;
  }
  size_t filter_word(uint64_t hash) const { return hash >> 6 & (filter_.size() - 1); }
  static uint64_t filter_bit(uint64_t hash) { return uint64_t{1} << (hash & 63); }
  size_t place_of(uint64_t key, uint64_t hash) const {
    const size_t mask = slots_.size() - 1;
    size_t place = hash & mask;
    while (slots_[place].key != key && slots_[place].key != kFree) place = (place + 1) & mask;
    return place;
  }

  std::vector<Slot> slots_;       // open addressing, power of two, at most half full
  std::vector<uint64_t> filter_;  // a bit for each hash that was set; four bits a slot
};

/// Which neighbouring characters some merge joins: last of its left half, first of its right half.
/// Where none joins two neighbours, a text can be cut and its parts encoded alone.
class JoinFilter {
 public:
  void add(char32_t left, char32_t right) { bits_[slot(left, right)] = true; }
  /// False is certain; true may be another pair's.
  bool may_join(char32_t left, char32_t right) const { return bits_[slot(left, right)]; }

 private:
  static constexpr int kBits = 18;
  static size_t slot(char32_t left, char32_t right) {
    const uint64_t key = static_cast<uint64_t>(left) << 32 | right;
    return key * 0x9E3779B97F4A7C15u >> (64 - kBits);
  }
  std::vector<bool> bits_ = std::vector<bool>(size_t{1} << kBits);
};

}  // namespace cadre::text

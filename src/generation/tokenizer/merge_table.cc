#include "generation/tokenizer/merge_table.h"

#include <algorithm>
#include <bit>

namespace cadre::text {

void MergeTable::reserve(size_t num_merges) {
  slots_.resize(std::bit_ceil(2 * num_merges + 2));
  filter_.resize(std::max<size_t>(slots_.size() / 16, 1));
}

void MergeTable::set(TokenId left, TokenId right, Merge merge) {
  const uint64_t key = key_of(left, right);
  const uint64_t hash = hash_of(key);
  filter_[filter_word(hash)] |= filter_bit(hash);
  slots_[place_of(key, hash)] = {key, merge};
}

}  // namespace cadre::text
